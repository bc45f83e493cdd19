"""Which instances fail, and when, as text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from ....workloads.errors import SloBenchError
from ...core.cluster_policy import INF, Failure

_ONE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)s?(?:\.\.(\d+(?:\.\d+)?)s?)?")
_EXAMPLE = "2@30s..60s (instance 2 from 30 s to 60 s) or 0@90s (for good), with commas between"


def parse_failures(text: str) -> tuple[Failure, ...]:
    """`2@30s..60s,0@90s`: instance 2 fails at 30 s and is back at 60 s, instance 0 never again.

    Instances are numbered from 0, as in `instance` of the request tables.

    Raises:
        SloBenchError: it reads otherwise, or an instance fails again before it is back.
    """
    failures = [_failure(part.strip()) for part in text.split(",")]
    for number in {failure.instance for failure in failures}:
        outages = sorted((f for f in failures if f.instance == number), key=lambda f: f.at_s)
        for before, after in itertools.pairwise(outages):
            if after.at_s < before.back_s:
                raise SloBenchError(f"failures: instance {number} fails again before it is back")
    return tuple(failures)


def check_failures(failures: Sequence[Failure], instances: int) -> None:
    """Raise SloBenchError unless those are numbers of instances."""
    for failure in failures:
        if failure.instance >= instances:
            raise SloBenchError(
                f"failures: there is no instance {failure.instance}; {instances} instances have "
                f"the numbers 0 to {instances - 1}"
            )


def _failure(part: str) -> Failure:
    match = _ONE.fullmatch(part)
    if match is None:
        raise SloBenchError(f"failures: {part!r} is not like {_EXAMPLE}")
    number, at_s, back_s = match.groups()
    failure = Failure(int(number), float(at_s), float(back_s) if back_s else INF)
    if failure.at_s >= failure.back_s:
        raise SloBenchError(f"failures: {part!r} must be back after it has failed")
    return failure
