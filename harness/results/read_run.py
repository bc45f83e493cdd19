"""A run folder, read and checked. What cannot be read is named, with its line where that shows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...workloads.checksums import unsealed
from ...workloads.csv_text import unguarded
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.extras import need
from ...workloads.input_files import TABLE, check_input, max_input_bytes, open_bounded, too_large
from ...workloads.parsing import parse_json
from .run_columns import (
    API_COLUMN,
    FAULT_COLUMN,
    LEAD_COLUMNS,
    NUMBER_COLUMNS,
    OPTIONAL_COLUMNS,
    REASON_COLUMN,
    REQUEST_COLUMNS,
    TEXT_COLUMNS,
    TIMELINE_COLUMNS,
    TIMESERIES_COLUMNS,
    TOKENIZER_COLUMN,
)
from .run_folder import (
    BAND_BASIS,
    BAND_DRAWS,
    CHECKSUMS,
    EXPERIMENT,
    PLANNED,
    check_distinct,
    check_files,
    check_row,
    check_rows,
    not_a_run,
)

_WORD_COLUMNS = (
    *(REASON_COLUMN, FAULT_COLUMN, API_COLUMN, TOKENIZER_COLUMN),
    *(BAND_BASIS, BAND_DRAWS),
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_JUDGED = {"valid", "stationary", CHECKSUMS}
_NO_VALUE = ["", "nan", "NaN", "None"]
_UNREADABLE = (ValueError, OSError, EOFError, zlib.error, UnicodeError)


@dataclass(frozen=True)
class RunResults:
    """The results of one experiment. `axes` are the sweep axes' column names in `cells`."""

    path: Path
    name: str
    experiment_toml: str
    environment: Mapping[str, Any]
    cells: pd.DataFrame
    axes: tuple[str, ...]

    @property
    def keeps_requests(self) -> bool:
        """Whether the run has per-request records."""
        return (self.path / "requests").is_dir()

    @property
    def unfinished(self) -> str:
        """A sentence on planned cells without a row; empty if every cell has one."""
        planned = self.environment.get(PLANNED)
        if not isinstance(planned, int) or len(self.cells) >= planned:
            return ""
        return (
            f"{self.name} has {len(self.cells)} of {planned} cells: it was interrupted, or rows of "
            f"cells.csv are lost; continue with slo-bench run --resume --out {self.path}"
        )


def read_run(path: Path) -> RunResults:
    """The run folder at `path`; SloBenchError names the file that is missing or malformed."""
    path = Path(path)
    if not path.is_dir():
        raise SloBenchError(f"{path} is not a run folder: there is no such directory")
    if (refusal := not_a_run(path)) is not None:
        raise SloBenchError(refusal)
    experiment_toml = _read_text(_existing(path / "experiment.toml"))
    environment = _read_environment(_existing(path / "environment.json"))
    cells, axes = _read_cells(_existing(path / "cells.csv"))
    if results := environment.get("results"):
        _existing(path / str(results))
        check_rows(path, len(cells))
    return RunResults(
        path=path,
        name=path.resolve().name,
        experiment_toml=experiment_toml,
        environment=environment,
        cells=cells,
        axes=axes,
    )


def read_runs(paths: Sequence[Path]) -> list[RunResults]:
    """Several run folders, in order; each may be given once, and their names become distinct."""
    if not paths:
        raise SloBenchError("no run folder given; a report needs at least one")
    resolved = [Path(path).resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise SloBenchError(f"{path} is given twice; a report takes each run folder once")
    runs = [read_run(Path(path)) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [
        RunResults(r.path, str(r.path), r.experiment_toml, r.environment, r.cells, r.axes)
        for r in runs
    ]


def read_requests(run_path: Path, cell: str) -> pd.DataFrame:
    """The `REQUEST_COLUMNS` and `OPTIONAL_COLUMNS` of one cell's requests.

    Times are in s, NaN where the event never happened or there is no bound. An optional column that
    the file lacks has its default value in every row.
    """
    path = detail_file(run_path / "requests", cell)
    read = read_table(path, REQUEST_COLUMNS, OPTIONAL_COLUMNS, words=("outcome", "role"))
    missing = {c: value for c, value in OPTIONAL_COLUMNS.items() if c not in read}
    return read.assign(**{c: _repeated(value, len(read)) for c, value in missing.items()})


def _repeated(value: float | str, rows: int) -> float | pd.Categorical[str]:
    """A column of one value; a word a million times over is one category."""
    if isinstance(value, str):
        return pd.Categorical.from_codes(np.zeros(rows, dtype=np.int8), pd.Index([value]))
    return value


def read_timeline(run_path: Path, cell: str) -> pd.DataFrame:
    """Queue, batch and KV use of one cell over time."""
    return read_table(detail_file(run_path / "timelines", cell), TIMELINE_COLUMNS)


def read_timeseries(run_path: Path, cell: str) -> pd.DataFrame | None:
    """Values over time of single instances or models of a cell; None if the cell has none."""
    path = run_path / "timeseries" / f"{cell}.csv.gz"
    if not path.is_file():
        return None
    return read_table(path, TIMESERIES_COLUMNS, words=("metric", "entity"))


def detail_file(folder: Path, cell: str) -> Path:
    """The table of one cell in a sub-folder of a run folder, CSV or Parquet.

    Raises:
        SloBenchError: there is none.
    """
    parquet = folder / f"{cell}.parquet"
    return parquet if parquet.is_file() else _existing(folder / f"{cell}.csv.gz")


def read_table(
    path: Path,
    required: Sequence[str] | None = None,
    optional: Iterable[str] = (),
    *,
    words: Sequence[str] = (),
) -> pd.DataFrame:
    """Columns of a CSV or Parquet table: `words` as categories, all others as float64.

    Without `required`, all columns as pandas reads them.

    Raises:
        SloBenchError: the table is Parquet and pyarrow is not installed.
        FileFormatError: the table cannot be read, lacks a required column, or has text in place of
            a number.
    """
    try:
        dtypes = {
            name: "category" if name in words else "float64"
            for name in (*(required or ()), *optional)
        }
        if path.suffix == ".parquet":
            with _parquet(path) as file:
                names = file.schema_arrow.names
                if required is not None:
                    names = [name for name in dtypes if name in names]
                    _check_columns(path, required, names)
                table: pd.DataFrame = file.read(names).select(names).to_pandas()
            others = {n: t for n, t in dtypes.items() if n in names and table.dtypes[n] != t}
            return table.astype(others)
        if required is None:
            with _text_of(path) as text:
                return pd.read_csv(text)
        numbers = {name: _NO_VALUE for name in dtypes if name not in words}
        with _text_of(path) as text:
            table = pd.read_csv(
                text,
                usecols=dtypes.__contains__,
                dtype=dtypes,
                keep_default_na=False,
                na_values=numbers,
            )
        _check_columns(path, required, table.columns)
        return table
    except _UNREADABLE as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error


@contextmanager
def _text_of(path: Path) -> Iterator[IO[bytes]]:
    """Bytes of a CSV file, unpacked if it is gzip, up to the limit of input files."""
    check_input(path, TABLE)
    with open_bounded(path, packed=path.suffix == ".gz", growth=TABLE) as text:
        yield text


def _parquet(path: Path) -> ParquetFile:
    """The opened Parquet file.

    Raises:
        FileFormatError: its columns would be larger than the limit of input files.
    """
    need("parquet", str(path))
    from pyarrow.parquet import ParquetFile

    check_input(path, TABLE)
    file = ParquetFile(path)
    about = file.metadata
    if about.num_rows * about.num_columns > max_input_bytes(TABLE):  # at least a byte each
        raise too_large(path, TABLE)
    return file


def _check_columns(path: Path, required: Sequence[str], columns: Iterable[str]) -> None:
    """Raise FileFormatError unless all required columns are among those of the table."""
    if missing := set(required).difference(columns):
        names = ", ".join(name for name in required if name in missing)
        raise FileFormatError(path, 1, f"lacks the column {names}")


_LONGEST_STEM = 230  # bytes; file systems hold names of 255, and suffixes are added
_STEM = f"must be a plain file stem of at most {_LONGEST_STEM} bytes"


def _is_stem(stem: str) -> bool:
    plain = stem not in ("", ".", "..") and Path(stem).name == stem
    return plain and len(stem.encode()) <= _LONGEST_STEM


def _read_cells(path: Path) -> tuple[pd.DataFrame, tuple[str, ...]]:
    try:
        written = pd.read_csv(path, dtype="object", keep_default_na=False)
        rows = written.to_numpy()
        # One block for all: there are many columns and few rows.
        texts = np.array([unguarded(text) for text in rows.flat], dtype=object)
        raw = pd.DataFrame(texts.reshape(rows.shape), columns=list(map(unguarded, written.columns)))
    except _UNREADABLE as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    names = list(raw.columns)
    missing = [c for c in (*TEXT_COLUMNS, *NUMBER_COLUMNS, "valid") if c not in names]
    if missing:
        raise FileFormatError(path, 1, f"lacks the column {', '.join(missing)}")
    if raw.empty:
        raise FileFormatError(path, None, "holds no finished cell; run the experiment first")
    axes = tuple(c for c in names[: names.index("requests")] if c not in LEAD_COLUMNS)
    words = {*TEXT_COLUMNS, *axes, *_WORD_COLUMNS}
    numbers = _numbers_of(path, raw.drop(columns=[c for c in names if c in words | _JUDGED]))
    columns: dict[str, pd.Series[Any]] = {}
    for column in names:
        if column == CHECKSUMS:
            continue
        if column in words:
            columns[column] = raw[column].astype("str")
        elif column == "valid":
            columns[column] = raw[column].map({"True": True, "False": False})
            _refuse(path, raw, column, columns[column].isna(), "must be True or False")
            columns[column] = columns[column].astype(bool)
        elif column == "stationary":
            booleans = {"True": True, "False": False, "": None}
            _refuse(
                path, raw, column, ~raw[column].isin(list(booleans)), "must be True, False or empty"
            )
            columns[column] = raw[column].map(booleans).astype(object)
        else:
            columns[column] = numbers[column]
    # A single request, or one user of a closed loop, has no rate: it is shown at 0.
    columns["rate_rps"] = columns["rate_rps"].fillna(0.0)
    cells = pd.DataFrame(columns)
    for column in ("rate_rps", "attainment", "requests"):
        _refuse(
            path,
            raw,
            column,
            ~(cells[column] >= 0) | np.isinf(cells[column]),
            "must be a finite number of at least 0",
        )
    _refuse(path, raw, "cell", ~cells["cell"].map(_is_stem).astype(bool), _STEM)
    check_distinct(path, raw["cell"])
    if CHECKSUMS in names:
        for place, fields in enumerate(rows):
            check_row(path, place + 2, list(written.columns), list(fields))
        for cell, checksums in zip(raw["cell"], raw[CHECKSUMS], strict=True):
            check_files(path.parent, cell, checksums)
    return cells, axes


def _numbers_of(path: Path, raw: pd.DataFrame) -> pd.DataFrame:
    """The texts of number columns as float64, NaN where there is no value."""
    texts = raw.to_numpy(dtype=object).ravel()
    blank = np.isin(texts, _NO_VALUE)
    values = pd.to_numeric(pd.Series(texts).mask(blank), errors="coerce").to_numpy(dtype=float)
    wrong = (np.isnan(values) & ~blank).reshape(raw.shape)
    for place in np.flatnonzero(wrong.any(axis=0)):
        _refuse(path, raw, raw.columns[int(place)], pd.Series(wrong[:, place]), "must be a number")
    return pd.DataFrame(values.reshape(raw.shape), raw.index, raw.columns)


def _refuse(path: Path, raw: pd.DataFrame, column: str, bad: pd.Series[bool], rule: str) -> None:
    if bad.any():
        row = int(bad.to_numpy().argmax())
        raise FileFormatError(path, row + 2, f"{column} {rule} but is {raw[column].iloc[row]!r}")


def _read_environment(path: Path) -> Mapping[str, Any]:
    try:
        value = parse_json(_read_text(path))
    except json.JSONDecodeError as error:
        raise FileFormatError(path, error.lineno, f"is not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise FileFormatError(path, 1, "must hold a JSON object")
    return unsealed(path, value, path.with_name(EXPERIMENT))


def _existing(path: Path) -> Path:
    check_input(path, TABLE)
    if not path.is_file():
        raise SloBenchError(f"{path} is missing; is {path.parent} a whole run folder?")
    return path


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
