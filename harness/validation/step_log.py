"""Reads the step log that the plugin writes inside a server.

A line `step` has the content of a batch and the time when it was formed. A line `done` has the time
when the tokens of the oldest such batch were ready, and the number of requests `left`. Durations
follow from both: while requests are left, steps are contiguous, and the time between two results
(scheduler, sampler; nothing with asynchronous scheduling) belongs to the later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...predictors.profiles.whole_steps import LoggedStep
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json


def read_steps(path: Path, begin: int = 0, end: int | None = None) -> list[LoggedStep]:
    """Read the steps that began and ended between two byte offsets of a file.

    Raises:
        FileFormatError: the file cannot be read, or a line is not one of a step log.
    """
    steps: list[LoggedStep] = []
    begun: deque[dict[str, Any]] = deque()
    last_s: float | None = None  # when the last result was there, if requests were left
    for line in _lines(path, begin, end):
        event = line.get("event")
        try:
            if event == "step" and (line["decode_seqs"] or line["chunks"]):
                begun.append(line)
            elif event == "done" and begun:
                step = begun.popleft()
                since_s = float(step["time_s"])
                if last_s is not None:
                    since_s = last_s
                steps.append(_step(step, float(line["time_s"]) - since_s))
                last_s = float(line["time_s"]) if line["left"] else None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileFormatError(path, None, f"is no step log: {error} in {line}") from None
    return [step for step in steps if step.duration_s > 0]


def logged_steps(root: Path, meta: Mapping[str, Any]) -> list[LoggedStep]:
    """Read the steps of a measured cell; `meta` names the parts of step logs below `root`."""
    return [
        step
        for part in meta.get("steps") or []
        for step in read_steps(root / part["file"], part["begin"], part["end"])
    ]


def _step(line: dict[str, Any], duration_s: float) -> LoggedStep:
    return LoggedStep(
        int(line["decode_seqs"]),
        int(line["decode_kv_tokens"]),
        [(int(before), int(tokens)) for before, tokens in line["chunks"]],
        duration_s,
    )


def _lines(path: Path, begin: int, end: int | None) -> Iterator[dict[str, Any]]:
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
