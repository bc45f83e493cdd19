"""`slo-bench tune SYSTEM`: a system, or a file that says what is tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...tuner.search.settings import TuneSettings
from ..options import declared as options
from ..options import tune as tune_options
from ..options.completion import listed
from ..options.from_schema import Given, Offer, with_options

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
        help="System by name, FILE.py[:CLASS] with your own, or an experiment file with a table "
        "\\[tune].",
        autocompletion=listed("systems"),
    ),
]


Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help="Number of parallel trials, each in its own process. Default: 1; with --executor ray "
        "the number of cores of the cluster.",
        rich_help_panel=options.RUN,
    ),
]


@with_options
def tune_system(
    given: Annotated[
        Given,
        Offer(without=(*tune_options.NOT_TUNED, "client.base_urls"), changed=tune_options.CHANGED),
    ],
    tuning: Annotated[Given, Offer(TuneSettings)],
    what: What = None,
    storage: tune_options.Storage = None,
    study: tune_options.Study = None,
    out: tune_options.Out = None,
    resume: tune_options.Resume = False,
    executor: options.Executor = "local",
    address: options.Address = None,
    jobs: Jobs = None,
    no_report: tune_options.NoReport = False,
    as_json: tune_options.AsJson = False,
) -> None:
    """Tune a system: every parameter, or those given by --search; the word `system` may be left
    out.
    """
    from ..options.executor import executor_of
    from ..output.tune import Kept, tuned

    if what is not None and what.endswith(".toml"):
        given, what = replace(given, file=Path(what)), None
    experiment, settings = tune_options.asked_of(
        given, tuning, what, options.resumed_in(out, resume)
    )
    kept = Kept(out, storage, study, resume)
    where = executor_of(executor, address)
    tuned(experiment, settings, kept, where, jobs, no_report=no_report, as_json=as_json)
