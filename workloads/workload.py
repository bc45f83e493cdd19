"""Requests as columns: a million fit in memory and are drawn, judged and written at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import Floats, Ints
from .errors import SloBenchError
from .prefixes import SessionBlocks
from .request import Request, RequestType, Slo

MOST_S = 1e9  # of arrivals: times of simulations are kept to a microsecond


def _floats(fill: float) -> Floats:
    return np.full(1, fill)


def _ints(fill: int) -> Ints:
    return np.full(1, fill, dtype=np.int64)


def shortest(column: Floats) -> Floats:
    """The column, or its only value where it was stretched from one."""
    return column[:1] if column.strides == (0,) else column


def too_late(arrival_s: float) -> str:
    """Message for an arrival that is later than `MOST_S`."""
    return (
        f"an arrival is {arrival_s:g} s after the first, the most is {MOST_S:g} s (31 years): are "
        "the times in milliseconds or nanoseconds? Divide them to get seconds"
    )


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. All columns have length n; id = row.

    A column given with length 1 is stretched to n. `prefix_blocks`, `texts`, `bodies`, `joins` are
    None where no request has any. `concurrency` closes the loop: that many requests are in flight,
    the next arrives when one ends, and `arrival_s` is not used.

    Raises:
        SloBenchError: a column has another length, a count is below one, a time is negative or not
            a number, or the arrivals are not in order.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_output_tokens: Ints = field(default_factory=lambda: _ints(0))  # 0: = output_tokens
    ttft_slo_s: Floats = field(default_factory=lambda: _floats(np.inf))
    tpot_slo_s: Floats = field(default_factory=lambda: _floats(np.inf))
    e2e_slo_s: Floats = field(default_factory=lambda: _floats(np.inf))
    deadline_s: Floats = field(default_factory=lambda: _floats(np.inf))
    class_index: Ints = field(default_factory=lambda: _ints(0))
    class_names: tuple[str, ...] = ("",)
    model_index: Ints = field(default_factory=lambda: _ints(0))
    model_names: tuple[str, ...] = ("",)
    priority: Ints = field(default_factory=lambda: _ints(0))
    session: Ints = field(default_factory=lambda: _ints(-1))  # -1: none
    follows: Ints = field(default_factory=lambda: _ints(-1))  # -1: open loop
    joins: Sequence[tuple[int, ...]] | None = None  # besides `follows`
    think_s: Floats = field(default_factory=lambda: _floats(0.0))
    request_type: Ints = field(default_factory=lambda: _ints(RequestType.GENERATE))
    num_inputs: Ints = field(default_factory=lambda: _ints(1))  # of an embedding request
    prefix_blocks: Sequence[tuple[int, ...]] | None = None
    prefix_block_size: int = 16
    texts: Sequence[str | None] | None = None
    bodies: Sequence[Mapping[str, Any] | None] | None = None  # fields of single requests
    concurrency: int | None = None
    name: str = "workload"

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for f in dataclasses.fields(self):
            column = getattr(self, f.name)
            if isinstance(column, np.ndarray):
                if len(column) == 1 and n != 1:
                    object.__setattr__(self, f.name, np.broadcast_to(column, n))
                elif len(column) != n:
                    raise SloBenchError(
                        f"column {f.name} has {len(column)} rows, arrival_s has {n}"
                    )
        unset = self.max_output_tokens <= 0
        if unset.all():
            object.__setattr__(self, "max_output_tokens", self.output_tokens)
        elif unset.any():
            filled = np.where(unset, self.output_tokens, self.max_output_tokens)
            object.__setattr__(self, "max_output_tokens", filled)
        self._check()

    def _check(self) -> None:
        for name, low in (("prompt_tokens", 1), ("output_tokens", 1), ("num_inputs", 1)):
            column: Ints = getattr(self, name)
            bad = np.flatnonzero(column < low)
            if len(bad):
                raise SloBenchError(
                    f"{name} must be at least {low} but is {column[bad[0]]} in request {bad[0]}"
                )
        bad = np.flatnonzero(~(self.arrival_s >= 0) | ~np.isfinite(self.arrival_s))
        if len(bad):
            value = self.arrival_s[bad[0]]
            raise SloBenchError(
                f"arrival_s must be a time from 0 on but is {value} in request {bad[0]}"
            )
        if len(self) and self.arrival_s[-1] > MOST_S:
            raise SloBenchError(f"{too_late(float(self.arrival_s[-1]))} in request {len(self) - 1}")
        if (np.diff(self.arrival_s) < 0).any():
            raise SloBenchError("arrival_s must not decrease; sort the requests by arrival first")
        if (self.follows >= np.arange(len(self))).any():
            raise SloBenchError("a request can only follow an earlier one")
        for row, others in enumerate(self.joins or ()):
            if others and (
                self.follows[row] < 0 or not all(0 <= earlier < row for earlier in others)
            ):
                raise SloBenchError(
                    f"request {row} joins {', '.join(map(str, others))}: a request that follows "
                    "one may wait for other earlier ones as well"
                )

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __getitem__(self, row: int) -> Request:
        return Request(
            id=row,
            arrival_s=float(self.arrival_s[row]),
            prompt_tokens=int(self.prompt_tokens[row]),
            output_tokens=int(self.output_tokens[row]),
            max_output_tokens=int(self.max_output_tokens[row]),
            slo=Slo(
                float(self.ttft_slo_s[row]),
                float(self.tpot_slo_s[row]),
                float(self.e2e_slo_s[row]),
                float(self.deadline_s[row]),
            ),
            class_name=self.class_names[self.class_index[row]],
            priority=int(self.priority[row]),
            model=self.model_names[self.model_index[row]],
            session=None if self.session[row] < 0 else int(self.session[row]),
            prefix_blocks=() if self.prefix_blocks is None else self.prefix_blocks[row],
            follows=None if self.follows[row] < 0 else int(self.follows[row]),
            joins=() if self.joins is None else self.joins[row],
            think_s=float(self.think_s[row]),
            text=None if self.texts is None else self.texts[row],
            body=None if self.bodies is None else self.bodies[row],
            request_type=RequestType(int(self.request_type[row])),
            num_inputs=int(self.num_inputs[row]),
        )

    def __iter__(self) -> Iterator[Request]:
        return (self[row] for row in range(len(self)))

    @property
    def span_s(self) -> float:
        """Time from zero to the last (open-loop) arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def closed(self) -> bool:
        """Whether any arrival waits for an answer."""
        return self.concurrency is not None or bool((self.follows >= 0).any())


def renumbered(
    joins: Sequence[tuple[int, ...]], rows: Ints, where: Ints, follows: Ints
) -> list[tuple[int, ...]]:
    """The `joins` of these rows; `where` each row has gone (-1: left out). A row that no longer
    follows another joins none.
    """
    moved = ([int(where[joined]) for joined in joins[row]] for row in rows)
    return [
        tuple(earlier for earlier in others if 0 <= earlier < row) if follows[row] >= 0 else ()
        for row, others in enumerate(moved)
    ]


def take(workload: Workload, rows: Ints, arrival_s: Floats) -> Workload:
    """Select these rows in this order, with these arrival times. A request whose predecessor is
    left out, or comes later, no longer waits for it.
    """
    if len(rows) == len(workload) and (rows == np.arange(len(rows))).all():
        return dataclasses.replace(workload, arrival_s=arrival_s)
    columns: dict[str, Any] = {
        f.name: getattr(workload, f.name)[rows]
        for f in dataclasses.fields(workload)
        if isinstance(getattr(workload, f.name), np.ndarray)
    }
    where = np.full(len(workload) + 1, -1, dtype=np.int64)
    where[rows] = np.arange(len(rows))
    follows = where[columns["follows"]]
    columns["follows"] = np.where(follows < np.arange(len(rows)), follows, -1)
    if workload.joins is not None:
        columns["joins"] = renumbered(workload.joins, rows, where, columns["follows"])
    columns["arrival_s"] = arrival_s
    blocks = workload.prefix_blocks
    if isinstance(blocks, SessionBlocks):
        columns["prefix_blocks"] = blocks.take(rows)
    elif blocks is not None:
        columns["prefix_blocks"] = [blocks[row] for row in rows]
    for name in ("texts", "bodies"):
        objects = getattr(workload, name)
        columns[name] = None if objects is None else [objects[row] for row in rows]
    return dataclasses.replace(workload, **columns)
