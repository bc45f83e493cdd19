"""`slo-bench tune server`: a real server's own settings, measured on the real server."""

from __future__ import annotations

from typing import Annotated

import typer

from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options import tune as tune_options

EXAMPLES = (
    "slo-bench tune server --backend vllm --model path/to/model --objective goodput --rate 2 "
    "--search max_num_seqs=16,64,256",
    "slo-bench tune server --backend sglang --model path/to/model --search "
    "max_running_requests=8..64 --max-time 3600",
    "slo-bench tune server --backend vllm --model path/to/model --rate 2 --objective ttft_p99 "
    "--search server.gpu-memory-utilization=0.8,0.9 --search max_num_batched_tokens=2048,8192",
)

Backend = Annotated[
    str, typer.Option("--backend", "-b", metavar="vllm|sglang", help="What is started.")
]
Model = Annotated[
    str, typer.Option("--model", "-m", metavar="PATH", help="A folder, or a name on the hub.")
]


def tune_server(
    backend: Backend,
    model: Model,
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
    no_confirm: tune_options.NoConfirm = False,
    workload: options.Workload = None,
    arrivals: options.Arrivals = None,
    warmup: options.Warmup = None,
    slo: options.Slo = None,
    slo_scale: options.SloScale = None,
    seed: options.Seed = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    instances: options.Instances = None,
    router: options.Router = None,
    server_arg: options.ServerArg = None,
    body: options.Body = None,
    time_limit: options.TimeLimit = None,
    processes: options.Processes = None,
    storage: tune_options.Storage = None,
    study: tune_options.Study = None,
    out: tune_options.Out = None,
    no_report: tune_options.NoReport = False,
    as_json: tune_options.AsJson = False,
) -> None:
    """Tune a real server: it is started, measured and stopped for every configuration.

    Parameters are the server's own options (see `slo-bench list systems vllm`); others are searched
    as server.NAME=A,B, where NAME is the server's option without its dashes. A configuration with
    which the server does not start or dies is a failed trial, whose log is kept. To go on:
    `slo-bench tune --resume --out DIR`.
    """
    given = dict(locals()) | {"resume": False, "executor": "local", "address": None, "jobs": None}
    from ..output.tune import tuned

    if backend not in ("vllm", "sglang"):
        raise SloBenchError(f"--backend must be vllm or sglang but is {backend!r}")
    experiment, settings = tune_options.asked_of(given, backend)
    tuned(experiment, settings, given)
