"""The options of `slo-bench tune`, each declared once, and what they ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...workloads.errors import SloBenchError, UnknownNameError
from .declared import EXECUTION

if TYPE_CHECKING:
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.settings import TuneSettings

SOUGHT = "Objective"
SEARCHED = "Search"
PROVED = "Confirmation"
KEPT = "Execution"

Objective = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="O",
        help="capacity (req/s at --target), goodput, attainment, cost (fewest GPUs), ttft_p50, "
        "ttft_p99, tpot_p50, tpot_p99, itl_p99, e2e_p50 or e2e_p99 (at --rate). Repeated: a Pareto "
        "front. Default: capacity.",
        rich_help_panel=SOUGHT,
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of requests in SLO that capacity and cost are about. Default: 0.9.",
        rich_help_panel=SOUGHT,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Offered rate, req/s, of objectives at one rate.",
        rich_help_panel=SOUGHT,
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of a capacity: how narrow its interval must be, ± that share. Default: 0.03.",
        rich_help_panel=SOUGHT,
    ),
]
Search = Annotated[
    list[str] | None,
    typer.Option(
        "--search",
        metavar="NAME[=LOW..HIGH|A,B,…]",
        help="Search this parameter or setting, and no others: slo_weight (all that it may be), "
        "threshold=1..4000 (…:log by orders of magnitude), tp=1,2,4, slo_weight=0:7:1, or "
        "parameters (all of them). May be repeated. Default: parameters.",
        rich_help_panel=SEARCHED,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Fix a parameter or a setting. May be repeated.",
        rich_help_panel=SEARCHED,
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="tpe, gp (needs the extra torch), cmaes (numbers only), nsga2, random or grid. "
        "Default: tpe; for several objectives nsga2.",
        rich_help_panel=SEARCHED,
    ),
]
SamplerSeed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Of the sampler's draws. Default: 0.", rich_help_panel=SEARCHED),
]
Trials = Annotated[
    int | None,
    typer.Option(metavar="N", help="Configurations to try. Default: 50.", rich_help_panel=SEARCHED),
]
MaxRequests = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Begin no trial once so many requests were spent.",
        rich_help_panel=SEARCHED,
    ),
]
MaxTime = Annotated[
    float | None,
    typer.Option(
        metavar="S", help="Begin no trial after so many seconds.", rich_help_panel=SEARCHED
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "-n",
        metavar="N",
        help="The least in a run of a search. Default: 2000, on a real server 300.",
        rich_help_panel=SEARCHED,
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Runs of a rate, each with a seed of its own, the same for all configurations. "
        "Default: 3.",
        rich_help_panel=SEARCHED,
    ),
]
ConfirmWorkload = Annotated[
    list[str] | None,
    typer.Option(
        "--confirm-workload",
        metavar="W",
        help="Measure winner and default on this workload as well. May be repeated.",
        rich_help_panel=PROVED,
    ),
]
Confirm = Annotated[
    str | None,
    typer.Option(
        "--confirm",
        metavar="vllm|sglang",
        help="Measure winner and default on this real server as well.",
        rich_help_panel=PROVED,
    ),
]
NoConfirm = Annotated[
    bool,
    typer.Option("--no-confirm", help="No runs on fresh seeds in the end.", rich_help_panel=PROVED),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Any Optuna storage (sqlite:///tune.db, postgresql://…, redis://…, a journal file). "
        "Default: a journal file in --out.",
        rich_help_panel=KEPT,
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of the study in the storage; processes that name the same one share it. Default: "
        "the name of --out.",
        rich_help_panel=KEPT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder, empty or new. Default: a new one under runs.",
        rich_help_panel=KEPT,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with what --out holds, or help another process that works there.",
        rich_help_panel=KEPT,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help="Trials at once, each in its own process. Default: 1; with --executor ray as many "
        "as the cluster has cores.",
        rich_help_panel=EXECUTION,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.html.", rich_help_panel=KEPT)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print all that was found as JSON, and nothing else."),
]

_AS_NAMED = {
    "target": "target",
    "tolerance": "tolerance",
    "rate": "rate_rps",
    "sampler": "sampler",
    "sampler_seed": "sampler_seed",
    "trials": "trials",
    "max_requests": "max_requests",
    "max_time": "max_time_s",
    "confirm": "confirm_backend",
}


def asked_of(given: Mapping[str, Any], system: str | None) -> tuple[Experiment, TuneSettings]:
    """The experiment and the settings that options ask for.

    Args:
        given: the options, by the names that the commands give them.
        system: what is tuned, or None where a file (`given["file"]`) or the folder says it.

    Raises:
        SloBenchError: they contradict each other, or make no experiment.
    """
    from ...harness.experiments.experiment import Experiment
    from ...tuner.search.outcome import ASKED_FILE
    from ...tuner.search.settings import TuneSettings, load
    from .experiment import changed_experiment

    out = given.get("out")
    if given.get("resume"):
        if out is None:
            raise SloBenchError("--resume needs the folder to go on with: --out DIR")
        if not (out / ASKED_FILE).is_file():
            raise SloBenchError(f"there is nothing to resume in {out}: no {ASKED_FILE}")
        base, settings = load(out / ASKED_FILE)
    elif given.get("file") is not None:
        base, settings = load(given["file"])
    elif system is None:
        raise SloBenchError("say what is tuned: a system (slo-odbs), FILE.toml, or server")
    else:
        base, settings = Experiment(systems=(system,)), TuneSettings()
    changes = {ours: given[name] for name, ours in _AS_NAMED.items() if given.get(name) is not None}
    if given.get("objective"):
        changes["objectives"] = tuple(n for one in given["objective"] for n in one.split(","))
        if given.get("sampler") is None:
            changes["sampler"] = ""
    if given.get("search"):
        changes["search"] = searched(given["search"])
    if given.get("confirm_workload"):
        changes["confirm_workloads"] = tuple(given["confirm_workload"])
    if given.get("no_confirm"):
        changes["confirm"] = False
    settings = dataclasses.replace(settings, **changes)
    options = {**given, "sweep": _sweeps(given.get("set_") or [], base.systems[0])}
    return changed_experiment(base, options), settings


def searched(texts: list[str]) -> dict[str, str]:
    """`--search` options: name to range.

    Raises:
        SloBenchError: one cannot be read, or a name is there twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, what = (piece.strip() for piece in text.partition("="))
        if not name or (equals and not what):
            raise SloBenchError(
                f"cannot read --search {text!r}; write NAME, NAME=LOW..HIGH or NAME=A,B,…"
            )
        if name in found:
            raise SloBenchError(f"--search {name} is given twice; keep one of them")
        found[name] = what
    return found


def _sweeps(texts: list[str], system_name: str) -> list[str]:
    """`--set` options as `run --sweep` has them."""
    from ...harness.policies.systems import system
    from ...tuner.search.space import SETTINGS

    found = system(system_name)
    sweeps = []
    for text in texts:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals or not value:
            raise SloBenchError(f"cannot read --set {text!r}; write NAME=VALUE")
        short = name.removeprefix(f"{found.name}.")
        if short in found.bounds():
            sweeps.append(f"{found.name}.{short}={value}")
        elif name in SETTINGS:
            sweeps.append(f"{name}={value}")
        else:
            raise UnknownNameError(
                "parameter or setting in --set", name, [*found.bounds(), *SETTINGS]
            )
        if "," in value:
            raise SloBenchError(f"--set {name} takes one value; several are for --search")
    return sweeps
