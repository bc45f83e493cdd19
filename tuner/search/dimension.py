"""A dimension of the search space: its range, as text and as a suggestion of an Optuna trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from optuna.trial import Trial

from ...harness.core.policy import Bounds
from ...harness.experiments.config.setting import number_list
from ...workloads.call_parser import split_outside, value_of
from ...workloads.errors import SloBenchError

Value = bool | int | float | str

LOG_FROM = 1000.0  # times the lowest value: a wider range is searched by orders of magnitude
_DIGITS = 4  # of a fraction that is tried
_FORMS = "write NAME=LOW..HIGH, NAME=LOW..HIGH:log, NAME=LOW:HIGH:STEP or NAME=A,B,…"


@dataclass(frozen=True)
class Dimension:
    """A name with `choices`, or a range of numbers from `low` to `high`.

    `whole`: no fractions. `step`: only low, low + step, …. `log`: uniform in the logarithm.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False
    step: float | None = None
    choices: tuple[Value, ...] | None = None

    def suggest(self, trial: Trial) -> Value:
        """A value for `trial`; fractions are rounded to four digits."""
        if self.choices is not None:
            chosen: Value = trial.suggest_categorical(self.name, self.choices)  # type: ignore[assignment]
            return chosen
        if self.whole:
            low, high = int(self.low), int(self.high)
            return trial.suggest_int(self.name, low, high, step=int(self.step or 1), log=self.log)
        return self.rounded(
            trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        )

    def rounded(self, value: float) -> float:
        """Round a fraction to the digits that are tried."""
        if self.step is not None:
            return round(value, 9)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    def holds(self, value: object) -> bool:
        """Whether the value is in the range."""
        if self.choices is not None:
            # 1 is 1.0, but not True.
            boolean = isinstance(value, bool)
            return any(
                value == choice and boolean is isinstance(choice, bool) for choice in self.choices
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not self.low <= value <= self.high or (self.whole and value != int(value)):
            return False
        return self.step is None or math.isclose(
            (value - self.low) / self.step, round((value - self.low) / self.step), abs_tol=1e-6
        )

    def own(self, value: Value) -> Value:
        """A value that it holds, as the trials have it: 1.0 is 1 where 1 is among the choices."""
        return next((choice for choice in self.choices or () if choice == value), value)

    def points(self, max_points: int) -> tuple[Value, ...]:
        """All values, or `max_points` that are spread over the range."""
        if self.choices is not None:
            return self.choices
        if self.step is not None or self.size <= max_points:
            values = [self.low + (self.step or 1) * k for k in range(int(self.size))]
        else:
            shares = [k / max(max_points - 1, 1) for k in range(max_points)]
            ratio, width = self.high / self.low if self.log else 1.0, self.high - self.low
            values = [self.low * ratio**s if self.log else self.low + width * s for s in shares]
        return tuple(dict.fromkeys(round(v) if self.whole else self.rounded(v) for v in values))

    def neighbours(self, value: Value, max_points: int) -> list[Value]:
        """The nearest of its `points` below and above a number; of words all others."""
        points = {*self.points(max_points), value}
        if any(isinstance(point, str) for point in points):
            return [point for point in self.points(max_points) if point != value]
        ordered = sorted(points, key=float)
        place = ordered.index(value)
        return [*ordered[max(place - 1, 0) : place], *ordered[place + 1 : place + 2]]

    @property
    def size(self) -> float:
        """Number of values in the range."""
        if self.choices is not None:
            return len(self.choices)
        if self.step is not None or self.whole:
            return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1
        return math.inf if self.high > self.low else 1

    def __str__(self) -> str:
        if self.choices is not None:
            return ",".join(_text(choice) for choice in self.choices)
        if self.step is not None:
            return f"{self.low:g}:{self.high:g}:{self.step:g}"
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"


def of_bounds(name: str, bounds: Bounds) -> Dimension | None:
    """The whole range of a parameter; None where it has no ends, or is the name of a file."""
    if bounds.choices is not None:
        return Dimension(name, choices=tuple(bounds.choices))
    if bounds.file or bounds.low is None or bounds.high is None:
        return None
    wide = bounds.low > 0 and bounds.high / bounds.low >= LOG_FROM
    return Dimension(name, bounds.low, bounds.high, bounds.whole, bounds.log or wide)


def parse(name: str, text: str, *, whole: bool = False) -> Dimension:
    """Parse the range or the values after `NAME=`.

    Raises:
        SloBenchError: it cannot be read, or has no values.
    """
    if ".." in text:
        return _range(name, text, whole)
    pieces = [piece.strip() for piece in split_outside(text, ",")]
    if len(pieces) == 1 and pieces[0].count(":") == 2:
        return _stepped(name, text, whole)
    if not all(pieces):
        raise SloBenchError(f"cannot read the values {text!r} of {name}; {_FORMS}")
    return of_values(name, [value_of(piece) for piece in pieces])


def of_values(name: str, values: Sequence[Value]) -> Dimension:
    """A dimension of some values; evenly spaced numbers keep their order.

    Raises:
        SloBenchError: there is none, or one is there twice.
    """
    if not values:
        raise SloBenchError(f"{name} has no values to search; {_FORMS}")
    for place, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:place]):
            raise SloBenchError(f"{name} has the value {_text(value)} twice")
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) > 1:
        ordered = sorted(numbers)
        gaps = [b - a for a, b in itertools.pairwise(ordered)]
        if all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps):
            whole = all(isinstance(v, int) for v in ordered)
            high = ordered[0] + gaps[0] * len(gaps)
            return Dimension(name, ordered[0], high, whole, step=gaps[0])
    return Dimension(name, choices=tuple(values))


def _range(name: str, text: str, whole: bool) -> Dimension:
    body, _, how = text.partition(":")
    low_text, _, high_text = body.partition("..")
    low, high = value_of(low_text.strip()), value_of(high_text.strip())
    if not _is_number(low) or not _is_number(high) or how.strip() not in ("", "log"):
        raise SloBenchError(f"cannot read the range {text!r} of {name}; {_FORMS}")
    if low > high:
        raise SloBenchError(f"{name} is searched from {low:g} down to {high:g}: swap them")
    log = how.strip() == "log"
    if log and low <= 0:
        raise SloBenchError(
            f"{name} is searched by orders of magnitude from {low:g}: start above 0"
        )
    if whole and not (isinstance(low, int) and isinstance(high, int)):
        raise SloBenchError(f"{name} takes whole numbers, but its range is {text}")
    wide = not log and low > 0 and high / low >= LOG_FROM
    return Dimension(name, low, high, whole, log or wide)


def _stepped(name: str, text: str, whole: bool) -> Dimension:
    try:
        values = number_list(text)
    except SloBenchError as error:
        raise SloBenchError(f"{name}: {error}") from None
    if whole and any(value != int(value) for value in values):
        raise SloBenchError(f"{name} takes whole numbers, but its steps are {text}")
    return of_values(name, [int(v) if v == int(v) and whole else v for v in values])


def _is_number(value: Value) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
