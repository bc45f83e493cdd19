"""Which column of a table holds arrivals and token counts, by its name or by the user's word.

Names are compared in lower case, with every run of other characters as `_`, and without what comes
before `usage`: `usage.prompt_tokens`, `num_prefill_tokens` (Vidur), `input_toks` (LLMServingSim),
`tokens_prompt` (OpenRouter). A name that ends in a unit of time says the unit; else numbers as
large as times since 1970 say it (1.7e9 s, 1.7e12 ms, …), and others are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from shlex import quote

import numpy as np

from ..arrays import Floats
from ..errors import FileFormatError, SloBenchError, UnknownNameError
from ..request import SLO_COLUMNS
from .table_reader import FileTable

ARRIVAL, PROMPT, OUTPUT = "arrival_s", "prompt_tokens", "output_tokens"
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # of a second
_SPELT = {"sec": "s", "seconds": "s", "millis": "ms", "milliseconds": "ms", "nanos": "ns"}
# A number from here on is a time since 1970 in this unit: of March 1973, in seconds of 2001.
_EPOCH = {"ns": 1e17, "us": 1e14, "ms": 1e11, "s": 1e9}

_YEAR_2100_S = 4.1e9
_PART = re.compile(r'(?:"[^"]*"|[^,"])+')  # of the user's word, up to a comma
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
_DATE_FORM = "a date as 2026-01-31T12:00:00"
_SHORTENED = re.compile(r"\d(?:\.(\d*))?E\+(\d+)")  # programs that keep all digits write e+12
_DAYS = (36526, 73050)  # 2000 and 2100, as spreadsheets count days
_LEAST_GAP_S = 0.01  # in the mean, where seconds as large as these days are taken for seconds

# The first of them that a table has is taken.
_NAMES = {
    ARRIVAL: "arrival arrived_at arrival_time arrival_timestamp timestamp request_time start_time "
    "started_at start time_generated created_at created sent_at send_time datetime date_time time "
    "ts",
    PROMPT: "input_tokens num_prefill_tokens num_prompt_tokens num_input_tokens prefill_tokens "
    "prompt_token_count prompt_tokens_count input_token_count tokens_prompt tokens_in in_tokens "
    "input_toks context_tokens request_tokens prompt_size input_size prompt_length input_length "
    "prompt_len input_len isl",
    OUTPUT: "completion_tokens generated_tokens num_decode_tokens num_output_tokens "
    "num_completion_tokens num_generated_tokens decode_tokens candidates_token_count "
    "output_token_count output_tokens_count tokens_completion tokens_out out_tokens output_toks "
    "response_tokens token_size output_size output_length completion_length "
    "response_length output_len completion_len osl",
}
# Seconds since the request before, where no column tells moments.
_GAPS = {"interarrival", "inter_arrival", "arrival_gap", "time_delta"} | {
    *("interarrival_time", "inter_arrival_time", "interarrival_gap"),
}
# Anthropic's usage counts these beside its `input_tokens`.
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
_SYNONYMS = {role: (role, *names.split()) for role, names in _NAMES.items()}
_OF_TIME = {"time", "timestamp", "ts", "date", "datetime", "arrival", "arrived", "created"} | {
    *("submitted", "received", "issued", "queued", "sent", "start", "started", "begin", "at")
}
_NOT_OF_ARRIVAL = {"latency", "elapsed", "duration", "ttft", "tpot", "itl", "e2e", "first"} | {
    *("last", "end", "ended", "finish", "finished", "completed", "done", "per", "total", "think"),
    *("limit", "timeout", "slo", "deadline", "token", "updated", "zone", "wait", "inter"),
}


# Columns of whole numbers beside those of tokens: the lowest, and what stands for an empty cell.
WHOLE = {
    "max_output_tokens": (0, 0),
    "priority": (-(2**31), 0),
    "num_inputs": (1, 1),
    **dict.fromkeys(("session", "follows"), (-1, -1)),
}
COLUMNS = (
    *(ARRIVAL, PROMPT, OUTPUT, "expected_output_tokens", *WHOLE, *SLO_COLUMNS.values(), "think_s"),
    *("request_type", "class", "model", "prefix_blocks", "prefix_block_size", "joins", "hash_ids"),
    "answer_hash_ids",
)


@dataclass(frozen=True)
class Column:
    """A column of a file, and the unit of its times; no name: it is left unread."""

    name: str
    unit: str = ""


def parse_columns(text: str | None) -> dict[str, Column]:
    """Read `arrival_s=timestamp:ms,prompt_tokens=usage.prompt_tokens,class=`: the file's column of
    each column of a workload; nothing after `=` leaves it unread. A name with commas stands in
    double quotes: `arrival_s="sent, UTC":ms`.

    Raises:
        SloBenchError: it has another form, names a column twice, or gives a count a unit.
        UnknownNameError: a workload has no such column.
    """
    mapping: dict[str, Column] = {}
    if (text or "").count('"') % 2:
        raise SloBenchError(f"cannot read columns {text!r}: a double quote has no other")
    for part in filter(str.strip, _PART.findall(text or "")):
        role, equals, name = (word.strip() for word in part.partition("="))
        if role not in COLUMNS:
            raise UnknownNameError("column of a workload", role, COLUMNS)
        head, colon, unit = name.rpartition(":")
        if not equals or not role or role in mapping:
            raise SloBenchError(
                f"cannot read columns {text!r}; write arrival_s=timestamp:ms,"
                "prompt_tokens=usage.prompt_tokens (units: s, ms, us, ns), each once"
            )
        if name.startswith('"') and name.endswith('"') and len(name) > 1:
            mapping[role] = Column(name[1:-1])
        elif colon and unit in UNITS:
            if not role.endswith("_s"):
                raise SloBenchError(f"{role} is no time: leave the unit {unit} out of {part!r}")
            mapping[role] = Column(head.removeprefix('"').removesuffix('"'), unit)
        else:
            mapping[role] = Column(name)
    return mapping


def words(name: str) -> str:
    """A name as it is compared: "ContextTokens" and "Context tokens" are alike."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    plain = re.sub(r"[^a-z0-9]+", "_", apart.lower()).strip("_")
    return plain.rpartition("usage_")[2] or plain


def _unit(plain: str) -> tuple[str, str]:
    """A compared name without the unit at its end, and the unit."""
    head, _, end = plain.rpartition("_")
    end = _SPELT.get(end, end)
    return (head, end) if head and end in UNITS else (plain, "")


def roles(names: Iterable[str]) -> dict[str, Column]:
    """The columns that hold arrivals and tokens, by their names alone; one of `metadata` or named
    in UTC only where no other holds them.
    """
    plain = {name: words(name) for name in names}
    shorter = {name: p.removesuffix("_utc").removeprefix("metadata_") for name, p in plain.items()}
    return {**_roles(shorter), **_roles(plain)}


def _roles(names: Mapping[str, str]) -> dict[str, Column]:
    """The columns by the names that they are compared by."""
    compared: dict[str, Column] = {}
    times: dict[str, Column] = {}  # by names without their units
    for name, plain in names.items():
        compared.setdefault(plain, Column(name))
        head, unit = _unit(plain)
        if unit:
            times.setdefault(head, Column(name, unit))
    by_role: dict[str, Column] = {}
    for role, synonyms in _SYNONYMS.items():
        if role == ARRIVAL:
            among = {**times, **compared}
        else:  # ContextTokens in lower case is one word
            among = {name.replace("_", ""): column for name, column in compared.items()} | compared
            synonyms = (*synonyms, *(name.replace("_", "") for name in synonyms))
        column = next((among[name] for name in synonyms if name in among), None)
        if column is not None:
            by_role[role] = column
    return by_role


def renamed(table: FileTable, mapping: Mapping[str, Column]) -> FileTable:
    """The table with the names of a workload's columns, and arrivals in seconds from the first.

    Raises:
        FileFormatError: the file lacks a column of `mapping`, or has none of arrivals that is known
            and one that looks like it.
    """
    chosen = {**roles(table.columns), **mapping}
    sources = {*mapping, *(column.name for column in chosen.values())}
    columns = {name: cells for name, cells in table.columns.items() if name not in sources}
    left_out = [role for role, column in mapping.items() if not column.name and role in table]
    notes = []
    for role, column in chosen.items():
        if not column.name:
            continue
        cells, unit = table.cells(column.name), ""
        if role == ARRIVAL:
            seconds, unit = _seconds(table, column)
            cells = list(seconds)
        elif column.unit:
            unit, empty = column.unit, np.inf if role in SLO_COLUMNS.values() else 0.0
            cells = list(table.floats(column.name, empty=empty) / UNITS[unit])
        beside = []
        if role == PROMPT and role not in mapping and words(column.name) == "input_tokens":
            beside = [name for name in columns if words(name) in _BESIDE_INPUT]
            counts = [
                table.ints(column.name, empty=0),
                *(table.ints(name, empty=0) for name in beside),
            ]
            cells = list(np.sum(counts, axis=0))
            for name in beside:
                del columns[name]
        if column.name != role:
            source = " + ".join((column.name, *beside))
            notes.append(f"{role} is read from {source}{unit and f' ({unit})'}")
        columns[role] = cells
    if ARRIVAL not in columns and ARRIVAL not in mapping:
        if (gap := _gap(columns)) is not None:
            seconds = table.floats(gap.name) / UNITS[gap.unit]
            columns[ARRIVAL] = list(np.cumsum(seconds) - seconds[0])
            note = f"{ARRIVAL} is the sum of {gap.name} ({gap.unit} since the request before)"
            del columns[gap.name]
            return replace(
                table, columns=columns, unread=(*table.unread, *left_out), notes=(*notes, note)
            )
        for name in table.columns:
            parts = {*words(name).split("_")}
            if parts & _OF_TIME and not parts & _NOT_OF_ARRIVAL:
                raise FileFormatError(
                    table.path,
                    1,
                    f"no column of arrivals is known, but {name!r} looks like one: give "
                    f"{_option(name)} (seconds; {_option(name, ':ms')} for milliseconds), or "
                    f"--columns {ARRIVAL}= to draw arrivals",
                )
    unread = (*table.unread, *left_out)
    return replace(table, columns=columns, unread=unread, notes=tuple(notes))


def _gap(names: Iterable[str]) -> Column | None:
    """The column of times since the request before, by its name; None if there is none."""
    for name in names:
        head, unit = _unit(words(name))
        if head in _GAPS:
            return Column(name, unit or "s")
    return None


def _seconds(table: FileTable, column: Column) -> tuple[Floats, str]:
    """Times in seconds, and the unit in which they stand in the file."""
    cells = table.cells(column.name)
    if column.name == ARRIVAL and not column.unit:  # as we write it
        return table.floats(ARRIVAL), "s"
    if any(_DATE.match(str(cell)) for cell in cells):
        return _moments_s(table, column.name), "dates"
    for row, cell in enumerate(cells):
        if isinstance(cell, str) and re.search(r"\d[:/.]\d+[:/.]\d", cell):
            raise table.fail(
                row, f"{column.name} must be a number or {_DATE_FORM} but is {cell!r:.40}"
            )
    values = table.floats(column.name)
    largest = float(values.max())
    unit = column.unit or epoch_unit(largest) or "s"
    _check_spreadsheet(table, column, values, UNITS[unit])
    if not column.unit and largest >= _EPOCH["ms"] and largest / UNITS[unit] > _YEAR_2100_S:
        raise table.fail(
            int(values.argmax()),
            f"{column.name} {cells[int(values.argmax())]!r:.40} is no time since 1970 of a known "
            f"unit: give {_option(column.name, ':UNIT')}, or dates as 2026-01-31T12:00",
        )
    # Integers of nanoseconds lose their last digits as floats: subtract before.
    if largest > 2**53 and all(str(cell).strip().isdigit() for cell in cells):
        first = min(map(int, cells))
        values = np.array([int(cell) - first for cell in cells], dtype=np.float64)
    elif largest >= 1e9:
        values = values - values.min()
    return values / UNITS[unit], unit


def _check_spreadsheet(table: FileTable, column: Column, values: Floats, per_s: float) -> None:
    """Raise FileFormatError for times that a spreadsheet has rounded, or writes as days."""
    shortened = [_SHORTENED.fullmatch(str(cell).strip()) for cell in table.cells(column.name)]
    digits = [10.0 ** (int(m[2]) - len(m[1] or "")) for m in shortened if m is not None]
    if len(digits) == len(shortened) and min(digits) > per_s:
        raise table.fail(
            0,
            f"{column.name} {table.cells(column.name)[0]!r:.40} was rounded to more than a second, "
            "as spreadsheets do: export its cells as numbers without decimals",
        )
    low, high = values.min(), values.max()
    days = _DAYS[0] <= low < high < _DAYS[1] and (values % 1 != 0).any()
    if days and not column.unit and (high - low) / len(values) < _LEAST_GAP_S:
        raise table.fail(
            0,
            f"{column.name} {low:.15g} looks like a day of a spreadsheet: export its cells as "
            f"2026-01-31 12:00:00, or give {_option(column.name, ':s')} for seconds",
        )


def _option(name: str, unit: str = "") -> str:
    """What a shell is given to read arrivals from a column."""
    named = f'"{name}"' if re.search("[,:]", name) else name
    return f"--columns {quote(f'{ARRIVAL}={named}{unit}')}"


def epoch_unit(value: float) -> str:
    """The unit of a time since 1970, by its size; empty where it is too small for one."""
    return next((unit for unit, low in _EPOCH.items() if value >= low), "")


def _moments_s(table: FileTable, name: str) -> Floats:
    """Dates and times, in UTC or with their zone, as seconds from the earliest."""
    for row, cell in enumerate(table.cells(name)):
        if not _DATE.match(str(cell)):
            raise table.fail(row, f"{name} must be {_DATE_FORM} but is {cell!r:.40}")
    try:
        seconds = table.times_s(name)
    except FileFormatError:
        stamps = []
        for row, cell in enumerate(table.cells(name)):
            try:
                moment = datetime.fromisoformat(str(cell).strip())
            except ValueError:
                raise table.fail(row, f"{name} must be {_DATE_FORM} but is {cell!r:.40}") from None
            stamps.append(moment.timestamp() if moment.tzinfo else _as_utc(moment))
        seconds = np.array(stamps)
    since: Floats = seconds - seconds.min()
    return since


def _as_utc(moment: datetime) -> float:
    return (moment - datetime(1970, 1, 1)).total_seconds()
