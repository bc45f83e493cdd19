"""Declaration of a setting: type, default, option, axis and report column in one place.

A setting is declared once, as a field of a schema made by `setting`. The command line's
options, the sweep axes, the files that paths name and the report's series follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field

from ....workloads.errors import SloBenchError
from ...servers import server_kinds
from ...servers.launch.backend_names import ATTACHED, SIMULATED

T = TypeVar("T")
_EXTRA = "setting"
Role = Literal["workload", "deployment", "client", "run"]
Part = Literal["placement", "source", "cell"]
COMPARED = "Systems"
ARRIVES = "Workload"
ARRIVES_MORE = "Workload details"
SERVES = "Deployment"
SERVES_MORE = "Memory, precision and step times"
RUN = "Execution"
CLIENT = "Client of real servers"
SERVERS = "Started servers"


def listed(value: Any) -> Any:
    """Several values as they are, one as a tuple of one."""
    return value if isinstance(value, list | tuple) else (value,)


# One value or several may be given; what is kept is a tuple.
Several = Annotated[tuple[T, ...], BeforeValidator(listed)]
Axis = Annotated[tuple[T, ...], BeforeValidator(listed), Field(min_length=1)]
_MOST = 10**18  # floats and the integers of tables hold it
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountFrom0 = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Setting:
    """Presentation and use of a setting.

    Args:
        help: what it says, for the command line.
        panel: the heading of the help under which it stands.
        option: its option, where that is not the field's name; "" is none.
        short: its letter, as `-n`.
        metavar: how its value is written; by default the choices, N, or the unit.
        unit: of its value. An option in seconds is called as the field is, without `_s`.
        complete: values are names of `slo-bench list KIND`.
        repeated: its option may be repeated, one value each.
        split: values of its option are separated by commas.
        read: reads the option's text; of named values one name and its value.
        file: values may name files (`maybe`: where such a file exists; `within`: the same for
            the parts between `:@<=`). Relative paths in an experiment file start at its folder.
        role: `deployment` is what an operator chooses, and a report draws a series for each value;
            `workload` a condition under which systems are compared; `client` and `run` neither. By
            default as the panel says.
        condition: runs that differ in it are not alike, so that `gate` does not judge one by the
            other. By default where the role is `workload`; not so of rates and seeds, which are
            matched row by row.
        tunable: `slo-bench tune` may search it.
        backends: those on which it has an effect; on others it is refused. By default as the panel
            says; () is all. A name of an attribute of `ServerKind` stands for the simulator and the
            servers that have it.
        describes: of servers that run already it is only said, so that it has one value.
        one_model: it is refused where several models share the GPUs (`models`).
        part: what a cell has it in: `placement` (of one instance), `source` (of requests), or
            `cell` itself. By default as the panel says.
    """

    help: str
    panel: str
    option: str | None = None
    short: str | None = None
    metavar: str | None = None
    unit: str | None = None
    complete: str | None = None
    repeated: bool = False
    split: bool = False
    read: Callable[[str], Any] | None = None
    file: Literal["no", "maybe", "within", "yes"] = "no"
    role: Role | None = None
    condition: bool | None = None
    tunable: bool = False
    backends: tuple[str, ...] | str | None = None
    describes: bool = False
    one_model: bool = False
    part: Part | None = None


SIMULATOR = (SIMULATED,)
NOT_ATTACHED = (*SIMULATOR, *server_kinds.SERVERS)
REAL = (ATTACHED, *server_kinds.SERVERS)
_BACKENDS = {
    CLIENT: REAL,
    SERVERS: server_kinds.SERVERS,
    SERVES_MORE: NOT_ATTACHED,
}
_ROLES: dict[str, Role] = {
    ARRIVES: "workload",
    ARRIVES_MORE: "workload",
    SERVES: "deployment",
    SERVES_MORE: "deployment",
    CLIENT: "client",
    SERVERS: "deployment",
}


_PARTS: dict[str, Part] = {SERVES: "placement", SERVES_MORE: "placement"}


def setting(panel: str, text: str, default: Any = None, **how: Any) -> Any:
    """A field of a schema that is a setting; `text` is its help, `how` is as `Setting` has it.

    The help shown ends with the default, unless `text` has a "Default:" of its own.
    """
    return Field(default, json_schema_extra={_EXTRA: cast("Any", Setting(text, panel, **how))})


@dataclass(frozen=True)
class Declared:
    """A setting as its schema declares it. `path` is `field`, or `table.field`."""

    path: str
    setting: Setting
    annotation: Any
    default: Any

    @property
    def kind(self) -> type:
        """Type of one value: `int`, `float`, `bool`, `str`, or `dict` for named values."""
        kind = _alternatives(self.annotation)[0]
        origin = get_origin(kind)
        if origin is Literal:
            return str
        value_type: type = kind if origin is None else dict
        return value_type

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; empty: any."""
        kind = _alternatives(self.annotation)[0]
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def values(self) -> Any:
        """The type of the values of a table."""
        return get_args(self.annotation)[1]

    @property
    def role(self) -> Role:
        """Part of the experiment that the setting belongs to: workload, deployment, client or
        run.
        """
        return self.setting.role or _ROLES.get(self.setting.panel, "run")

    @property
    def part(self) -> Part:
        """Part of a cell that has the setting: its placement, its source, or the cell itself."""
        return self.setting.part or _PARTS.get(self.setting.panel, "cell")

    @property
    def first(self) -> Any:
        """The default as one value: the first of several."""
        several = isinstance(self.default, tuple) and self.default
        return self.default[0] if several else self.default

    @property
    def condition(self) -> bool:
        """Whether two runs must have the same value for their results to be compared."""
        if self.setting.condition is not None:
            return self.setting.condition
        return self.role == "workload"

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends on which it has an effect; () is all."""
        backends = self.setting.backends
        if isinstance(backends, str):
            return (*SIMULATOR, *server_kinds.servers_with(backends))
        if backends is not None:
            return backends
        return _BACKENDS.get(self.setting.panel, ())

    def is_default(self, value: object) -> bool:
        """Whether this is what holds where the setting is left out."""
        return value in (self.default, None, (None,), ()) or value == (self.default,)

    @property
    def several(self) -> bool:
        """Is it a tuple of values?"""
        return get_origin(self.annotation) is tuple

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
    def help(self) -> str:
        """Help text with the default, and the backend where it is the simulator alone."""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        text = self.setting.help + " Simulated backend only." * (self.setting.backends == SIMULATOR)
        if "Default:" in text or self.kind in (bool, dict):
            return text
        texts = [f"{v:g}" if isinstance(v, float) else str(v) for v in values if v is not None]
        return f"{text} Default: {','.join(texts)}." if any(texts) else text


@cache
def declared(schema: type[BaseModel], prefix: str = "") -> dict[str, Declared]:
    """The settings of a schema and of the tables in it, by path, in the schema's order."""
    declarations: dict[str, Declared] = {}
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            declarations |= declared(field.annotation, f"{name}.")
        extra = field.json_schema_extra
        if isinstance(extra, dict) and isinstance(how := extra.get(_EXTRA), Setting):
            path, default = prefix + name, field.get_default()
            if default is None and get_origin(field.annotation) is tuple:
                default = (None,)
            declarations[path] = Declared(path, how, field.annotation, default)
    return declarations


def _alternatives(annotation: Any) -> list[Any]:
    """One value's types, without None; of several values that of one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [
            alternative for member in get_args(annotation) for alternative in _alternatives(member)
        ]
    if origin is tuple:
        return _alternatives(get_args(annotation)[0])
    return [] if annotation is NoneType else [annotation]


def number_list(text: str) -> tuple[float, ...]:
    """`2,4,8`, or `2:16:2` for 2 to 16 inclusive in steps of 2, or `2:16` in steps of 1.

    Raises:
        SloBenchError: it is neither.
    """
    values: list[float] = []
    for piece in text.split(","):
        try:
            numbers = [float(number) for number in piece.split(":")]
        except ValueError:
            raise SloBenchError(f"cannot read {piece!r}; write 2,4,8 or 2:16:2") from None
        if len(numbers) == 1:
            values += numbers
            continue
        low, high, step = [*numbers, 1.0][:3]
        if len(numbers) > 3 or not all(map(math.isfinite, numbers)):
            raise SloBenchError(f"cannot read {piece!r}; write low:high:step, as in 2:16:2")
        if step <= 0 or high < low:
            raise SloBenchError(f"{piece!r} has no values; write low:high:step, as in 2:16:2")
        count = math.floor((high - low) / step + 1e-9) + 1
        if count > 10_000:
            raise SloBenchError(f"{piece!r} has {count:,} values; take larger steps")
        values += [round(low + step * k, 9) for k in range(count)]
    return tuple(values)


def column_value(value: object) -> str | int | float | bool | None:
    """Return a setting's value as written in its column."""
    if isinstance(value, Mapping):
        return _slo_text(value)
    assert value is None or isinstance(value, str | int | float)
    return value


def _slo_text(table: Mapping[str, Any]) -> str:
    """A table of SLOs in the short form: `ttft=1,tpot=0.15; chat:ttft=0.5`."""

    def bounds(slos: Mapping[str, Any]) -> str:
        return ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in slos.items()
        )

    for_all = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    pieces = [bounds(for_all)] if for_all else []
    pieces += [
        f"{name}:{bounds(slos)}" for name, slos in table.items() if isinstance(slos, Mapping)
    ]
    return "; ".join(pieces)
