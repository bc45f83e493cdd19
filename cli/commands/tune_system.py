"""`slo-bench tune SYSTEM`: a system, or a file that says what is tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import declared as options
from ..options import tune as tune_options
from ..options.completion import listed

EXAMPLES = (
    "slo-bench tune sarathi",
    "slo-bench tune slo-odbs --slo 'e2e=uniform(1,350)' --search slo_weight=0..10 "
    "--search output_weight=0..10 --trials 30 --confirm-workload azure-conv",
    "slo-bench tune ascendra --gpus 4 --search n_lp=1..3 --search n_hp=1..3 --search threshold",
    "slo-bench tune vllm --objective capacity --objective cost --search instances=1..4 "
    "--search tp=1,2",
    "slo-bench tune vllm --objective ttft_p99 --rate 4 --search parameters --sampler random",
    "slo-bench tune --resume --out runs/tune-sarathi",
    "slo-bench tune tune.toml --trials 20",
    "slo-bench tune vllm --executor ray --address 10.0.0.1:6379 --jobs 8 --trials 100",
)

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[SYSTEM|FILE.toml]",
        help="A system by name, FILE.py[:CLASS] with one of your own, or an experiment file with a "
        r"table \[tune].",
        autocompletion=listed("systems"),
    ),
]


def tune_system(
    what: What = None,
    objective: tune_options.Objective = None,
    target: tune_options.Target = None,
    rate: tune_options.Rate = None,
    tolerance: tune_options.Tolerance = None,
    search: tune_options.Search = None,
    set_: tune_options.Set = None,
    sampler: tune_options.Sampler = None,
    sampler_seed: tune_options.SamplerSeed = None,
    trials: tune_options.Trials = None,
    max_requests: tune_options.MaxRequests = None,
    max_time: tune_options.MaxTime = None,
    requests: tune_options.Requests = None,
    seeds: tune_options.Seeds = None,
    confirm_workload: tune_options.ConfirmWorkload = None,
    confirm: tune_options.Confirm = None,
    no_confirm: tune_options.NoConfirm = False,
    workload: options.Workload = None,
    arrivals: options.Arrivals = None,
    warmup: options.Warmup = None,
    slo: options.Slo = None,
    slo_scale: options.SloScale = None,
    seed: options.Seed = None,
    model: options.Model = None,
    gpu: options.Gpu = None,
    gpus: options.Gpus = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    instances: options.Instances = None,
    router: options.Router = None,
    embedder: options.Embedder = None,
    models: options.Models = None,
    profile: options.Profile = None,
    length_predictor: options.LengthPredictor = None,
    overlong_requests: options.OverlongRequests = None,
    backend: options.Backend = None,
    server_arg: options.ServerArg = None,
    storage: tune_options.Storage = None,
    study: tune_options.Study = None,
    out: tune_options.Out = None,
    resume: tune_options.Resume = False,
    executor: options.Executor = "local",
    address: options.Address = None,
    jobs: tune_options.Jobs = None,
    no_report: tune_options.NoReport = False,
    as_json: tune_options.AsJson = False,
) -> None:
    """Tune a system: every parameter, or what --search names; the word `system` may be left out."""
    given = dict(locals())
    from ..output.tune import tuned

    is_file = what is not None and what.endswith(".toml")
    given["file"] = Path(what) if what is not None and is_file else None
    experiment, settings = tune_options.asked_of(given, None if is_file else what)
    tuned(experiment, settings, given)
