"""The small written form that settings share: `name(value, key=value, …)`, nested at will.

`gamma(cv=2)`, `uniform(1,350)` and `mix(chat=azure-conv:0.7, code=azure-code:0.3)` are read
here; what a name means is for the room that asks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import SloBenchError, UnknownNameError


@dataclass(frozen=True)
class Call:
    """One written `name(…)`; values are still text. A bare `name` has no values."""

    name: str
    positional: tuple[str, ...]
    named: Mapping[str, str]
    text: str


def split_outside(text: str, separator: str) -> list[str]:
    """Cut `text` at each `separator` that stands outside parentheses; pieces are stripped.

    Raises:
        SloBenchError: a parenthesis is not closed or closes nothing.
    """
    pieces, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0:
            raise SloBenchError(f"a parenthesis closes nothing in {text!r}")
        if char == separator and depth == 0:
            pieces.append(text[begin:index].strip())
            begin = index + 1
    if depth:
        raise SloBenchError(f"a parenthesis is not closed in {text!r}")
    return [*pieces, text[begin:].strip()]


def parse_values(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read `1, 2, key=3` as positional and named values.

    Raises:
        SloBenchError: a value is empty, a key comes twice, or a positional value follows a key.
    """
    positional: list[str] = []
    named: dict[str, str] = {}
    for piece in split_outside(text, ",") if text.strip() else []:
        key, *value = split_outside(piece, "=")
        if not piece or (value and not (key and value[0])) or len(value) > 1:
            raise SloBenchError(f"cannot read {piece!r} in {text!r}; write key=value, key=value")
        if not value and named:
            raise SloBenchError(
                f"{piece!r} in {text!r} needs a key, since it follows one with a key"
            )
        if key in named:
            raise SloBenchError(f"{key} is given twice in {text!r}")
        if value:
            named[key] = value[0]
        else:
            positional.append(key)
    return tuple(positional), named


def parse_call(text: str) -> Call:
    """Read `name` or `name(…)`.

    Raises:
        SloBenchError: the text has another form.
    """
    text = text.strip()
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if not name or (bracket and not rest.endswith(")")) or (not bracket and ")" in text):
        raise SloBenchError(f"cannot read {text!r}; write name or name(value, key=value)")
    positional, named = parse_values(rest[:-1]) if bracket else ((), {})
    return Call(name.lower(), positional, named, text)


def number(text: str | float, label: str) -> float:
    """A finite number.

    Raises:
        SloBenchError: it is none.
    """
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise SloBenchError(f"{label} must be a number but is {text!r}") from None
    if not math.isfinite(value) or isinstance(text, bool):
        raise SloBenchError(f"{label} must be a finite number but is {text}")
    return value


def positive(text: str | float, label: str) -> float:
    """A finite number above zero.

    Raises:
        SloBenchError: it is none.
    """
    value = number(text, label)
    if value <= 0:
        raise SloBenchError(f"{label} must be positive but is {text}")
    return value


def whole(text: str | float, label: str) -> int:
    """A whole number.

    Raises:
        SloBenchError: it is none.
    """
    value = number(text, label)
    if value != int(value):
        raise SloBenchError(f"{label} must be a whole number but is {text}")
    return int(value)


def flag(text: str, label: str) -> bool:
    """`true` or `false`.

    Raises:
        SloBenchError: it is neither.
    """
    if text.lower() not in ("true", "false"):
        raise SloBenchError(f"{label} must be true or false but is {text!r}")
    return text.lower() == "true"


T = TypeVar("T")
Convert = Callable[[str, str], Any]

_BY_TYPE: dict[str, Convert] = {
    "float": number,
    "float | None": number,
    "int": whole,
    "int | None": whole,
    "bool": flag,
    "str": lambda text, label: text,
}
# Of a first field that takes all positional values.
_OF_ALL: dict[str, Convert] = {
    "tuple[float, ...]": _BY_TYPE["float"],
    "tuple[str, ...]": _BY_TYPE["str"],
}


def build(cls: type[T], call: Call, extra: Mapping[str, Convert] | None = None) -> T:
    """Make the dataclass `cls` from a call: values by position, then by the fields' names.

    A first field of type `tuple[float, ...]` or `tuple[str, ...]` takes all positional values.
    `extra` converts further field types, by their written name.

    Raises:
        SloBenchError: a value is missing, superfluous, or not of its field's type.
        UnknownNameError: a key is no field.
    """
    converters = {**_BY_TYPE, **(extra or {})}
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    types = {f.name: str(f.type) for f in fields}
    values: dict[str, Any] = {}
    first = fields[0].name if fields else ""
    convert = _OF_ALL.get(types.get(first, ""))
    if convert is not None:
        values[first] = tuple(convert(p, f"{call.name} {first}") for p in call.positional)
        del types[first]  # which no key sets
    else:
        if len(call.positional) > len(fields):
            raise SloBenchError(
                f"{call.text!r} has {len(call.positional)} values, {call.name} takes "
                f"{len(fields)}: {', '.join(types)}"
            )
        values = {
            f.name: converters[types[f.name]](p, f"{call.name} {f.name}")
            for f, p in zip(fields, call.positional, strict=False)
        }
    for key, text in call.named.items():
        if key not in types:
            raise UnknownNameError(f"setting of {call.name}", key, types)
        if key in values:
            raise SloBenchError(f"{key} is given twice in {call.text!r}")
        values[key] = converters[types[key]](text, f"{call.name} {key}")
    missing = [
        f.name
        for f in fields
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SloBenchError(f"{call.text!r} lacks {' and '.join(missing)}")
    return cls(**values)


def value_of(text: str) -> bool | int | float | str:
    """Value of a setting's text: a truth value, a number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
