"""Measure, compare and tune how LLM serving systems meet their latency objectives."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .harness.experiment import Experiment as Experiment

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__"]


def __getattr__(name: str) -> object:
    # Experiment brings pandas and pydantic; a bare `import slo_bench` (and --help) should not.
    if name == "Experiment":
        from .harness.experiment import Experiment

        return Experiment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
