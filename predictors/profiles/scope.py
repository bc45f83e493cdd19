"""What a calibrated profile holds for: the server and the loads that it was learned from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...workloads.arrays import Floats, Ints
from ...workloads.errors import SloBenchError
from ..operators.server_version import ServerVersion

Range = tuple[float, float]  # the least and the most

_MARGIN = 1.1  # by which a use may lie beyond a range
_UNRELIABLE = 25.0  # percent
_RANGES = {
    "rate_rps": "{} req/s",
    "prompt_tokens": "prompts of {} tokens",
    "output_tokens": "answers of {}",
    "concurrency": "{} requests at once",
}


@dataclass(frozen=True)
class Scope:
    """Where a profile was calibrated.

    `server`: as `ServerVersion.parse` reads it, empty if not known; `date`: of the calibration, in
    ISO format. `rate_rps` is that of one instance; lengths are those of its requests; `concurrency`
    counts requests in flight. None: not known.
    """

    server: str = ""
    date: str = ""
    rate_rps: Range | None = None
    prompt_tokens: Range | None = None
    output_tokens: Range | None = None
    concurrency: Range | None = None

    def plain(self) -> dict[str, Any]:
        """Fields with a value, as TOML and JSON have them."""
        fields = vars(self).items()
        return {name: list(v) if isinstance(v, tuple) else v for name, v in fields if v}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Scope:
        """From a header's section.

        Raises:
            TypeError: a field is unknown.
            ValueError: a range is not two numbers in order, or `server` is none.
        """
        scope = cls(**entry)
        if scope.server:
            try:
                ServerVersion.parse(str(scope.server))
            except SloBenchError as error:
                raise ValueError(f"server of the scope: {error}") from None
        ranges = {}
        for name in _RANGES:
            values = getattr(scope, name)
            if values is None:
                continue
            low, high = map(float, values)
            if not 0 <= low <= high:
                raise ValueError(f"{name} of the scope must be a range from 0 on but is {values}")
            ranges[name] = low, high
        return dataclasses.replace(scope, server=str(scope.server), date=str(scope.date), **ranges)

    @property
    def loads(self) -> str:
        """The loads, for people: `2 to 8 req/s, prompts of 50 to 900 tokens, …`."""
        return ", ".join(
            text.format(range_text(getattr(self, name)))
            for name, text in _RANGES.items()
            if getattr(self, name) is not None
        )

    def beyond(self, uses: Mapping[str, Range], server: str | None = None) -> list[str]:
        """What of a use lies outside: `prompts of 4,000 tokens (50 to 900)`.

        `uses` are ranges by the names of fields, `server` as `ServerVersion.parse` reads it.
        """
        texts = [f"{server} ({self.server})"] if server and server != self.server else []
        for name, (low, high) in uses.items():
            measured: Range | None = getattr(self, name)
            if measured is None:
                continue
            if low * _MARGIN < measured[0] or high > measured[1] * _MARGIN:
                here = _RANGES[name].format(range_text((low, high)))
                texts.append(f"{here} ({range_text(measured)})")
        return texts


def range_text(values: Range) -> str:
    """`2 to 8`, or one number where both are shown alike."""
    low, high = (f"{v:,.0f}" if v >= 20 else f"{v:.3g}" for v in values)
    return low if low == high else f"{low} to {high}"


def verdict(held_out_percent: Mapping[str, float], scope: Scope | None) -> str:
    """`good to ± 1.2 % (TTFT), ± 0.4 % (TPOT) for these loads (2 to 8 req/s, …)`, by the errors on
    requests that a calibration has not seen.
    """
    errors = {name: off for name, off in held_out_percent.items() if name != "steps"}
    loads = "" if scope is None else scope.loads
    if not errors:
        return f"how good it is was not judged: too few requests ({loads})"
    texts = ", ".join(f"± {_shown(off)} % ({name.upper()})" for name, off in errors.items())
    if max(errors.values()) > _UNRELIABLE:
        return f"not to be relied on, off by up to {texts}, even for these loads ({loads})"
    return f"good to {texts} for these loads ({loads})"


def _shown(percent: float) -> str:
    """A bound, rounded up."""
    return f"{math.ceil(10 * percent) / 10:.1f}" if percent < 10 else f"{math.ceil(percent)}"


def middle_range(values: Ints | Floats) -> Range:
    """From the 10th to the 90th percentile, as a use is held against a scope."""
    low, high = np.quantile(values, (0.1, 0.9))
    return float(low), float(high)
