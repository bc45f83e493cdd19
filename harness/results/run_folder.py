"""A run folder: files written atomically, and a table with one row for each finished cell.

    experiment.toml          the experiment with all defaults; running it gives the same bytes
    environment.json         versions, machine, date, and the origin of the step times
    cells.csv                one row for each cell, in the order of the experiment
    requests/<cell>.csv.gz   records of all requests (or .parquet)
    timelines/<cell>.csv.gz  queue, batch and KV use over time
    timeseries/<cell>.csv.gz  values of single instances or models, and events
    mispredictions/<cell>.jsonl  lengths for retraining a predictor, if a policy collected any

A cell counts as finished once its row is in `cells.csv`; its details are on disk before that. The
row's last field, `checksums`, has the CRC-32 of its files, of the experiment and of the row.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...workloads.checksums import CHANGED, crc32_of_fields, crc32_of_file, sealed, unsealed
from ...workloads.csv_text import csv_bytes, guarded, unguarded
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_json, read_json_object
from ...workloads.whole_file import UNFINISHED_SUFFIX, write_whole
from .run_checkpoint import check_same_simulator, check_settings

if sys.platform != "win32":
    import fcntl

Value = str | int | float | bool | None
Row = dict[str, Value]

_FIRST_FIGURE = "requests"
CHECKSUMS = "checksums"
CELLS = "cells.csv"
CAPACITY_FILE = "capacity.json"  # what a capacity search writes beside `cells.csv`
TUNED, TUNING, PLAN = "tune.json", "tune.toml", "plan.jsonl"  # importing the tuner is slow
BAND_BASIS = "band_basis"  # what the prediction bands of a simulated cell are based on
BAND_LEVEL = "band_level"  # share of earlier errors between the ends of a band
BAND_DRAWS = "band_draws"  # attainment by evenly spaced errors, the fastest first
INPUTS = "inputs"  # in environment.json: CRC-32 of each file that the experiment reads
PROMPT_SALT = "prompt_salt"  # in environment.json; unknown where no prompts are sent
RESUMED = "resumed"  # in environment.json: the commands that went on
PLANNED = "planned_cells"  # in environment.json; unknown in a search
_LAST_COLUMNS = ("attainment_spread", CHECKSUMS)
_DETAILS = (
    "requests/*.csv.gz",
    "requests/*.parquet",
    "timelines/*.csv.gz",
    "timeseries/*.csv.gz",
    "mispredictions/*.jsonl",
)
EXPERIMENT, _ROW = "experiment.toml", "row"


@dataclass
class RunFolder:
    """A folder that one run holds. Made by `open_run_folder`."""

    path: Path
    cells: Sequence[str]  # all there will be, in order
    experiment_crc32: str
    environment: Mapping[str, object]
    finished: dict[str, Row] = field(default_factory=dict)
    damaged: dict[str, FileFormatError] = field(default_factory=dict)  # cells that were finished
    again: Callable[[Row], bool] = field(default=lambda row: False)  # whether to make it again

    @property
    def missing(self) -> list[str]:
        """Cells without a row, in order."""
        return [cell for cell in self.cells if cell not in self.finished]

    def extend(self, cells: Sequence[str]) -> None:
        """Add cells: all there will be now, in order. Rows that the folder has of them are read."""
        new = [cell for cell in cells if cell not in set(self.cells)]
        finished, damaged = _finished_rows(self.path, new, self.again)
        self.finished |= finished
        self.damaged |= damaged
        self.cells = cells
        planned = self.environment.get(PLANNED)
        if isinstance(planned, int) and planned < len(cells):
            self.environment = {**self.environment, PLANNED: len(cells)}
            _write_environment(self.path, self.environment)

    def rows(self) -> list[Row]:
        """Rows of the finished cells, in order."""
        return [self.finished[cell] for cell in self.cells if cell in self.finished]

    def add(self, cell: str, row: Row) -> None:
        """Count a cell as finished; its details must be on disk."""
        self.keep(cell, row)
        self.write()

    def keep(self, cell: str, row: Row) -> None:
        """Count a cell as finished without writing the table; call `write` afterwards."""
        files = {name: self.path / name.replace("*", cell) for name in _DETAILS}
        crc32_by_name = {EXPERIMENT: self.experiment_crc32}
        crc32_by_name |= {
            name: crc32_of_file(file) for name, file in files.items() if file.is_file()
        }
        crc32_by_name[_ROW] = crc32_of_fields((guarded(name), _text(row[name])) for name in row)
        texts = (f"{name}={crc}" for name, crc in crc32_by_name.items())
        self.finished[cell] = row | {CHECKSUMS: " ".join(texts)}

    def write(self) -> None:
        """Put the table of finished cells on disk."""
        write_rows(self.path / "cells.csv", self.rows())


@contextlib.contextmanager
def open_run_folder(
    path: Path,
    *,
    cells: Sequence[str],
    experiment_toml: str,
    environment: Mapping[str, object],
    resume: bool,
    again: Callable[[Row], bool] = lambda row: False,
) -> Iterator[RunFolder]:
    """Hold `path` for one run of one experiment. Cells of whose row `again` is true are missing.

    A folder made here is removed again when the block raises before any cell finished.

    Raises:
        SloBenchError: the folder is in use, cannot be written, holds files and `resume` is false,
            or holds another experiment.
    """
    created = _make(path)
    try:
        with _lock(path):
            experiment_file = path / EXPERIMENT
            for leftover in path.glob(f".{experiment_file.name}.*{UNFINISHED_SUFFIX}"):
                leftover.unlink()  # of a run that was killed before it wrote its experiment
            if any(path.iterdir()):
                if not resume:
                    raise SloBenchError(
                        f"{path} is not empty; finish what is there with --resume, "
                        "or choose another folder with --out"
                    )
                if not experiment_file.is_file():
                    raise SloBenchError(f"{path} cannot be resumed: it has no experiment.toml")
                check_settings(
                    experiment_file, experiment_file.read_text(encoding="utf-8"), experiment_toml
                )
                _clear(path)  # of a run that was killed
            else:
                write_whole(experiment_file, [experiment_toml.encode()])
            merged_environment = _resumed(path, environment) if resume else environment
            folder = RunFolder(path, cells, crc32_of_file(experiment_file), merged_environment)
            folder.again = again
            folder.finished, folder.damaged = _finished_rows(path, cells, again)
            if resume and folder.finished:
                check_same_simulator(path, _kept_environment(path) or {}, environment)
            if folder.missing or not (path / "environment.json").is_file():
                _write_environment(path, merged_environment)
            try:
                yield folder
            except BaseException:
                created = created and not folder.finished
                _clear(path)  # of workers that were stopped
                raise
            created = False
    except BaseException:
        if created:
            shutil.rmtree(path)
        raise


def _write_environment(path: Path, environment: Mapping[str, object]) -> None:
    text = json.dumps(sealed(environment, path / EXPERIMENT), indent=2, ensure_ascii=False)
    write_whole(path / "environment.json", [f"{text}\n".encode()])


def has_no_result(row: Row) -> bool:
    """Return True for a cell of which no request was served: it may be measured again."""
    return row["valid"] is False and row["finished"] == 0


def _resumed(path: Path, environment: Mapping[str, object]) -> Mapping[str, object]:
    """The environment of the first run, with this command in `resumed`.

    Raises:
        SloBenchError: a file that the experiment reads was changed since.
    """
    first_environment = _kept_environment(path)
    if first_environment is None:
        return environment
    then, now = first_environment.get(INPUTS), environment.get(INPUTS)
    if isinstance(then, dict) and isinstance(now, dict):
        changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if changed:
            raise SloBenchError(
                f"{changed[0]} was changed since {path} was begun, so that its cells would be of "
                "two experiments; put the file back, or choose another folder with --out"
            )
    entry = {name: environment.get(name) for name in ("command", "created", "slo_bench")}
    before = first_environment.get(RESUMED)
    return {**first_environment, RESUMED: [*(before if isinstance(before, list) else ()), entry]}


def _kept_environment(path: Path) -> dict[str, object] | None:
    """The environment in a folder; None where there is none or it was damaged."""
    try:
        document = parse_json((path / "environment.json").read_text(encoding="utf-8"))
        return unsealed(path / "environment.json", document) if isinstance(document, dict) else None
    except (OSError, ValueError, FileFormatError):
        return None


def _clear(path: Path) -> None:
    for leftover in path.rglob(f".*{UNFINISHED_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _make(path: Path) -> bool:
    try:
        existed = path.is_dir()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write here")
    except (OSError, RecursionError) as error:  # of so many folders in folders
        reason = getattr(error, "strerror", None) or error
        raise SloBenchError(f"cannot write to {path!s:.200}: {reason}") from error
    return not existed


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other runs out of the folder; the system lets go when the process ends, however."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SloBenchError(
                f"{path} is in use by another run; wait for it or choose another folder with --out"
            ) from error
        yield
    finally:
        os.close(handle)


def _finished_rows(
    path: Path, cells: Sequence[str], again: Callable[[Row], bool]
) -> tuple[dict[str, Row], dict[str, FileFormatError]]:
    """Rows of cells with intact details, but those to be made `again`; and the errors of cells with
    damaged ones.
    """
    table = path / "cells.csv"
    if not table.is_file():
        return {}, {}
    rows = {str(row["cell"]): row for row in read_rows(table)}
    finished, damaged = {}, {}
    for cell in cells:
        if cell not in rows or again(rows[cell]):
            continue
        if CHECKSUMS not in rows[cell]:
            raise FileFormatError(table, 1, f"has no column `{CHECKSUMS}`; begin in a new folder")
        try:
            check_files(path, cell, rows[cell][CHECKSUMS])
            finished[cell] = rows[cell]
        except FileFormatError as error:
            damaged[cell] = error
    return finished, damaged


def check_files(folder: Path, cell: str, checksums: object) -> None:
    """Compare the checksums of a cell's files and of the experiment to those in the cell's row.

    Raises:
        FileFormatError: a file is missing, damaged, or belongs to another run.
    """
    crc32_by_name = dict(
        entry.split("=", 1) for entry in str(checksums or "").split() if "=" in entry
    )
    if unknown := set(crc32_by_name) - {EXPERIMENT, *_DETAILS, _ROW}:
        raise FileFormatError(
            folder / "cells.csv",
            None,
            f"column `{CHECKSUMS}` of {cell} was damaged: it names {min(unknown)!r}, which is no "
            "file of a cell; run --resume makes the cell anew",
        )
    for name in (EXPERIMENT, *_DETAILS):
        path = folder / name.replace("*", cell)
        if name in crc32_by_name and crc32_of_file(path) != crc32_by_name[name]:
            raise FileFormatError(
                path,
                None,
                f"does not go with the row of {cell} in cells.csv: one of them was damaged or is "
                "of another run; run --resume makes the cell anew",
            )


def check_row(path: Path, line: int, names: Sequence[str], fields: Sequence[str]) -> None:
    """Hold a row of `cells.csv`, as texts in the file, against its own checksum.

    Raises:
        FileFormatError: it was changed.
    """
    if CHECKSUMS not in names:
        return
    texts = dict(zip(names, fields, strict=True))
    row_crc32 = texts.pop(CHECKSUMS).rpartition(f" {_ROW}=")[2]
    if row_crc32 != crc32_of_fields(texts.items()):
        raise FileFormatError(
            path, line, f"the row {CHANGED}; take the line out, and --resume makes its cell anew"
        )


def check_distinct(path: Path, cells: Iterable[str]) -> None:
    """Refuse a cell that stands in `cells.csv` twice: it would count as another seed.

    Raises:
        FileFormatError: names the second line of the cell.
    """
    lines: dict[str, int] = {}
    for line, cell in enumerate(cells, start=2):
        if cell in lines:
            raise FileFormatError(
                path, line, f"repeats the cell {cell} of line {lines[cell]}; take one line out"
            )
        lines[cell] = line


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; a column that a row lacks is empty in it.

    Columns that identify a row, parameters of other systems too, come before its metrics.
    """
    identity = [name for row in rows for name in itertools.takewhile(_FIRST_FIGURE.__ne__, row)]
    columns = list(dict.fromkeys((*identity, *(name for row in rows for name in row))))
    for last in _LAST_COLUMNS:
        if last in columns:
            columns.remove(last)
            columns.append(last)
    lines = ([_text(row.get(name)) for name in columns] for row in rows)
    write_whole(path, [csv_bytes([map(guarded, columns), *lines])])


def _text(value: Value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return guarded(value)
    return repr(value) if isinstance(value, float) else str(value)


def read_rows(path: Path) -> list[Row]:
    """Rows of a file of `write_rows`, with numbers as numbers; an empty field is None."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(file)
        table = list(csv.reader(lines))
    except (OSError, UnicodeError, csv.Error) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if not table or "cell" not in table[0]:
        raise FileFormatError(path, 1, "has no column `cell`")
    if not lines[-1].endswith("\n"):
        raise FileFormatError(
            path, len(lines), "is cut off; take the line out, and --resume makes its cell anew"
        )
    cell_index = table[0].index("cell")
    for number, fields in enumerate(table, start=1):
        if len(fields) != len(table[0]):
            raise FileFormatError(
                path, number, f"has {len(fields)} fields where the header has {len(table[0])}"
            )
        if not _is_plain(fields[cell_index]):
            raise FileFormatError(
                path, number, f"cell must be a plain name but is {fields[cell_index]!r}"
            )
        if number > 1:
            check_row(path, number, table[0], fields)
    check_distinct(path, [fields[cell_index] for fields in table[1:]])
    names = list(map(unguarded, table[0]))
    return [dict(zip(names, map(_value, fields), strict=True)) for fields in table[1:]]


def _is_plain(cell: str) -> bool:
    """Whether files of that name lie in the folder that they are looked for in."""
    return cell not in ("", ".", "..") and Path(cell).name == cell and "\0" not in cell


def _value(text: str) -> Value:
    if text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    kinds: tuple[Callable[[str], Value], ...] = (int, float)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            value = kind(text)
            # "1_000", " 7" or "007" are names: only what reads back the same is a number.
            if _text(value) == text:
                return value
    return unguarded(text)


def not_a_run(folder: Path) -> str | None:
    """Which command takes a folder that is no run folder; None if it is one, or of unknown
    origin.
    """
    if (folder / CELLS).is_file():
        return None
    if (folder / TUNED).is_file():
        return (
            f"{folder} is a tuning run, not one to compare: slo-bench report {folder} shows it, "
            f"slo-bench run {folder / 'winner.toml'} makes a run of its winner"
        )
    if (folder / TUNING).is_file():
        return (
            f"{folder} is a tuning run that has not ended: slo-bench tune --resume --out {folder} "
            "continues it"
        )
    if (folder / PLAN).is_file():
        return (
            f"{folder} is a plan, not a run: its slo-bench plan shows it again with --resume, "
            f"slo-bench run {folder / 'experiment.toml'} makes a run of it"
        )
    return None


def check_rows(folder: Path, rows: int) -> None:
    """Hold the number of rows in `cells.csv` against the runs, which are written after them.

    Raises:
        FileFormatError: there are fewer, or the file of the runs is no capacity.json.
    """
    runs = sum(
        len(search.get("runs") or ())
        for search in read_searches(folder / CAPACITY_FILE)["searches"]
    )
    if rows < runs:
        raise FileFormatError(
            folder / "cells.csv", None, f"lacks rows of runs that {CAPACITY_FILE} has"
        )


def read_searches(path: Path) -> dict[str, Any]:
    """The whole file.

    Raises:
        FileFormatError: it is no capacity.json.
    """
    document = read_json_object(path)
    searches = document.get("searches")
    if not isinstance(searches, list) or not all(
        isinstance(search, dict) and _are_rows(search.get("found") or []) for search in searches
    ):
        raise FileFormatError(path, None, "is not what a capacity search writes")
    return unsealed(path, document, path.with_name(EXPERIMENT))


def _are_rows(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
