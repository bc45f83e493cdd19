"""What a setting is besides its type and default: everything that options, axes and reports need.

A setting is declared once, as a field of a schema annotated with a `Setting`. The command line's
options, the sweep axes, the files that paths name and the report's series follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo

from ....workloads.errors import SloBenchError

T = TypeVar("T")
COMPARED = "What is compared"
ARRIVES = "What arrives"
ARRIVES_MORE = "Workload details"
SERVES = "What serves it"
SERVES_MORE = "Memory, precision and step times"
RUN = "How it is run"
CLIENT = "How a real server is asked"
SERVERS = "How servers are started"


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


# One value or several may be given; what is kept is a tuple.
Several = Annotated[tuple[T, ...], BeforeValidator(_listed)]
Axis = Annotated[tuple[T, ...], BeforeValidator(_listed), Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
CountFrom0 = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Setting:
    """How a setting is shown and used.

    Args:
        help: what it says, for the command line.
        panel: the heading of the help under which it stands.
        option: its option, where that is not the field's name; "" is none.
        short: its letter, as `-n`.
        metavar: how its value is written; by default the choices, N, or the unit.
        default: what holds where it is not given, if the field's default does not say so.
        unit: of its value. An option in seconds is called as the field is, without `_s`.
        complete: values are names of `slo-bench list KIND`.
        repeated: its option may be repeated, one value each.
        split: values of its option are separated by commas.
        read: reads the option's text.
        file: values may name files (`maybe`: where such a file exists). Relative paths in an
            experiment file start at its folder.
        role: `deployment` is what an operator chooses, and a report draws a series for each value;
            `workload` a condition under which systems are compared; `client` and `run` neither.
        tunable: `slo-bench tune` may search it.
    """

    help: str
    panel: str
    option: str | None = None
    short: str | None = None
    metavar: str | None = None
    default: str | None = None
    unit: str | None = None
    complete: str | None = None
    repeated: bool = False
    split: bool = False
    read: Callable[[str], object] | None = None
    file: Literal["no", "maybe", "yes"] = "no"
    role: Literal["workload", "deployment", "client", "run"] = "run"
    tunable: bool = False


@dataclass(frozen=True)
class Declared:
    """A setting as its schema declares it. `path` is `field`, or `table.field`."""

    path: str
    setting: Setting
    annotation: Any
    default: Any

    @property
    def kind(self) -> type:
        """What one value is: `int`, `float`, `bool`, `str`, or `dict` for named values."""
        return _kind(self.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; empty: any."""
        return _choices(self.annotation)

    @property
    def values(self) -> Any:
        """The type of the values of a table."""
        return get_args(self.annotation)[1]

    @property
    def axis(self) -> bool:
        """Is every combination run where it has several values?"""
        return get_origin(self.annotation) is tuple and "." not in self.path

    @property
    def option(self) -> str:
        """The long option, with its dashes; "": none."""
        if self.setting.option is not None:
            return self.setting.option
        name = self.path.rpartition(".")[2]
        return "--" + (name.removesuffix("_s") if self.setting.unit == "s" else name).replace(
            "_", "-"
        )

    @property
    def default_text(self) -> str:
        """What holds where nothing is given; "" where that needs no words."""
        if self.setting.default is not None:
            return self.setting.default
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        if self.kind in (bool, dict) or not all(value not in (None, "") for value in values):
            return ""
        return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


@cache
def declared(schema: type[BaseModel], prefix: str = "") -> dict[str, Declared]:
    """The settings of a schema and of the tables in it, by path, in the schema's order."""
    found: dict[str, Declared] = {}
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= declared(field.annotation, f"{name}.")
            continue
        for setting in _settings(field):
            found[prefix + name] = Declared(
                prefix + name, setting, field.annotation, field.get_default()
            )
    return found


def _settings(field: FieldInfo) -> list[Setting]:
    return [one for one in field.metadata if isinstance(one, Setting)]


def _alternatives(annotation: Any) -> list[Any]:
    """One value's types, without None; of several values that of one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [found for one in get_args(annotation) for found in _alternatives(one)]
    if origin is tuple:
        return _alternatives(get_args(annotation)[0])
    return [] if annotation is NoneType else [annotation]


def _kind(annotation: Any) -> type:
    first = _alternatives(annotation)[0]
    origin = get_origin(first)
    if origin is Literal:
        return str
    kind: type = dict if origin in (dict, Mapping) or _is_mapping(origin) else first
    return kind


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _choices(annotation: Any) -> tuple[str, ...]:
    first = _alternatives(annotation)[0]
    return get_args(first) if get_origin(first) is Literal else ()


def number_list(text: str) -> tuple[float, ...]:
    """`2,4,8`, or `2:16:2` for 2 to 16 inclusive in steps of 2, or `2:16` in steps of 1.

    Raises:
        SloBenchError: it is neither.
    """
    found: list[float] = []
    for piece in text.split(","):
        try:
            numbers = [float(number) for number in piece.split(":")]
        except ValueError:
            raise SloBenchError(f"cannot read {piece!r}; write 2,4,8 or 2:16:2") from None
        if len(numbers) == 1:
            found += numbers
            continue
        low, high, step = [*numbers, 1.0][:3]
        if len(numbers) > 3 or not all(map(math.isfinite, numbers)):
            raise SloBenchError(f"cannot read {piece!r}; write low:high:step, as in 2:16:2")
        if step <= 0 or high < low:
            raise SloBenchError(f"{piece!r} has no values; write low:high:step, as in 2:16:2")
        count = math.floor((high - low) / step + 1e-9) + 1
        if count > 10_000:
            raise SloBenchError(f"{piece!r} has {count:,} values; take larger steps")
        found += [round(low + step * k, 9) for k in range(count)]
    return tuple(found)
