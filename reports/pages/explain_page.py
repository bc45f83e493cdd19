"""Latency breakdown of one request, in words and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ...harness.core.counters import OVERTAKES
from ...harness.core.records.judging import judge, late
from ...harness.core.records.request_records import Outcome, time_per_output_token_s
from ...harness.engine.loop.traced_instance import Act
from ...harness.experiments.explain.latency_breakdown import (
    LatencySpan,
    SpanKind,
    totals_s,
)
from ...harness.experiments.explain.stages import Stage, stages
from ...harness.experiments.explain.trace import CellTrace, MeasuredCell
from ...harness.results.mechanisms import counts_of, overtook
from ...workloads.errors import SloBenchError
from ...workloads.parsing import finite
from ...workloads.request import SLO_COLUMNS, RequestType
from ..compare.results import read_requests
from ..figures.figure import seconds_text
from ..terminal.screen import Screen
from .mechanisms_page import counts_text, mechanism_text
from .table import Cell, one_group

MOST_EPISODES = 40  # shown in text; every single stay is in the JSON
SLOWEST = "slowest"
_IN_TURNS = frozenset(
    {SpanKind.DECODE, SpanKind.BEHIND_PREFILL, SpanKind.SWAP, SpanKind.PIPELINE, SpanKind.SHARED}
)
_PASSING = frozenset({SpanKind.SWAP, SpanKind.PIPELINE})  # belong to whatever they interrupt


@dataclass(frozen=True)
class Explanation:
    """Lengths, outcome and latency breakdown of one request."""

    cell: str
    request: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    outcome: str
    arrival_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    met: bool
    missed: tuple[str, ...]
    preemptions: int
    phases: Sequence[LatencySpan]
    stages: Sequence[Stage] = ()  # of simulated requests
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the whole cell
    acts: Sequence[Act] = ()  # of mechanisms on this request
    # Of a policy inside a server, and of a simulation of the same requests.
    decisions: Mapping[str, Mapping[str, int | str]] = dataclasses.field(default_factory=dict)

    @property
    def parts_s(self) -> dict[SpanKind, float]:
        """Latency of each part in seconds, largest first."""
        return totals_s(list(self.phases))


def chosen_request(cell: CellTrace | MeasuredCell, text: str) -> int:
    """Number of a request: `text`, or of the slowest that finished.

    Raises:
        SloBenchError: there is no such request.
    """
    if isinstance(cell, MeasuredCell):
        table = cell.requests
        whole = (table["outcome"] == "finished").to_numpy()
        e2e_s = np.where(whole, (table["finish_s"] - table["arrival_s"]).to_numpy(), np.nan)
        name = cell.cell
    else:
        e2e_s, name = cell.result.records.e2e_s, cell.spec.cell
    n = len(e2e_s)
    if text == SLOWEST:
        if not np.isfinite(e2e_s).any():
            raise SloBenchError(f"no request of {name} finished")
        return int(np.nanargmax(e2e_s))
    if not text.isdecimal() or int(text) >= n:
        raise SloBenchError(
            f"REQUEST must be a number from 0 to {n - 1}, or {SLOWEST}, but is {text!r}"
        )
    return int(text)


def explain(cell: CellTrace, request: int) -> Explanation:
    """Explain one request of a traced cell.

    Raises:
        SloBenchError: it did not finish, and so has no time to explain.
    """
    records, workload = cell.result.records, cell.workload
    outcome = Outcome(int(records.outcome[request]))
    if outcome is not Outcome.FINISHED:
        raise SloBenchError(
            f"request {request} of {cell.spec.cell} was {outcome.name.lower()}, not served; "
            "there is no time to explain"
        )
    judged = judge(workload, records)
    arrival_s = float(records.arrival_s[request])
    where = _embedding_stages if workload.request_type[request] == RequestType.EMBED else _stages
    stages = where(cell, request)
    counts = counts_of(cell.result)
    acts = [Act(float(act.time_s), act.mechanism) for act in cell.trace.acts.get(request, ())]
    if OVERTAKES in counts and overtook(records)[request]:
        acts.append(Act(float(records.first_scheduled_s[request]), OVERTAKES))
    return Explanation(
        cell=cell.spec.cell,
        request=request,
        prompt_tokens=int(workload.prompt_tokens[request]),
        output_tokens=int(workload.output_tokens[request]),
        cached_tokens=int(records.cached_tokens[request]),
        outcome=outcome.name.lower(),
        arrival_s=arrival_s,
        ttft_s=float(records.ttft_s[request]),
        tpot_s=float(records.tpot_s[request]),
        e2e_s=float(records.e2e_s[request]),
        met=bool(judged.met[request]),
        missed=tuple(name for name, missed in judged.late.items() if missed[request]),
        preemptions=int(records.preemptions_swap[request] + records.preemptions_recompute[request]),
        phases=[span for stage in stages for span in stage.spans],
        stages=stages,
        counts=counts,
        acts=sorted(acts),
    )


def _stages(cell: CellTrace, request: int) -> list[Stage]:
    records = cell.result.records
    times_s = float(records.arrival_s[request]), float(records.finish_s[request])
    return stages(cell.trace, request, *times_s)


def _embedding_stages(cell: CellTrace, request: int) -> list[Stage]:
    """The wait and the one pass of an embedding request; of merged batches, its prefill."""
    if cell.trace.log_of(request) is not None:
        return _stages(cell, request)
    records = cell.result.records
    columns = records.arrival_s, records.first_scheduled_s, records.finish_s
    arrival_s, begin_s, finish_s = (float(column[request]) for column in columns)
    spans = [
        LatencySpan(arrival_s, begin_s, SpanKind.QUEUE),
        LatencySpan(begin_s, finish_s, SpanKind.EMBED),
    ]
    waited = [span for span in spans if span.duration_s]
    return [Stage(arrival_s, finish_s, "embedder", "on arrival", waited)]


def explain_measured(
    cell: MeasuredCell,
    request: int,
    decisions: Mapping[str, Mapping[str, int | str]] | None = None,
) -> Explanation:
    """Explain one request of a real server, as far as its client knows, and `decisions` as the
    server's step log has them.

    Raises:
        SloBenchError: it did not finish.
    """
    row = cell.requests.iloc[request]
    outcome = str(row["outcome"])
    if outcome != "finished":
        fault = f" ({row['fault']})" if isinstance(row.get("fault"), str) else ""
        raise SloBenchError(
            f"request {request} of {cell.cell} was {outcome}{fault}, not served; there is no time "
            "to explain"
        )
    arrival_s, first_s, finish_s = (
        float(row[name]) for name in ("arrival_s", "first_token_s", "finish_s")
    )
    tokens = int(row["output_tokens"])
    counts = np.array([tokens, row.get("untimed_tokens", 1)])
    each_s = float(time_per_output_token_s(np.array(first_s), np.array(finish_s), *counts))
    e2e_s = finish_s - arrival_s
    decided = decisions or {}
    inside = decided.get("server", {})
    took_s = {"ttft": first_s - arrival_s, "tpot": each_s, "e2e": e2e_s, "deadline": finish_s}
    missed = [name for name, column in SLO_COLUMNS.items() if late(took_s[name], row[column])]
    return Explanation(
        cell=cell.cell,
        request=request,
        prompt_tokens=int(row["prompt_tokens"]),
        output_tokens=tokens,
        cached_tokens=int(row["cached_tokens"]),
        outcome=outcome,
        arrival_s=arrival_s,
        ttft_s=took_s["ttft"],
        tpot_s=each_s,
        e2e_s=took_s["e2e"],
        met=bool(row["slo_met"]),
        missed=tuple(missed),
        preemptions=int(inside.get("swaps", 0)) + int(inside.get("recomputations", 0)),
        phases=cell.phases(request),
        decisions=decided,
    )


def differs_from_record(folder: Path, cell: CellTrace) -> str | None:
    """A sentence if the repeated cell ends at other times than recorded; None if not."""
    kept = folder / "requests"
    name = cell.spec.cell
    if not any((kept / f"{name}{suffix}").is_file() for suffix in (".csv.gz", ".parquet")):
        return None
    then_s = read_requests(folder, name).finish_s
    now_s = cell.result.records.finish_s
    if len(then_s) == len(now_s) and np.allclose(then_s, now_s, rtol=0, atol=1e-6, equal_nan=True):
        return None
    return (
        f"{name} comes out differently now than in {folder}, which another version of slo-bench, "
        "of a policy or of a trace file must have made; this explains the run of now"
    )


def explanation_text(explanation: Explanation) -> RenderableType:
    """Three lines, the parts, and the phases in order."""
    e = explanation
    missed = f"missed its SLO: {', '.join(m.upper() for m in e.missed)}"
    first = (
        f"Request {e.request} of {e.cell}: {e.prompt_tokens:,} prompt tokens"
        f"{f' ({e.cached_tokens:,} cached)' if e.cached_tokens > 0 else ''}, "
        f"{e.output_tokens:,} output tokens."
    )
    second = (
        f"Arrived at {e.arrival_s:.3f} s. TTFT {seconds_text(e.ttft_s)}, "
        f"TPOT {seconds_text(e.tpot_s)}, end to end {seconds_text(e.e2e_s)}; "
        f"{'met its SLO' if e.met else missed}"
        f"{f'; preempted {_times(e.preemptions)}' if e.preemptions else ''}."
    )
    lines = [Text(first, style="bold"), Text(second), *map(Text, [*_mechanisms(e), *_decided(e)])]
    moved = any(stage.place != "instance 0" for stage in e.stages)
    tables = [_stages_table(e)] if moved else []
    return Group(*lines, *tables, _parts_table(e), _phases_table(e))


def _mechanisms(e: Explanation) -> list[str]:
    """What mechanisms did to the request, and in the whole cell."""
    acts = [
        f"{mechanism_text(act.mechanism)} at {act.time_s - e.arrival_s:.3f} s" for act in e.acts
    ]
    lines = [f"Mechanisms on it, from its arrival: {', '.join(acts)}."] if acts else []
    return [*lines, f"In the whole cell: {counts_text(e.counts)}."] if e.counts else lines


def _decided(e: Explanation) -> list[str]:
    """What a policy decided about the request inside the server and in the simulation."""
    lines = [
        f"{where}: {_decisions_text(e.decisions[side])}."
        for side, where in (("server", "Inside the server"), ("simulated", "In the simulation"))
        if side in e.decisions
    ]
    if len(lines) == 2:
        on_server, in_simulation = (
            {k: v for k, v in e.decisions[side].items() if k != "entered"}
            for side in ("server", "simulated")
        )
        alike = on_server == in_simulation
        lines.append("Both treated it alike." if alike else "They treated it differently.")
    return lines


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def _decisions_text(decisions: Mapping[str, int | str]) -> str:
    if decisions["away"]:
        return f"{decisions['away']}"
    parts = ["never entered a batch"]
    if int(decisions["entered"]) >= 0:
        parts = [f"entered a batch as number {int(decisions['entered']) + 1}"]
        parts += ["before an earlier request"] if decisions["overtook"] else []
    for name, text in (("swaps", "swapped out"), ("recomputations", "recomputed")):
        if decisions[name]:
            parts.append(f"{text} {_times(int(decisions[name]))}")
    return ", ".join(parts)


def _stages_table(e: Explanation) -> Screen:
    rows = [
        (
            stage.place,
            f"{stage.begin_s - e.arrival_s:.3f} s",
            f"{stage.end_s - e.arrival_s:.3f} s",
            seconds_text(stage.duration_s),
            Cell(stage.why, style="dim"),
        )
        for stage in e.stages
    ]
    title = "Stages, from its arrival"
    heads = ("where", "from", "to", "time", "why there")
    return one_group(title, heads, rows, texts=(0, 4)).rich(title)


def _parts_table(e: Explanation) -> Screen:
    rows = [
        (
            part.value,
            seconds_text(seconds),
            f"{seconds / e.e2e_s if e.e2e_s else 0.0:.1%}",
            Cell(part.meaning, style="dim"),
        )
        for part, seconds in e.parts_s.items()
    ]
    title = "Time by part"
    return one_group(title, ("part", "time", "share", ""), rows, texts=(0, 3)).rich(title)


def _episodes(spans: Sequence[LatencySpan]) -> list[list[LatencySpan]]:
    """Stays in the batch that take turns, step by step, together; all others one by one."""
    groups: list[list[LatencySpan]] = []
    for stay in spans:
        last = groups[-1][-1].part if groups else None
        together = last in _IN_TURNS and stay.part in _IN_TURNS
        if together or (groups and stay.part in _PASSING):
            groups[-1].append(stay)
        else:
            groups.append([stay])
    return groups


def _phases_table(e: Explanation) -> Screen:
    title = "Phases in order, from its arrival"
    shown = _episodes(e.phases)
    if len(shown) > MOST_EPISODES:
        title += f" (the first {MOST_EPISODES} of {len(shown)})"
    rows = []
    for episode in shown[:MOST_EPISODES]:
        begin_s, end_s = episode[0].begin_s, episode[-1].end_s
        parts = totals_s(episode)
        several = ", ".join(f"{part.value} {seconds_text(took)}" for part, took in parts.items())
        times = f"{begin_s - e.arrival_s:.3f} s", f"{end_s - e.arrival_s:.3f} s"
        text = several if len(parts) > 1 else episode[0].part.value
        rows.append((*times, seconds_text(end_s - begin_s), text))
    return one_group(title, ("from", "to", "time", ""), rows, texts=(3,)).rich(title)


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """All of it as plain values; times are seconds on the workload's clock."""
    e = explanation
    return dataclasses.asdict(e) | {
        "cached_tokens": max(0, e.cached_tokens),
        "ttft_s": finite(e.ttft_s),
        "tpot_s": finite(e.tpot_s),
        "breakdown_s": {part.value: seconds for part, seconds in e.parts_s.items()},
        "phases": _spans(e.phases),
        "stages": [
            {name: getattr(stage, name) for name in ("begin_s", "end_s", "place", "why")}
            | {"phases": _spans(stage.spans)}
            for stage in e.stages
        ],
        "acts": [act._asdict() for act in e.acts],
    }


def _spans(spans: Sequence[LatencySpan]) -> list[dict[str, Any]]:
    return [{"begin_s": s.begin_s, "end_s": s.end_s, "part": s.part.value} for s in spans]
