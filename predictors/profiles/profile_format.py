"""The profile format: a TOML header and tables of measurements in the same folder
(docs/profiles.md).

A header names model, GPU and tensor-parallel degree, states the source of the numbers, and lists
its tables, each a CSV or Parquet file in the header's folder. It may hold fitted coefficients.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...workloads.arrays import Floats, Mask
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ...workloads.extras import need
from ...workloads.file_cache import depends_on
from ...workloads.input_files import open_bounded
from ...workloads.parsing import parse_toml
from ...workloads.whole_file import write_whole
from ..operators.front_end import FrontEnd
from .calibration import Calibration
from .scope import Range, Scope, verdict

FORMAT = 1
_NESTED = (
    *("sources", "tables", "fits", "links", "device"),
    *("calibration", "front_end", "scope"),
)
Words = NDArray[np.str_]
Read = TypeVar("Read")


@dataclass(frozen=True)
class TableKind:
    """A kind of table: its columns, and what a row is."""

    words: tuple[str, ...]
    counts: tuple[str, ...]
    row: str

    @property
    def columns(self) -> tuple[str, ...]:
        """In the order of the file; all times are microseconds."""
        return (*self.words, *self.counts, "time_us")


TABLES = {
    "linear": TableKind(
        ("operator",),
        ("tokens", "calls"),
        "one call of an operator on so many tokens; a step makes so many calls",
    ),
    "per_sequence": TableKind(
        ("operator",),
        ("sequences", "calls"),
        "one call of an operator on so many sequences; a step makes so many calls",
    ),
    "attention": TableKind(
        (),
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "calls"),
        "attention of one layer: a chunk after kv_prefill tokens beside n_decode sequences of "
        "kv_decode tokens each; a step makes so many calls",
    ),
    "steps": TableKind(
        (),
        ("chunks", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode"),
        "a whole step: equal chunks, each after kv_prefill tokens, beside n_decode sequences of "
        "kv_decode tokens each",
    ),
    "transfers": TableKind(
        ("direction",),
        ("bytes",),
        "one copy of so many bytes between a GPU and its host: to-host or to-gpu",
    ),
    "moves": TableKind(
        ("what",),
        ("bytes",),
        "layers with weights and KV, KV heads, or part of a sequence (layers, heads, sequence) "
        "moved to another instance or back",
    ),
}


@dataclass(frozen=True)
class Source:
    """Origin of the numbers in a profile."""

    project: str
    path: str
    licence: str = ""
    version: str = ""  # commit or release
    note: str = ""


@dataclass(frozen=True)
class ProfileTable:
    """Columns of equal length; `words` are names, all else numbers."""

    columns: Mapping[str, Floats]
    words: Mapping[str, Words] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["time_us"])

    def __getitem__(self, column: str) -> Floats:
        return self.columns[column]

    def rows(self, chosen: Mask) -> ProfileTable:
        """Rows of the table that match."""
        return ProfileTable(
            {name: column[chosen] for name, column in self.columns.items()},
            {name: column[chosen] for name, column in self.words.items()},
        )


@dataclass(frozen=True)
class Fitted:
    """Coefficients of a formula and how far off they were, in percent of the time measured."""

    coefficients: Mapping[str, float]
    held_out_percent: float = math.nan  # mean, on rows kept out of the fit at random
    extrapolated_percent: float = math.nan  # mean, beyond the range fitted


@dataclass(frozen=True)
class MeasuredLink:
    """A line through copies: a latency and a bandwidth, and how far off it was on copies kept out
    (mean, in percent; NaN: not known).
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    held_out_percent: float = math.nan


@dataclass(frozen=True)
class MeasuredDevice:
    """What is known of a device that no catalogue has. `kv_bytes`: room for KV that the engine
    took; bandwidth and operations a second as measured, at the profile's dtype.
    """

    memory_bytes: float
    kv_bytes: float
    bandwidth_bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class Profile:
    """Measurements and fits for one model on one kind of GPU at one tensor-parallel degree.

    Times are per GPU of a tensor-parallel group, whose members compute in parallel. `best` names
    the formula that `run --profile` takes; `multiprocessors` of the GPU are 0 if unknown.
    `model_file` has the shape of a model that no catalogue knows. `links` by name: `host` between
    the GPU and its host, `peer` between GPUs. `calibration`: what a run of the machine showed,
    `front_end`: what its requests passed before the engine, `scope`: what it was calibrated on.
    """

    model: str
    gpu: str
    tp: int = 1
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    multiprocessors: int = 0
    best: str = ""
    model_file: str = ""
    device: MeasuredDevice | None = None
    links: Mapping[str, MeasuredLink] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    tables: Mapping[str, ProfileTable] = field(default_factory=dict)
    fits: Mapping[str, Fitted] = field(default_factory=dict)
    calibration: Calibration | None = None
    front_end: FrontEnd | None = None
    scope: Scope | None = None

    @property
    def label(self) -> str:
        """Model, GPU and tensor-parallel degree, for people."""
        return f"{self.model} on {self.gpu}" + (f" × tp {self.tp}" if self.tp > 1 else "")

    @property
    def verdict(self) -> str:
        """How good its calibration is, and for which loads; empty without one."""
        learned = self.calibration
        return "" if learned is None else verdict(learned.held_out_percent, self.scope)

    def joined(self, other: Profile) -> Profile:
        """With those tables and fits of `other` that this one lacks.

        Raises:
            SloBenchError: it is for something else, or has nothing more.
        """
        for name in ("model", "gpu", "tp", "weight_dtype", "kv_dtype"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise SloBenchError(
                    f"the profiles are not of the same: {name} is {mine!r} here and {theirs!r} "
                    "there; import into another file"
                )
        if set(other.tables) <= set(self.tables) and set(other.fits) <= set(self.fits):
            raise SloBenchError(
                f"the profile of {self.label} already has all of that; import into another file"
            )
        return dataclasses.replace(
            self,
            multiprocessors=self.multiprocessors or other.multiprocessors,
            best="",
            sources=(*self.sources, *other.sources),
            model_file=self.model_file or other.model_file,
            device=self.device or other.device,
            links={**other.links, **self.links},
            tables={**other.tables, **self.tables},
            fits={**other.fits, **self.fits},
        )


def read_profile(path: str | Path) -> Profile:
    """The profile whose header is `path`, or `profile.toml` in the folder `path`.

    Raises:
        FileFormatError: header or table cannot be read or are not in the format.
    """
    path = Path(path)
    header = path / "profile.toml" if path.is_dir() else path
    depends_on(header)
    try:
        content = parse_toml(header.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read as a profile: {getattr(error, 'strerror', None) or error}"
        raise FileFormatError(header, None, problem) from None
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(header, None, f"not a profile, for it is no TOML: {error}") from None
    if content.pop("format", None) != FORMAT:
        raise FileFormatError(
            header,
            None,
            f"not a profile: it must begin with format = {FORMAT}; `slo-bench profile import` "
            "makes one",
        )
    return _from_header(header, content)


def _from_header(header: Path, content: dict[str, Any]) -> Profile:
    tables = _section(header, content, "table")
    fits = _section(header, content, "fit")
    links = _section(header, content, "link")
    sources = content.pop("source", [])
    device = content.pop("device", None)
    learned = {name: content.pop(name, None) for name in ("calibration", "front_end", "scope")}
    if content.get("model_file"):
        content["model_file"] = str(header.parent / str(content["model_file"]))
    plain = {f.name for f in dataclasses.fields(Profile)} - set(_NESTED)
    for name, value in content.items():
        if name not in plain:
            raise FileFormatError(header, None, str(UnknownNameError("field", name, plain)))
        kind = int if name in ("tp", "multiprocessors") else str
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FileFormatError(
                header, None, f"{name} must be {'a whole number' if kind is int else 'text'}"
            )
    for name in ("model", "gpu"):
        if name not in content:
            raise FileFormatError(header, None, f"{name} is missing")
    try:
        profile = Profile(
            **content,
            sources=tuple(Source(**source) for source in sources),
            tables={
                kind: _read_table(header, kind, str(entry.get("file", "")))
                for kind, entry in tables.items()
            },
            fits={name: _fitted(entry) for name, entry in fits.items()},
            links={name: MeasuredLink(**entry) for name, entry in links.items()},
            device=None if device is None else MeasuredDevice(**device),
            calibration=_learned(learned["calibration"], Calibration.read),
            front_end=_learned(learned["front_end"], FrontEnd.read),
            scope=_learned(learned["scope"], Scope.read),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(header, None, f"not in the format: {error}") from None
    if profile.tp < 1:
        raise FileFormatError(header, None, f"tp must be at least 1 but is {profile.tp}")
    return profile


def _learned(entry: Any, read: Callable[[dict[str, Any]], Read]) -> Read | None:
    if entry is not None and not isinstance(entry, dict):
        raise TypeError("calibration, front_end and scope must each be one section")
    return None if entry is None else read(entry)


def outside_scope(file: str, uses: Mapping[str, Range], server: str | None = None) -> str:
    """What of a use lies outside the loads that the profile of a file was calibrated on, in words;
    empty where nothing does, or the profile was not calibrated. Arguments are those of
    `Scope.beyond`.
    """
    scope = read_profile(file).scope
    outside = [] if scope is None else scope.beyond(uses, server)
    if not outside:
        return ""
    return f"outside the scope of {Path(file).name} (in brackets): {'; '.join(outside)}"


def _section(header: Path, content: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    section = content.pop(name, {})
    if not isinstance(section, dict) or not all(isinstance(v, dict) for v in section.values()):
        raise FileFormatError(header, None, f"[{name}] must hold tables [{name}.NAME]")
    return section


def _fitted(entry: Mapping[str, Any]) -> Fitted:
    errors = {f.name for f in dataclasses.fields(Fitted)} - {"coefficients"}
    return Fitted(
        {k: float(v) for k, v in entry.items() if k not in errors},
        **{k: float(v) for k, v in entry.items() if k in errors},
    )


def write_profile(profile: Profile, path: Path, tables: str = "csv") -> Path:
    """Write header and tables, tables first, and return the header's path.

    A path that ends in `.toml` is the header, with its tables in the same folder as NAME.TABLE.csv;
    any other is a folder with `profile.toml` and TABLE.csv. `tables` is `csv` or `parquet`.

    Raises:
        SloBenchError: a file cannot be written, its name is another format's, or `tables` is
            `parquet` and pyarrow is missing.
    """
    if tables not in ("csv", "parquet"):
        raise SloBenchError(f"tables must be csv or parquet but is {tables!r}")
    if path.suffix in (".json", ".yaml", ".yml", ".csv"):
        raise SloBenchError(f"a profile is TOML: name {path.with_suffix('.toml')}, or a folder")
    if tables == "parquet":
        need("parquet", "--tables parquet")
    header = path if path.suffix == ".toml" else path / "profile.toml"
    stem = f"{header.stem}." if path.suffix == ".toml" else ""
    names = {kind: f"{stem}{kind}.{tables}" for kind in profile.tables}
    try:
        header.parent.mkdir(parents=True, exist_ok=True)
        for kind, table in profile.tables.items():
            _write_table(header.parent / names[kind], kind, table)
        write_whole(header, [_header_text(profile, names).encode()])
    except OSError as error:
        raise SloBenchError(f"cannot write the profile {header}: {error.strerror}") from error
    return header


def _header_text(profile: Profile, names: Mapping[str, str]) -> str:
    lines = [
        "# A slo-bench profile; table times are microseconds (docs/measurements/profiles.md).",
        f"format = {FORMAT}",
    ]
    for f in dataclasses.fields(Profile):
        value = getattr(profile, f.name)
        if f.name not in _NESTED and value not in ("", 0):
            shown = Path(value).name if f.name == "model_file" else value
            lines.append(f"{f.name} = {_toml(shown)}")
    for source in profile.sources:
        lines += ["", "[[source]]"]
        lines += [f"{k} = {_toml(v)}" for k, v in dataclasses.asdict(source).items() if v]
    for kind, name in names.items():
        lines += ["", f"[table.{kind}]", f"file = {_toml(name)}", f"# {TABLES[kind].row}"]
        lines.append(f"# columns: {', '.join(TABLES[kind].columns)}")
    for name, fit in profile.fits.items():
        lines += ["", f"[fit.{name}]"]
        lines += [f"{k} = {v!r}" for k, v in fit.coefficients.items()]
        errors = dataclasses.asdict(fit)
        del errors["coefficients"]
        lines += [f"{k} = {v:.3f}" for k, v in errors.items() if math.isfinite(v)]
    sections: dict[str, MeasuredLink | MeasuredDevice] = {
        f"link.{name}": measured for name, measured in profile.links.items()
    }
    if profile.device is not None:
        sections["device"] = profile.device
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        lines += [
            f"{k} = {v!r}" for k, v in dataclasses.asdict(section).items() if math.isfinite(v)
        ]
    if profile.calibration is not None:
        lines += ["", "[calibration]", "# factors on linear layers (without tables: on steps)"]
        lines += [f"{k} = {_toml(v)}" for k, v in profile.calibration.plain().items()]
    for name, learned in (("front_end", profile.front_end), ("scope", profile.scope)):
        if learned is not None:
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in learned.plain().items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def table_of(kind: str, rows: Sequence[Sequence[Any]]) -> ProfileTable:
    """Rows in the order of the kind's columns."""
    spec = TABLES[kind]
    by_column = list(zip(*rows, strict=True)) if rows else [()] * len(spec.columns)
    columns = dict(zip(spec.columns, by_column, strict=True))
    words = {name: np.array(columns.pop(name), dtype=np.str_) for name in spec.words}
    return ProfileTable({k: np.array(v, dtype=np.float64) for k, v in columns.items()}, words)


def _read_table(header: Path, kind: str, name: str) -> ProfileTable:
    if kind not in TABLES:
        raise FileFormatError(header, None, str(UnknownNameError("table", kind, TABLES)))
    if not name:
        raise FileFormatError(header, None, f"[table.{kind}] needs file = NAME")
    path = header.parent / name
    spec = TABLES[kind]
    if path.suffix == ".parquet":
        columns = read_parquet(path, spec.columns)
    else:
        columns = read_csv(path, spec.columns)
    words = {name: np.array(columns.pop(name), dtype=np.str_) for name in spec.words}
    numbers = {name: _numbers(path, name, values) for name, values in columns.items()}
    if not len(numbers["time_us"]):
        raise FileFormatError(path, None, "has no rows")
    return ProfileTable(numbers, words)


def _numbers(path: Path, name: str, values: Sequence[Any]) -> Floats:
    try:
        numbers = np.array(values, dtype=np.float64)
    except ValueError as error:
        raise FileFormatError(path, None, f"column {name}: {error}") from None
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        row = int(np.flatnonzero(~(numbers >= 0) | ~np.isfinite(numbers))[0])
        raise FileFormatError(path, row + 2, f"{name} must be from 0 on but is {numbers[row]}")
    return numbers


def read_csv(
    path: Path, column_names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, list[str]]:
    """The columns `column_names` of a CSV file, as text; FILE.gz is read where there is no FILE.
    Of `optional` columns the file does not have, all cells are empty.

    Raises:
        FileFormatError: the file cannot be read, a column is missing, a row is cut short, or there
            is no row.
    """
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        path = packed
    depends_on(path)
    try:
        with open_bounded(path, packed=path == packed) as content:
            text = content.read().decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise FileFormatError(path, None, problem) from None
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise FileFormatError(path, reader.line_num, f"not readable as CSV: {error}") from None
    names = lines[0][1] if lines else []
    missing = [name for name in column_names if name not in names and name not in optional]
    if missing:
        raise FileFormatError(
            path, 1, f"has no column {missing[0]!r}; its columns are {', '.join(names) or 'none'}"
        )
    positions = [names.index(name) if name in names else None for name in column_names]
    columns: dict[str, list[str]] = {name: [] for name in column_names}
    for number, row in lines[1:]:
        if len(row) < len(names):
            raise FileFormatError(path, number, f"has {len(row)} fields, not {len(names)}")
        for name, k in zip(column_names, positions, strict=True):
            columns[name].append("" if k is None else row[k])
    if not columns[column_names[0]]:
        raise FileFormatError(path, None, "has no rows")
    return columns


def read_parquet(path: Path, column_names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns `column_names` of a Parquet file.

    Raises:
        SloBenchError: pyarrow is not installed.
        FileFormatError: the file cannot be read or has no such columns.
    """
    need("parquet", str(path))
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        missing = [name for name in column_names if name not in names]
        if missing:
            raise FileFormatError(
                path, None, f"has no column {missing[0]!r}; its columns are {', '.join(names)}"
            )
        return dict(pq.read_table(path, columns=list(column_names)).to_pydict())
    except (OSError, pa.ArrowException) as error:
        raise FileFormatError(path, None, f"cannot be read as Parquet: {error}") from None


def _write_table(path: Path, kind: str, table: ProfileTable) -> None:
    names = TABLES[kind].columns
    columns: dict[str, list[Any]] = {
        name: (table.words.get(name, table.columns.get(name, np.empty(0)))).tolist()
        for name in names
    }
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), path)
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.12g}" if isinstance(v, float) else v for v in row])
    write_whole(path, [text.getvalue().encode()])
