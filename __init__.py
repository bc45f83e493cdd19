"""Measure, compare and tune how LLM serving systems meet their latency objectives.

>>> from slo_bench import Experiment, write_report
>>> result = Experiment(systems=["vllm", "sarathi"], rates=[2, 4, 8]).run()  # doctest: +SKIP
>>> result.cells[["system", "rate_rps", "attainment"]]  # doctest: +SKIP
>>> write_report([result.folder], result.folder / "report.html")  # doctest: +SKIP
>>> plotly_figures([result.folder])["goodput"].show()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .harness.experiments.experiment import Experiment as Experiment
    from .harness.experiments.experiment import RunResult as RunResult
    from .reports.figures.notebook import plotly_figures as plotly_figures
    from .reports.pages.run_page import write_report as write_report
    from .workloads.errors import SloBenchError as SloBenchError

__version__ = "0.1.0"
__all__ = [
    "Experiment",
    "RunResult",
    "SloBenchError",
    "__version__",
    "plotly_figures",
    "write_report",
]

# These bring numpy, pandas and pydantic; a bare `import slo_bench` (and --help) should not.
_WHERE = {
    "Experiment": ".harness.experiments.experiment",
    "RunResult": ".harness.experiments.experiment",
    "SloBenchError": ".workloads.errors",
    "plotly_figures": ".reports.figures.notebook",
    "write_report": ".reports.pages.run_page",
}


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
