"""Measure, compare and tune how LLM serving systems meet their latency objectives.

Run an experiment, systems × rates × seeds, and look at what it found. `folder` is where results
go. A `RunResult` also reads a run folder that was written before.

>>> from slo_bench import Experiment, RunResult
>>> study = Experiment(systems=["vllm", "sarathi"], rates=[4], requests=100, seeds=2)
>>> result = study.run(folder / "study", jobs=1)
>>> result.cells[["system", "rate_rps", "seed", "attainment"]].shape
(4, 4)
>>> requests = RunResult(folder / "study").requests("vllm_rate-4_seed-0")
>>> len(requests), bool((requests["first_token_s"] > requests["arrival_s"]).all())
(100, True)

Write a report of several runs, or put its figures into a notebook.

>>> from slo_bench import plotly_figures, write_report
>>> write_report([result.folder], folder / "report.html").name
'report.html'
>>> "goodput" in plotly_figures([result.folder])
True

Compare two sets of results, or two systems of one: which differences are more than noise?

>>> from slo_bench import compare, read_results
>>> found = read_results(result.folder)
>>> comparison = compare(found, found, systems=("vllm", "sarathi"))
>>> [row.verdict in ("better", "worse", "none") for row in comparison.rows[:2]]
[True, True]

Find the highest rate at which requests meet their SLO, with its 95 % interval.

>>> from slo_bench import CapacityOptions, search_capacity
>>> options = CapacityOptions(targets=(0.9,), tolerance=0.3)
>>> capacity = search_capacity(
...     Experiment(systems="vllm", requests=100), folder / "capacity", options=options
... ).rows()[0]
>>> 1 < capacity["low_rps"] <= capacity["capacity_rps"] <= capacity["high_rps"] < 50
True

Tune parameters, placement or server settings for an objective.

>>> from slo_bench import TuneSettings, tune
>>> settings = TuneSettings(
...     objectives=("ttft_p99",), rate_rps=4, trials=2, confirm=False,
...     search={"chunk_tokens": [512, 2048]},
... )
>>> tuned = tune(Experiment(systems="sarathi", requests=100, seeds=1), settings, folder / "tuned")
>>> tuned.winners[0].row.configuration["chunk_tokens"] in (512, 2048)
True

Find the cheapest GPUs that carry a load.

>>> from slo_bench import PlanOptions, TargetLoad, plan_cheapest
>>> planned = plan_cheapest(
...     Experiment(systems="vllm"),
...     TargetLoad(rate_rps=1, most_gpus=1, plans=1),
...     PlanOptions(kinds=("a100-80g",)),
... )
>>> planned.plans[0].offer.gpu
'a100-80g'

Make a workload, look at it and write it as a trace that `Experiment(workload=...)` reads.

>>> from slo_bench import Request, Workload, load_source, parse_slo, write_csv
>>> source = load_source("azure-conv")
>>> workload = source.make(rate_rps=4, requests=100, seed=0, slo=parse_slo("ttft=1"))
>>> isinstance(workload, Workload), isinstance(workload[0], Request), workload[0].slo.ttft_s
(True, True, 1.0)
>>> write_csv(workload, folder / "mine.csv")

Experiments that come with the package have names (`suites`). Whatever is wrong with an input is a
`SloBenchError`, which says what would be right.

>>> from slo_bench import SloBenchError, suites
>>> "ascendra" in suites()
True
>>> try:
...     Experiment(systems="vlm").plan()
... except SloBenchError as error:
...     print(error)
unknown system 'vlm'; did you mean vllm or qlm or vllm-v0?

Authors of policies find what they need in `slo_bench.policy`; `from slo_bench import Policy` works
as well.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import policy as policy
    from .harness.experiments.experiment import Experiment as Experiment
    from .harness.experiments.experiment import RunResult as RunResult
    from .harness.experiments.suite_files import suites as suites
    from .policy import *  # noqa: F403
    from .reports.compare.comparing import compare as compare
    from .reports.compare.comparing import read_results as read_results
    from .reports.figures.notebook import plotly_figures as plotly_figures
    from .reports.pages.run_page import write_report as write_report
    from .tuner.capacity.capacity_options import CapacityOptions as CapacityOptions
    from .tuner.capacity.folder import CapacityResult as CapacityResult
    from .tuner.capacity.folder import search_capacity as search_capacity
    from .tuner.planning.plan_search import PlanOptions as PlanOptions
    from .tuner.planning.plan_search import TargetLoad as TargetLoad
    from .tuner.planning.plan_search import plan_cheapest as plan_cheapest
    from .tuner.search.settings import TuneSettings as TuneSettings
    from .tuner.search.tuning_run import tune as tune
    from .workloads.errors import SloBenchError as SloBenchError
    from .workloads.request import Request as Request
    from .workloads.slo import parse_slo as parse_slo
    from .workloads.source import load_source as load_source
    from .workloads.workload import Workload as Workload
    from .workloads.writer import write_csv as write_csv

__version__ = "0.2.0"

# These bring numpy, pandas and pydantic; a bare `import slo_bench` (and --help) should not.
_NAMES_OF = {
    ".harness.experiments.experiment": ("Experiment", "RunResult", "suites"),
    ".reports.compare.comparing": ("compare", "read_results"),
    ".reports.figures.notebook": ("plotly_figures",),
    ".reports.pages.run_page": ("write_report",),
    ".tuner.capacity.capacity_options": ("CapacityOptions",),
    ".tuner.capacity.folder": ("CapacityResult", "search_capacity"),
    ".tuner.planning.plan_search": ("PlanOptions", "TargetLoad", "plan_cheapest"),
    ".tuner.search.settings": ("TuneSettings",),
    ".tuner.search.tuning_run": ("tune",),
    ".workloads.errors": ("SloBenchError",),
    ".workloads.request": ("Request",),
    ".workloads.slo": ("parse_slo",),
    ".workloads.source": ("load_source",),
    ".workloads.workload": ("Workload",),
    ".workloads.writer": ("write_csv",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name], __name__), name)
    # All else is in `policy`: classes, types, UNLIMITED and `parameter`.
    if name in ("policy", "parameter", "__all__") or name[:1].isupper():
        policy = import_module(".policy", __name__)
        if name == "policy":
            return policy
        if name == "__all__":
            return sorted(["__version__", "policy", *_MODULE_OF, *policy.__all__])
        if name in policy.__all__:
            return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names_of_policy = import_module(".policy", __name__).__all__
    return sorted({*globals(), *_MODULE_OF, *names_of_policy, "policy"})
