"""What a person may write in an experiment file.

Every setting but the few that belong to the whole experiment may be a list: it is then an axis of
the experiment, every combination is run, and its column says which value a row had.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from ....workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from .client_schema import ClientSchema
from .server_schema import ServerSchema
from .toml_text import line_of, read_toml, to_toml

T = TypeVar("T")

_TABLES: Mapping[str, type[BaseModel]] = {"client": ClientSchema, "server": ServerSchema}
# Settings that may name files.
_PATHS = ("systems", "workload", "model", "embedder", "profile", "length_predictor", "device_map")


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


# One value or several may be given; what is kept is a tuple.
Axis = Annotated[tuple[T, ...], BeforeValidator(_listed), Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
CountFrom0 = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
PartShare = Annotated[float, Field(ge=0, lt=1)]
Knob = bool | int | float | str
SloTable = dict[str, float | str | dict[str, float | str]]


class SettingError(SloBenchError):
    """A setting that an experiment cannot have; `location` is its path in the file."""

    def __init__(self, location: tuple[str | int, ...], problem: str) -> None:
        super().__init__(problem)
        self.location = location


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine `paged` runs where no workload is named: about a minute on two cores."""
    load = {"workload": "alpaca", "seeds": 1, "systems": ("vllm", "sarathi")}
    if not any(name in settings for name in ("rates", "speeds", "loads")):
        load["rates"] = (4.0, 8.0)
    if not any(name in settings for name in ("requests", "duration_s")):
        load["requests"] = 60
    return load


class ExperimentSchema(BaseModel):
    """An experiment as written: what is run, on what, under which load. Frozen.

    Where a setting is None: `tp` is the smallest that fits, `instances` 1 (or what the largest of
    its systems is made of), `gpus` = instances × tp
    × pp, `router` the system's own, `rates` a ladder around the estimated capacity (a trace: its
    own arrivals at speeds 0.5, 1 and 2), `requests` 1,000 (a trace: all), `seeds` 3 (a trace at
    its own arrivals: 1, for nothing is drawn), `host_s` that of the step-time model,
    `kv_blocks` and `host_blocks` what fits into the memory for them. With
    `backend = "http"` there is one system, a name for what is attached (`server`); `model` is what
    the server serves (`served`), and `gpu` is `unknown`. With `backend = "paged"` a tiny Llama with
    random weights is the model if none is named, and `gpu` is the device (`cpu`, `cuda:0`); where
    no workload is named, a minute of `alpaca` is served (`_short`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # What is compared.
    name: Annotated[str, Field(min_length=1)] = "experiment"
    systems: Axis[str] = ("vllm", "sarathi", "sglang")
    knobs: dict[str, dict[str, Axis[Knob]]] = {}  # by system
    published: str | None = None  # a table of published results that the report sets beside these

    # What arrives.
    workload: Axis[str] = ("sharegpt",)
    arrivals: Axis[str] = ("poisson",)
    redraw_arrivals: Axis[bool] = (False,)  # for a trace that has its own
    prompt_tokens: Axis[str | None] = (None,)  # a distribution in place of the catalogue's
    output_tokens: Axis[str | None] = (None,)
    sessions: Axis[str | None] = (None,)
    models: Axis[str | None] = (None,)  # which model each request asks for: fleet(…), zipf(…)
    trace_format: str | None = None
    rates: Axis[Positive] | None = None  # req/s
    speeds: Axis[Positive] | None = None  # of a trace's own arrivals
    loads: Axis[Positive] | None = None  # shares of each cell's estimated capacity
    requests: Axis[Count | None] = (None,)
    duration_s: Axis[Positive | None] = (None,)
    warmup_s: Axis[NotNegative] = (0.0,)
    warmup_share: Axis[PartShare] = (0.0,)  # as a share of the time of arrivals, instead
    max_output_tokens: Axis[Count | None] = (None,)  # what requests declare; None: what they need
    slo: Axis[str | SloTable] = ("ttft=1,tpot=0.15",)  # "": the workload's own
    slo_scale: Axis[Positive] = (1.0,)
    seeds: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0  # the first

    # What serves it.
    model: Axis[str] = ("llama-3.1-8b",)
    gpu: Axis[str] = ("a100-80g",)
    tp: Axis[Count | None] = (None,)
    pp: Axis[Count] = (1,)
    instances: Axis[Count | None] = (None,)
    gpus: Axis[Count | None] = (None,)
    router: Axis[str | None] = (None,)
    weight_dtype: Axis[str] = ("bf16",)
    kv_dtype: Axis[str] = ("bf16",)
    memory_share: Axis[Share] = (0.9,)
    block_tokens: Axis[Count] = (16,)
    host_memory_gib: Axis[NotNegative] = (4.0,)  # for swapped KV, per GPU
    kv_blocks: Axis[Count | None] = (None,)  # of an instance; None: what fits
    host_blocks: Axis[CountFrom0 | None] = (None,)  # in place of host_memory_gib
    host_s: Axis[NotNegative | None] = (None,)  # scheduling time of a step
    profile: Axis[str | None] = (None,)  # a file of measured step times
    device_map: Axis[str | None] = (None,)  # layers on devices, in place of gpu, tp and pp
    embedder: Axis[str | None] = (None,)  # the model beside it that embedding requests are for
    embed_instances: Axis[CountFrom0] = (0,)  # that only embed; 0: all do, beside the model
    failures: Axis[str | None] = (None,)  # instances that fail: 2@30s..60s, 0@90s
    objective: Axis[str] = ("alpha=1,beta=1,gamma=1",)  # of workloads with embedding requests
    length_predictor: Axis[str] = ("oracle",)  # what policies believe of answers' lengths

    # How it is run.
    backend: Literal["simulated", "http", "vllm", "sglang", "paged"] = "simulated"
    client: ClientSchema = ClientSchema()  # of real servers
    server: ServerSchema = ServerSchema()  # where we start them
    oversize: Axis[Literal["error", "reject", "truncate"]] = ("reject",)
    records: Literal["auto", "csv", "parquet", "none"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _attached(cls, settings: Any) -> Any:
        """What a server is, that somebody else has started, is not ours to say."""
        if isinstance(settings, dict) and settings.get("backend") == "http":
            return {"systems": "server", "model": "served", "gpu": "unknown", **settings}
        if isinstance(settings, dict) and settings.get("backend") == "paged":
            own = {"model": "tiny-llama", "gpu": "cpu"}
            return {**own, **({} if "workload" in settings else _short(settings)), **settings}
        return settings

    @field_validator("*")
    @classmethod
    def _no_repeats(cls, value: object) -> object:
        if isinstance(value, tuple):
            for place, one in enumerate(value):
                if one in value[:place]:
                    raise ValueError(f"has {one!r} twice")
        return value

    @model_validator(mode="after")
    def _agreement(self) -> ExperimentSchema:
        levels = [n for n in ("rates", "speeds", "loads") if getattr(self, n) is not None]
        if len(levels) > 1:
            raise ValueError(f"{' and '.join(levels)} contradict: give one of them")
        if any(self.requests) and any(self.duration_s):
            raise ValueError("requests and duration_s contradict: give one of them")
        strangers = set(self.knobs) - set(self.systems)
        if strangers:
            raise ValueError(
                f"knobs are set for {min(strangers)!r}, which is not among the systems"
            )
        return self

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingError(first["loc"], _problem(first, type(self).model_fields)) from None

    @classmethod
    def load(cls, path: str | Path, **changes: object) -> Self:
        """The experiment in a TOML file, with `changes` in place of what the file says.

        Relative paths in the file start at its folder.

        Raises:
            FileFormatError: the file cannot be read, or a setting in it is wrong (with its line).
            SloBenchError: a change is wrong.
        """
        path = Path(path)
        table, text = read_toml(path)
        table |= _all_anchored(table, path.resolve().parent)
        try:
            whole = cls(**table)
        except SettingError as error:
            line = line_of(text, error.location)
            raise FileFormatError(path, line, str(error)) from None
        return cls(**{**table, **changes}) if changes else whole

    def anchored(self, folder: Path) -> Self:
        """The same with every relative path made absolute, starting at `folder`."""
        settings = {name: getattr(self, name) for name in (*_PATHS, "knobs")}
        found = _all_anchored(settings, folder) | {"client": self.client.anchored(folder)}
        return self.model_copy(update=found)

    def to_toml(self) -> str:
        """The experiment as a file; a setting with one value is written without brackets."""
        table: dict[str, object] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "knobs":
                value = {
                    system: {knob: _single(v) for knob, v in knobs.items()}
                    for system, knobs in value.items()
                }
            elif name in _TABLES:
                value = value.model_dump(exclude_defaults=True)
            elif name not in ("systems", "rates", "speeds", "loads"):
                value = _single(value)
            table[name] = value
        return to_toml(table)


def _single(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _all_anchored(settings: Mapping[str, object], folder: Path) -> dict[str, object]:
    found = {name: _anchored(settings[name], folder) for name in _PATHS if name in settings}
    client = settings.get("client")
    if isinstance(client, Mapping) and client.get("tokenizer"):
        found["client"] = {**client, "tokenizer": str(folder / client["tokenizer"])}
    knobs = settings.get("knobs")
    if isinstance(knobs, Mapping):
        found["knobs"] = {_anchored(system, folder): values for system, values in knobs.items()}
    return found


def _anchored(value: object, folder: Path) -> object:
    """Names of files in `folder`, made absolute; what is no file stays as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_anchored(one, folder) for one in value)
    if not isinstance(value, str):
        return value
    path, colon, rest = value.partition(":")
    # A name like `sharegpt` means the catalogue's even where a folder of that name lies about.
    like_a_path = "/" in path or Path(path).suffix
    if like_a_path and (folder / path).exists():
        return f"{folder / path}{colon}{rest}"
    return value


def _problem(error: ErrorDetails, fields: Mapping[str, object]) -> str:
    """One of pydantic's complaints in this project's words."""
    location = [str(part) for part in error["loc"] if isinstance(part, str)]
    first = location[0] if location else ""
    depth = 3 if first == "knobs" else 2 if first in _TABLES else 1
    setting = ".".join(location[:depth])
    kind, message = error["type"], str(error["msg"])
    if kind == "extra_forbidden":
        known = _TABLES[first].model_fields if first in _TABLES else fields
        return str(UnknownNameError("setting", location[depth - 1], known))
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{setting} {message}".strip()
    if kind == "too_short":
        return f"{setting} must have at least one value"
    message = message.removeprefix("Input should be ")
    return f"{setting} must be {message} but is {error['input']!r}"
