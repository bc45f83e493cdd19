"""What `--validate` of `slo-bench run` changes, and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...harness.experiments.experiment import Experiment
from ...harness.validation.run_replay import ValidatedPoint
from ...workloads.errors import SloBenchError

_REPETITIONS = 3  # of every level, where nothing else is said: how steady is the machine?


def validated(experiment: Experiment, profile: Path | None) -> Experiment:
    """With what must be measured so that its levels can be simulated afterwards.

    Raises:
        SloBenchError: there is nothing real to compare with, or nothing tells how long steps take.
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
                "--validate cannot look into a server that runs already: its steps are not logged, "
                "so nothing tells how long they take. Give step times with --profile FILE, or let "
                "slo-bench start the server (--backend vllm or sglang)"
            )
        more: dict[str, object] = {}
    else:
        more = {"validated": True} if profile is None else {"step_log": True}
    if "repetitions" not in experiment.server.model_fields_set:
        more["repetitions"] = _REPETITIONS
    return experiment.model_copy(update={"server": experiment.server.model_copy(update=more)})


def levels_shown(levels: Sequence[ValidatedPoint]) -> None:
    """Print the error tables."""
    from ...reports.pages.validation import levels_text
    from .console import terminal

    terminal().print(levels_text(levels))
