"""Calibrates on a running server's metrics: step times, front end and KV room as they were seen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ....predictors.model_spec import ModelSpec
from ....predictors.operators.front_end import FrontEnd, front_end
from ....predictors.operators.server_version import NEWEST, ServerVersion
from ....predictors.profiles.calibration import Calibration
from ....predictors.profiles.profile_format import Profile, write_profile
from ....predictors.profiles.scope import Range, Scope
from ....workloads.errors import SloBenchError
from ...core.records.request_records import Outcome
from ...experiments.execution.cell_specs import CellSpec, WorkloadSpec
from ...experiments.execution.cells import predicted_output_tokens, simulated, workload_of
from ...experiments.execution.experiment_plan import plan
from ...experiments.experiment import Experiment
from ...load_generator.observed import ObservedServer
from .calibrate import Calibrated

_PARTS = 10  # of the time, whose rates make the scope's
_NAMES = {"itl": "tpot"}  # as others call it


def calibrate_server(
    server: ObservedServer,
    spec: ModelSpec,
    model_file: str,
    experiment: Experiment,
    folder: Path,
    *,
    day: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> Calibrated:
    """Learn a profile from what was seen of a server, and judge each half of the time by the other.

    Args:
        server: what was seen.
        spec: its model.
        model_file: file of the model, where no catalogue has it.
        experiment: the server's settings, and requests like those that it had.
        folder: for files of the simulations.
        day: of the calibration.
        progress: called with what goes on.

    Raises:
        SloBenchError: too little was seen, or it cannot be simulated.
    """
    profile = observed_profile(server, spec, model_file, day=day)
    learned = profile.calibration
    assert learned is not None
    progress("simulating the load that was seen")
    after = _errors(server, server, spec, model_file, experiment, folder)
    worst: dict[str, float] = {}
    middle = len(server.windows) // 2
    halves = [
        dataclasses.replace(server, windows=windows)
        for windows in (server.windows[:middle], server.windows[middle:])
    ]
    with suppress(SloBenchError):  # a half has too few windows with requests
        for source, other in (halves, halves[::-1]):
            progress("judging each half by the other")
            for name, off in _errors(source, other, spec, model_file, experiment, folder).items():
                worst[name] = max(worst.get(name, 0.0), abs(off))
    learned = dataclasses.replace(learned, after_percent=after, held_out_percent=worst)
    return Calibrated(dataclasses.replace(profile, calibration=learned), learned, server.notes)


def observed_profile(
    server: ObservedServer, spec: ModelSpec, model_file: str, *, day: str = ""
) -> Profile:
    """Step times, front end and scope of what was seen.

    Raises:
        SloBenchError: too few windows had requests.
    """
    engine = server.last.engine
    version = ServerVersion(engine, "") if engine in NEWEST else ServerVersion()
    learned = Calibration(
        origin=(f"metrics of {engine}",),
        tokens=(1.0,),
        factors=(1.0,),
        requests=round(server.requests),
        steps=len(server.steps),
    )
    parts = np.array_split(np.arange(len(server.windows)), min(_PARTS, len(server.windows)))
    rates_rps = [
        dataclasses.replace(server, windows=tuple(server.windows[k] for k in part)).arrival_rps
        for part in parts
    ]
    running = [window.after.figures.get("running", 0.0) for window in server.windows]
    scope = Scope(
        engine if engine in NEWEST else "",
        day,
        rate_rps=_range(rates_rps),
        prompt_tokens=_range(server.lengths("prompt").at(np.array([0.01, 0.99])).tolist()),
        output_tokens=_range(server.lengths("output").at(np.array([0.01, 0.99])).tolist()),
        concurrency=_range(running),
    )
    return dataclasses.replace(
        server.profile(spec, model_file),
        calibration=learned,
        front_end=_front_end(server, front_end(version)),
        scope=scope,
    )


def _front_end(server: ObservedServer, usual: FrontEnd) -> FrontEnd | None:
    """What of the mean TTFT passed outside the engine; None: the server does not tell."""
    outside_s = server.mean_s("ttft") - server.mean_s("queue") - server.mean_s("prefill")
    if math.isnan(outside_s):
        return None
    latency_s = max(0.0, outside_s - usual.request_s)
    return dataclasses.replace(usual, latency_s=round(latency_s, 6), token_s=0.0)


def _range(values: list[float]) -> Range:
    return float(f"{min(values):.4g}"), float(f"{max(values):.4g}")


def _errors(
    source: ObservedServer,
    judged: ObservedServer,
    spec: ModelSpec,
    model_file: str,
    experiment: Experiment,
    folder: Path,
) -> dict[str, float]:
    """Errors of the means of `judged` by what `source` tells, in percent."""
    header = write_profile(observed_profile(source, spec, model_file), folder / "seen.toml")
    rows = folder / "judged.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in judged.trace()), "utf-8")
    [cell] = plan(experiment.model_copy(update={"profile": (str(header),)})).cells
    ratios = seen_over_simulated(cell, judged, str(rows))
    return {_NAMES.get(name, name): round(100 / r - 100, 2) for name, r in ratios.items()}


def seen_over_simulated(spec: CellSpec, server: ObservedServer, workload: str) -> dict[str, float]:
    """Mean latencies of a server over those of the same load, the file `workload`, simulated."""
    spec = dataclasses.replace(
        spec,
        workload=WorkloadSpec(workload),
        rate_rps=None,
        replay_speed=1.0,
        requests=None,
    )
    drawn = workload_of(spec)
    records = simulated(spec, drawn, predicted_output_tokens(spec, drawn)).records
    done = records.outcome == Outcome.FINISHED
    if not done.any():
        return {}
    ttft_s, e2e_s = records.ttft_s[done], records.e2e_s[done]
    decodes = np.maximum(0, drawn.output_tokens[done] - 1)
    means_s = {
        "ttft": float(ttft_s.mean()),
        "itl": float((e2e_s - ttft_s).sum() / max(1, decodes.sum())),
        "e2e": float(e2e_s.mean()),
    }
    observed_s = {name: server.mean_s(name) for name in means_s}
    return {
        name: observed_s[name] / means_s[name]
        for name in means_s
        if means_s[name] > 0 and math.isfinite(observed_s[name]) and observed_s[name] > 0
    }
