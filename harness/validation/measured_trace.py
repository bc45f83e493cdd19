"""Traces of a cell that was measured on a real server, from the client's records of its
requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..experiments.experiment import RunResult
from .latency_breakdown import LatencySpan, SpanKind
from .trace import Event, free_tracks, named_event, slice_event


@dataclass(frozen=True)
class MeasuredCell:
    """The per-request table of a cell; a row's place is the request's number."""

    cell: str
    requests: pd.DataFrame

    @classmethod
    def read(cls, folder: Path, cell: str) -> MeasuredCell:
        """From a run folder.

        Raises:
            UnknownNameError: no requests of such a cell were kept.
        """
        return cls(cell, RunResult(folder).requests(cell))

    def phases(self, request: int) -> list[LatencySpan]:
        """A finished request's time from its scheduled arrival to its last token."""
        row = self.requests.iloc[request]
        at_s = [float(row["arrival_s"]), float(row["first_token_s"]), float(row["finish_s"])]
        parts = [SpanKind.UNTIL_ANSWER, SpanKind.ANSWER]
        sent_s = float(row.get("sent_s", np.nan))
        if at_s[0] < sent_s < at_s[1]:
            at_s.insert(1, sent_s)
            parts.insert(0, SpanKind.CLIENT)
        spans = zip(at_s[:-1], at_s[1:], parts, strict=True)
        return [LatencySpan(begin, end, part) for begin, end, part in spans if end > begin]

    def events(self) -> Iterator[Event]:
        """Trace events: a process for each instance, its requests on tracks."""
        ended = self.requests[self.requests["outcome"] == "finished"]
        for instance, of in ended.groupby(ended["instance"].clip(lower=0)):
            process = int(str(instance))
            yield named_event("process_name", process, 0, f"instance {process} (measured)")
            of = of.sort_values("arrival_s", kind="stable")
            times = zip(of["arrival_s"].tolist(), of["finish_s"].tolist(), strict=True)
            rows = of.index.tolist()
            for request, (track, named) in zip(rows, free_tracks(process, times), strict=True):
                yield from named
                row = self.requests.iloc[request]
                about = {
                    "request": int(request),
                    "prompt tokens": int(row["prompt_tokens"]),
                    "output tokens": int(row["output_tokens"]),
                }
                begin_s, end_s = float(row["arrival_s"]), float(row["finish_s"])
                yield slice_event(f"request {request}", process, track, begin_s, end_s, about)
                for stay in self.phases(int(request)):
                    name = stay.part.value
                    yield slice_event(name, process, track, stay.begin_s, stay.end_s, {})
