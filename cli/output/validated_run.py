"""Option `--validate` of `slo-bench run`: changes to the experiment, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...harness.experiments.experiment import Experiment
from ...harness.validation.run_replay import ValidatedPoint
from ...workloads.errors import SloBenchError

_REPETITIONS = 3  # of every level, by default: separates simulation error from noise


def validated(experiment: Experiment, profile: Path | None) -> Experiment:
    """Return the experiment with the measurements that are needed to simulate its levels.

    Raises:
        SloBenchError: the backend is simulated, or no step times are known.
    """
    if experiment.backend == "simulated":
        raise SloBenchError(
            "--validate compares a real server with its simulation; choose one with --backend "
            "vllm or sglang"
        )
    if experiment.records == "none":
        raise SloBenchError("--validate needs per-request records; leave --records none out")
    if experiment.backend == "openai":
        if profile is None:
            raise SloBenchError(
                "--validate needs step times, and a server given by --base-url has no step "
                "log. Give step times with --profile FILE, or let slo-bench start the server "
                "(--backend vllm or sglang)"
            )
        more: dict[str, object] = {}
    else:
        more = {"validated": True} if profile is None else {"step_log": True}
    if "repetitions" not in experiment.server.model_fields_set:
        more["repetitions"] = _REPETITIONS
    return experiment.model_copy(update={"server": experiment.server.model_copy(update=more)})


def levels_shown(levels: Sequence[ValidatedPoint]) -> None:
    """Print the error tables of the levels."""
    from ...reports.pages.validation import levels_text
    from .console import terminal

    terminal().print(levels_text(levels))
