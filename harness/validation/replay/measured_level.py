"""Files of a level that was measured on real servers: requests, settings and step logs."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.profiles.formulas import is_whole, profiled_step_time
from ....predictors.profiles.profile_format import Profile, Source
from ....predictors.profiles.step_time_table import Host
from ....predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from ....workloads.errors import SloBenchError
from ....workloads.parsing import read_json_object
from ....workloads.workload import take
from ...experiments.execution.cell_specs import CellSpec
from ...experiments.execution.cells import output_tokens_p90, predicted_output_tokens, workload_of
from ...experiments.experiment import Experiment
from ...policies.systems import DEFAULT_SYSTEM, system
from ...results.engine_logs import (
    PROFILING,
    REPEATED,
    RealLog,
    meta_path,
    profiling_cell,
    read_cell,
    repeated_cell,
)
from ...results.read_run import detail_file, read_table
from ...results.step_log import StepLogContent, logged
from .log_replay import AskedRequests, catalogue_name

_LEAST_SWAPS = 10


@dataclass(frozen=True)
class MeasuredLevel:
    """Files of a measured level."""

    cell: str
    root: Path  # the folder that holds its files
    log: RealLog
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path, cell: str) -> MeasuredLevel:
        """Read the files of a cell below `root`."""
        path = meta_path(root, cell)
        return cls(
            cell, root, read_cell(root, cell), read_json_object(path) if path.is_file() else {}
        )

    def again(self) -> list[MeasuredLevel]:
        """Repeated measurements of the level."""
        repetitions: list[MeasuredLevel] = []
        folder = self.root / REPEATED
        while True:
            name = repeated_cell(self.cell, len(repetitions) + 2)
            if not any((folder / "requests").glob(f"{glob.escape(name)}.*")):
                return repetitions
            repetitions.append(MeasuredLevel.read(folder, name))

    @property
    def _server(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.meta.items() if name != "steps"}

    @property
    def engine(self) -> str:
        """The system that decided."""
        return str(self.meta.get("system") or DEFAULT_SYSTEM)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of that system."""
        return system(self.engine).known(self.meta.get("parameters") or {})

    def comparable(self, measured: Sequence[MeasuredLevel]) -> list[MeasuredLevel]:
        """Other levels of `measured` on a server with the same settings; where there is none, the
        one that was measured first, for a profile.
        """
        others = [other for other in measured if other is not self]
        alike = [other for other in others if other.meta and other._server == self._server]
        name, folder = profiling_cell(self.cell), self.root / PROFILING
        if alike or not meta_path(folder, name).is_file():
            return alike
        return [MeasuredLevel.read(folder, name)]

    def steps(self) -> list[LoggedStep]:
        """Logged steps of all measurements of the level, but for those that swapped."""
        return self.content().steps

    def content(self) -> StepLogContent:
        """The step logs of all measurements of the level."""
        levels = self, *self.again()
        return StepLogContent.joined(logged(level.root, level.meta) for level in levels)


def swap_s_per_token(levels: Sequence[MeasuredLevel], profile: Profile) -> float | None:
    """Seconds that steps of `levels` took beyond the profile's times, for each KV token that was
    swapped before them; None where that was rare.
    """
    swapping = [swap for level in levels for swap in level.content().swapping]
    if len(swapping) < _LEAST_SWAPS or not is_whole(profile):
        return None
    fitted = profiled_step_time(profile, Host()).model
    added_s = sum(
        step.duration_s - fitted.step_s(step.decode_seqs, step.decode_kv_tokens, step.chunks)
        for _, step in swapping
    )
    return max(0.0, added_s) / sum(tokens for tokens, _ in swapping)


def planned_cells(folder: Path) -> dict[str, CellSpec]:
    """The planned cells of the run; empty if the files of its workload are missing."""
    with contextlib.suppress(SloBenchError):
        return {s.cell: s for s in Experiment.load(folder / "experiment.toml").plan().cells}
    return {}


def fitted_profile(
    level: MeasuredLevel, others: Sequence[MeasuredLevel], steps: Sequence[LoggedStep], note: str
) -> Profile:
    """Step times of the level's server, fitted to `steps` of `others`."""
    names = [other.cell for other in others]
    return profile_of_steps(
        steps,
        model=catalogue_name(str(level.meta["model"])),
        gpu=str(level.meta["gpu"]),
        tp=level.log.engine.tp or 1,
        source=Source(
            project=f"{level.meta['server']}'s own step log",
            path=f"{len(names)} levels" if len(names) > 1 else names[0],
            version=str(level.meta.get("version", "")),
            note=note,
        ),
    )


def asked_requests(level: MeasuredLevel, spec: CellSpec | None) -> AskedRequests | None:
    """The requests of a level as they were sent; None where their experiment cannot be read, or has
    embedding requests or adapters.

    Arrivals are the times of sending, prompts as long as the server counted them, and answers as
    long as they came out; SLOs, priorities and predicted lengths are those of the experiment.
    """
    if spec is None:
        return None
    planned = workload_of(spec)
    if planned.request_type.any() or any(planned.model_names):
        return None
    columns = ("arrival_s", "sent_s", "output_tokens", "server_prompt_tokens")
    sent = read_table(detail_file(level.root / "requests", level.cell), None)
    if len(sent) != len(planned) or not set(columns) <= set(sent):
        return None
    arrival_s, sent_s, tokens, prompt = (sent[name].to_numpy(dtype=np.float64) for name in columns)
    whole = (sent["outcome"] == "finished").to_numpy() & (tokens >= 1)
    sent_s = np.where(np.isfinite(sent_s), sent_s, arrival_s)
    order = np.argsort(sent_s, kind="stable")
    began_s = float(sent_s[order[0]])
    predicted, longest = predicted_output_tokens(spec, planned), output_tokens_p90(spec, planned)
    workload = dataclasses.replace(
        planned,
        prompt_tokens=np.where(prompt >= 1, prompt, planned.prompt_tokens).astype(np.int64),
        output_tokens=np.where(whole, tokens, planned.output_tokens).astype(np.int64),
        deadline_s=planned.deadline_s - began_s,
        follows=np.full(1, -1, dtype=np.int64),
        joins=None,
        concurrency=None,
    )
    return AskedRequests(
        take(workload, order, sent_s[order] - began_s),
        order,
        zero_s=began_s - float(sent_s[level.log.rows[0]]),
        predicted_output_tokens=None if predicted is None else predicted[order],
        output_tokens_p90=None if longest is None else longest[order],
        num_cpu_blocks=spec.placement.num_cpu_blocks,
    )
