"""Reads the step log that the plugin writes inside a server.

A line `step` has the content of a batch and the time when it was formed. A line `done` has the time
when the tokens of the oldest such batch were ready, and the number of requests `left`. Durations
follow from both: while requests are left, steps are contiguous, and the time between two results
(scheduler, sampler; nothing with asynchronous scheduling) belongs to the later step. A line `swaps`
has the copies to and from host memory that the workers timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...predictors.profiles.whole_steps import LoggedStep
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json


@dataclass(frozen=True)
class StepLogContent:
    """The steps of a log; of those the `recomputations`, which only prefilled preempted sequences
    again; `swapping` steps, which are not among them, each with the KV tokens that went to host
    memory or came back before it; and the copies, each as (direction, bytes, seconds).
    """

    steps: list[LoggedStep]
    recomputations: list[LoggedStep]
    swapping: list[tuple[int, LoggedStep]]
    copies: list[tuple[str, int, float]]

    @classmethod
    def joined(cls, parts: Iterable[StepLogContent]) -> StepLogContent:
        """All parts, one after the other."""
        every = list(parts)
        return cls(
            [step for part in every for step in part.steps],
            [step for part in every for step in part.recomputations],
            [step for part in every for step in part.swapping],
            [copy for part in every for copy in part.copies],
        )


def read_step_log(path: Path, begin: int = 0, end: int | None = None) -> StepLogContent:
    """Read what began and ended between two byte offsets of a file.

    Raises:
        FileFormatError: the file cannot be read, or a line is not one of a step log.
    """
    steps: list[LoggedStep] = []
    recomputations: list[LoggedStep] = []
    swapping: list[tuple[int, LoggedStep]] = []
    copies: list[tuple[str, int, float]] = []
    begun: deque[tuple[dict[str, Any], bool, int]] = deque()
    last_s: float | None = None  # when the last result was there, if requests were left
    victims: set[str] = set()  # preempted requests that must be recomputed
    swapped: dict[str, int] = {}  # KV tokens of requests in host memory
    for line in lines_of(path, begin, end):
        event = line.get("event")
        try:
            if event == "step":
                preempted = line.get("preempted", ())
                victims |= {v["id"] for v in preempted if v["by"] == "recompute"}
                entered = line.get("entered", [])
                moved = sum(swapped.pop(name, 0) for name in entered)
                out = {v["id"]: int(v["kv_tokens"]) for v in preempted if v["by"] == "swap"}
                swapped |= out
                moved += sum(out.values())
                again = bool(entered) and victims.issuperset(entered)
                victims.difference_update(entered)
                if line["decode_seqs"] or line["chunks"]:
                    alone = not line["decode_seqs"] and len(line["chunks"]) == len(entered)
                    begun.append((line, again and alone, moved))
            elif event == "done" and begun:
                step, recomputes, moved = begun.popleft()
                since_s = float(step["time_s"])
                if last_s is not None:
                    since_s = last_s
                took = _step(step, float(line["time_s"]) - since_s)
                last_s = float(line["time_s"]) if line["left"] else None
                if took.duration_s > 0 and moved:
                    swapping.append((moved, took))
                elif took.duration_s > 0:
                    steps.append(took)
                    if recomputes:
                        recomputations.append(took)
            elif event == "swaps":
                copies += [(str(way), int(n), float(took)) for way, n, took in line["copies"]]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileFormatError(path, None, f"is no step log: {error} in {line}") from None
    return StepLogContent(steps, recomputations, swapping, copies)


def logged(root: Path, meta: Mapping[str, Any]) -> StepLogContent:
    """Read the step log of a measured cell; `meta` names its parts below `root`."""
    parts = meta.get("steps") or []
    return StepLogContent.joined(
        read_step_log(root / part["file"], part["begin"], part["end"]) for part in parts
    )


def _step(line: dict[str, Any], duration_s: float) -> LoggedStep:
    return LoggedStep(
        int(line["decode_seqs"]),
        int(line["decode_kv_tokens"]),
        [(int(before), int(tokens)) for before, tokens in line["chunks"]],
        duration_s,
    )


def lines_of(path: Path, begin: int, end: int | None) -> Iterator[dict[str, Any]]:
    """The events between two byte offsets of a file.

    Raises:
        FileFormatError: the file cannot be read, or a line is not one of a step log.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read() if end is None else file.read(max(0, end - begin))
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from None
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            line = parse_json(text)
        except ValueError:
            if number == content.count(b"\n") + 1:
                return  # the end of the part fell into a line
            raise FileFormatError(path, None, f"is no step log: {text[:60]!r}") from None
        if isinstance(line, dict):
            yield line
