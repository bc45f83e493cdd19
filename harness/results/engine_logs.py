"""Request logs of real engines: arrival, first token and last token of every request.

Two formats are read: JSONL with one request a line, as LLMServingSim's benchmark writes it, with
the engine's settings in a `meta.json` beside it and the prompts' blocks in a `hash_ids.jsonl`; and
run folders of slo-bench, or one of their request files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import read_json_object
from ...workloads.prefixes import BLOCK_SIZE
from ...workloads.readers.table_reader import lines, read_flat_jsonl
from .request_blocks import RequestBlocks, read_hash_ids
from .run_columns import REASON_COLUMN
from .run_folder import CHECKSUMS, check_files, read_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# What a field may be called. Engines stamp `queued` when their core takes a request in.
_NAMES = {
    "arrival": ("arrival_time", "arrival_s", "arrived_at"),
    "queued": ("queued_ts", "queued_s"),
    "prompt": ("input_toks", "prompt_tokens", "input_tokens", "num_prompt_tokens"),
    "output": ("output_toks", "output_tokens", "completion_tokens"),
    "first": ("first_token_ts", "first_token_s"),
    "last": ("last_token_ts", "finish_s", "last_token_s"),
}
PROFILING = "profiling"  # folder in a run folder: levels that were measured for a profile alone
REPEATED = "repeated"  # the same: levels that were measured again
_LATEST_S = 1e11  # seconds since 1970 are 2e9, milliseconds 2e12
_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "finish_s")
# Where a request tells how it ended, and what those tell that finished.
_FINISHED: Mapping[str, Callable[[Any], bool]] = {
    "outcome": lambda word: word in (None, "finished", "completed", "success", "ok"),
    "success": lambda flag: flag not in (False, "False", "false", "0"),
    "error": lambda text: not text or str(text).lower() in ("none", "null", "nan", "false"),
}
_OF_REAL_SERVERS = ("sent_s", "server_prompt_tokens", "cached_tokens", "instance")
_WORDS = (*_FINISHED, "request_id")


@dataclass(frozen=True)
class EngineSettings:
    """The settings of the engine; None where the log has no value."""

    model: str | None = None
    tp: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_gpu_blocks: int | None = None  # as the engine counts them
    block_size: int | None = None
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    eager: bool | None = None
    version: str | None = None
    server: str | None = None
    system: str | None = None  # scheduling system
    context_tokens: int | None = None  # prompt and answer together
    instances: int | None = None
    dp: int | None = None  # data-parallel ranks of an instance
    router: str | None = None
    peer_link: str | None = None  # between GPUs, as measured: `16gb/s@20us`


@dataclass(frozen=True)
class RealLog:
    """Requests in order of arrival. Times are seconds from the first arrival.

    Latencies count from `begin_s`: when the engine received the request, if the log has that time,
    else the arrival (in a run folder of real servers: when the load generator had sent it).
    `notes` say what was left out or is doubtful; `rows` are the places in the file of requests that
    finished. `of_client`: times are those of a client, before the server's front end.
    """

    name: str
    arrival_s: Floats
    begin_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    first_s: Floats
    last_s: Floats
    engine: EngineSettings
    rows: Ints
    notes: tuple[str, ...] = ()
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache, if logged
    shared_blocks: Sequence[tuple[int, ...]] | None = None  # of prompts, 16 tokens each
    of_client: bool = False
    instance: Ints | None = None  # that served each request, from 0; None: not told

    def __len__(self) -> int:
        return len(self.arrival_s)

    def by_instance(self) -> list[RealLog]:
        """The log of each instance, or itself where requests do not tell theirs."""
        if self.instance is None or not self.instance.any():
            return [self]
        numbers = np.unique(self.instance).tolist()
        return [self._part(k, np.flatnonzero(self.instance == k)) for k in numbers]

    def _part(self, number: int, rows: NDArray[np.intp]) -> RealLog:
        zero_s, blocks = self.arrival_s[rows[0]], self.shared_blocks
        times = ("arrival_s", "begin_s", "first_s", "last_s")
        others = ("prompt_tokens", "output_tokens", "rows")
        return dataclasses.replace(
            self,
            name=f"{self.name}, instance {number}",
            engine=dataclasses.replace(self.engine, instances=1),
            cached_tokens=None,
            shared_blocks=blocks if blocks is None else [blocks[row] for row in rows],
            instance=None,
            **{name: getattr(self, name)[rows] - zero_s for name in times},
            **{name: getattr(self, name)[rows] for name in others},
        )

    @property
    def digest(self) -> str:
        """Tells the log from others, wherever it lies."""
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens, self.last_s)
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()[:16]

    def blocks(self, block_size: int) -> RequestBlocks:
        """Prefix hashes of its requests, of `block_size` tokens, or 16 where they are recorded."""
        size = block_size if self.shared_blocks is None else BLOCK_SIZE
        return RequestBlocks((self.prompt_tokens + self.output_tokens) // size, self.shared_blocks)


def read_log(path: str | Path, cell: str | None = None) -> RealLog:
    """The log at `path`: a JSONL file, a run folder (`cell` names one of several) or one of its
    request files.

    Raises:
        FileFormatError: it cannot be read, a field is missing, or its clocks do not agree.
        SloBenchError: the folder has several cells and none was named.
    """
    path = Path(path)
    if path.is_dir():
        return _from_run_folder(path, cell)
    if cell is not None:
        raise SloBenchError(f"--cell is for run folders, but {path} is a file")
    if path.name.endswith(_SUFFIXES):
        return log_of_columns(path, _read_requests(path), EngineSettings())
    requests = read_flat_jsonl(path).columns
    return log_of_columns(path, requests, read_settings(path.parent / "meta.json"))


def is_log(path: Path) -> bool:
    """Whether a JSONL file's first line, or a table's head, has times of first tokens that
    `read_log` takes.
    """
    head = next(filter(str.strip, lines(path)), "").strip()
    return any(f'"{name}"' in head or name in head.split(",") for name in _NAMES["first"])


def measured_logs(path: str | Path, cell: str | None = None) -> list[RealLog]:
    """As `read_log`, but all cells of a run folder where none is named; one of its request files
    is its cell.

    Raises:
        SloBenchError: also where a cell was simulated.
    """
    path = Path(path)
    folder = path.parent.parent
    if cell is None and path.parent.name == "requests" and (folder / "cells.csv").is_file():
        names = (path.name.removesuffix(s) for s in _SUFFIXES if path.name.endswith(s))
        return measured_logs(folder, next(names, path.name))
    table = path / "cells.csv"
    if not table.is_file():
        return [read_log(path, cell)]
    rows = read_rows(table)
    for row in rows:
        if row.get("backend") == "simulated" and cell in (None, str(row["cell"])):
            raise SloBenchError(f"{path} was simulated; a run of a real server is needed")
    return [
        read_log(path, name)
        for name in ([str(r["cell"]) for r in rows] if cell is None else [cell])
    ]


def meta_path(folder: Path, cell: str) -> Path:
    """Path of the file in a run folder with the settings of a cell's server."""
    return folder / "servers" / f"{cell}.meta.json"


def profiling_cell(cell: str) -> str:
    """The name of the level that was measured first, for a profile, where `cell` is alone."""
    return f"profiling-{cell}"


def repeated_cell(cell: str, number: int) -> str:
    """The name of the `number`th time that a level was measured, from 2 on.

    A name of its own salts the prompts: lengths and arrivals are the same, and nothing of them is
    in the prefix cache.
    """
    return f"repeated-{number}-{cell}"


def read_settings(path: Path) -> EngineSettings:
    """Read the engine's settings from a `meta.json`; empty settings if there is no such file.

    Raises:
        FileFormatError: the file cannot be read, or a value has the wrong type.
    """
    if not path.is_file():
        return EngineSettings()
    meta = read_json_object(path)
    engine, cache = (_object(path, meta, name) for name in ("engine_kwargs", "kv_cache"))

    def count(table: Mapping[str, Any], name: str) -> int | None:
        value = table.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FileFormatError(
                path, None, f"{name} must be a whole number above 0 but is {value!r}"
            )
        return value

    def flag(name: str, *tables: Mapping[str, Any]) -> bool | None:
        value = next((t[name] for t in tables if t.get(name) is not None), None)
        if value is not None and not isinstance(value, bool):
            raise FileFormatError(path, None, f"{name} must be true or false but is {value!r}")
        return value

    model = meta.get("model") or engine.get("model")
    version = meta.get("vllm_version")
    return EngineSettings(
        model=str(model) if model else None,
        tp=count(engine, "tensor_parallel_size"),
        max_num_seqs=count(engine, "max_num_seqs"),
        max_num_batched_tokens=count(engine, "max_num_batched_tokens"),
        num_gpu_blocks=count(cache, "num_gpu_blocks") or count(engine, "num_gpu_blocks_override"),
        block_size=count(cache, "block_size") or count(engine, "block_size"),
        prefix_caching=flag("enable_prefix_caching", cache, engine),
        async_scheduling=flag("async_scheduling", engine),
        eager=flag("enforce_eager", engine),
        version=str(version) if version else None,
        server=_text(meta.get("server")),
        system=_text(meta.get("system")),
        context_tokens=count(engine, "max_model_len"),
        instances=count(meta, "instances"),
        dp=count(engine, "data_parallel_size"),
        router=_text(meta.get("router")),
        peer_link=_text(meta.get("peer_link")),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _object(path: Path, meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = meta.get(name) or {}
    if not isinstance(value, dict):
        raise FileFormatError(path, None, f"{name} must be a JSON object")
    return value


# -------------------------------------------------------------------- run folders


def read_cell(folder: Path, cell: str) -> RealLog:
    """Read the requests of one cell, without a check against its row in `cells.csv`.

    Raises:
        FileFormatError: the run kept no requests of the cell, or they cannot be read.
    """
    suffixes = (".csv.gz", ".parquet", ".csv")
    for file in (folder / "requests" / f"{cell}{suffix}" for suffix in suffixes):
        if file.is_file():
            settings = read_settings(meta_path(folder, cell))
            return log_of_columns(file, _read_requests(file), settings)
    raise FileFormatError(folder, None, f"keeps no requests of cell {cell!r}")


def _from_run_folder(path: Path, cell: str | None) -> RealLog:
    table = path / "cells.csv"
    if not table.is_file():
        raise FileFormatError(path, None, "is not a run folder: it has no cells.csv")
    rows = {str(row["cell"]): row for row in read_rows(table)}
    if cell is None and len(rows) != 1:
        raise SloBenchError(
            f"{path} has {len(rows)} cells; name one with --cell: {', '.join(rows) or 'none'}"
        )
    chosen = next(iter(rows)) if cell is None else cell
    if chosen not in rows:
        raise SloBenchError(f"{path} has no cell {chosen!r}; it has {', '.join(rows)}")
    check_files(path, chosen, rows[chosen].get(CHECKSUMS))
    log = read_cell(path, chosen)
    row = rows[chosen]
    if reason := row.get(REASON_COLUMN):
        log = dataclasses.replace(log, notes=(*log.notes, f"{chosen} is not valid: {reason}"))
    if meta_path(path, chosen).is_file():
        return log
    return dataclasses.replace(log, engine=_settings_of_row(row))


def _settings_of_row(row: Mapping[str, Any]) -> EngineSettings:
    """Engine settings from a row of `cells.csv`, for runs that wrote no `meta.json`."""
    blocks, system = _whole(row.get("num_gpu_blocks")), row.get("system")
    return EngineSettings(
        model=_text(row.get("model") or None),
        tp=_whole(row.get("tp")),
        max_num_seqs=_whole(row.get("max_num_seqs", row.get(f"{system}.max_num_seqs"))),
        max_num_batched_tokens=_whole(
            row.get("max_num_batched_tokens", row.get(f"{system}.max_num_batched_tokens"))
        ),
        num_gpu_blocks=None
        if blocks is None
        else blocks + 1,  # vLLM counts one placeholder block more
        block_size=_whole(row.get("block_size")),
    )


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and value == value else None


def _read_requests(path: Path) -> dict[str, Sequence[Any]]:
    from .read_run import read_table

    frame = read_table(path, _REQUIRED, (*_OF_REAL_SERVERS, *_WORDS), words=_WORDS)
    if "sent_s" in frame:  # the load generator may have sent late, which the server cannot know
        frame["arrival_s"] = frame.pop("sent_s")
    if "server_prompt_tokens" in frame:  # the server's own count, where it gives one
        theirs = frame["server_prompt_tokens"]
        frame["prompt_tokens"] = theirs.where(theirs >= 1, frame["prompt_tokens"])
    return {str(name): frame[name].tolist() for name in frame}


# -------------------------------------------------------------------- columns


def log_of_columns(
    path: Path, columns: Mapping[str, Sequence[Any]], settings: EngineSettings
) -> RealLog:
    """The log of the requests in `columns` of the file at `path`, named as in its fields.

    Raises:
        FileFormatError: a field is missing or no number, or clocks do not agree.
    """
    notes: tuple[str, ...] = ()
    named = {field: next((n for n in _NAMES[field] if n in columns), None) for field in _NAMES}
    arrives, queues = named["arrival"], named["queued"]
    named |= {"arrival": arrives or queues, "queued": queues or arrives}
    rows_by_field = []
    for field, column in named.items():
        if column is None:
            names = _NAMES[field] + (_NAMES["queued"] if field == "arrival" else ())
            raise FileFormatError(
                path, None, f"has no {' or '.join(names)}; each request needs one"
            )
        rows_by_field.append(_floats(path, column, columns[column]))
    table = np.stack(rows_by_field)
    arrival, begin, prompt, output, first, last = table
    cached = _floats(path, "cached_tokens", columns.get("cached_tokens", ()))
    cached = cached[cached >= 0]  # neither unknown nor NaN
    complete = np.isfinite(table).all(axis=0)
    complete &= (prompt >= 1) & (output >= 1) & (prompt <= 2**53) & (output <= 2**53)
    for name, values in columns.items():
        if (is_finished := _FINISHED.get(name.partition(".")[0])) is not None:
            complete &= np.array([is_finished(value) for value in values], dtype=np.bool_)
    if not complete.any():
        raise FileFormatError(path, None, "has no request with a first and a last token")
    arrival, begin, prompt, output, first, last = table[:, complete]
    if left_out := int((~complete).sum()):
        notes += (
            f"{left_out} of {len(complete)} requests of the log did not finish and are left out, "
            "with the load that they were",
        )
    if (prompt % 1).any() or (output % 1).any():
        raise FileFormatError(path, None, "numbers of tokens must be whole")
    latest_s = max(np.abs(column).max() for column in (arrival, begin, first, last))
    if latest_s > _LATEST_S:
        raise FileFormatError(path, None, f"has a time of {latest_s:g}; times must be seconds")
    # Clients and engines stamp by clocks of their own; the quickest hand-over took no time.
    arrival = np.minimum(begin, arrival + (begin - arrival).min())
    early = (first < begin) | (last < first)
    if early.any():
        row = int(np.flatnonzero(early)[0])
        raise FileFormatError(
            path,
            None,
            f"request {np.flatnonzero(complete)[row]} has its first token "
            f"{first[row] - begin[row]:.3f} s after its arrival and its last "
            f"{last[row] - first[row]:.3f} s after its first; are these times of one clock?",
        )
    order = np.argsort(arrival, kind="stable")
    zero = arrival[order[0]]
    rows = np.flatnonzero(complete)[order]
    ids = columns.get("request_id")
    if ids is not None:
        ids = [ids[row] for row in rows]
        notes += _repeated(ids)
    prompt_tokens = prompt[order].astype(np.int64)
    return RealLog(
        name=str(path),
        arrival_s=(arrival - zero)[order],
        begin_s=(begin - zero)[order],
        prompt_tokens=prompt_tokens,
        output_tokens=output[order].astype(np.int64),
        first_s=(first - zero)[order],
        last_s=(last - zero)[order],
        engine=settings,
        rows=rows,
        notes=notes,
        cached_tokens=int(np.minimum(cached, 2**40).sum()) if len(cached) else None,
        shared_blocks=read_hash_ids(path, ids, prompt_tokens),
        of_client=queues is None,
        instance=_instances(columns.get("instance"), rows),
    )


def _instances(served_by: Sequence[Any] | None, rows: Ints) -> Ints | None:
    """The number of each request's instance by name; None where one has none."""
    names = [] if served_by is None else [str(served_by[row]) for row in rows]
    if not names or {"-1", "None", "nan", ""} & set(names):
        return None
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _repeated(ids: Sequence[Any]) -> tuple[str, ...]:
    """A note on requests with the id of another, if there are any."""
    times_by_id = Counter(str(name) for name in ids if name not in (None, ""))
    repeated = times_by_id.total() - len(times_by_id)
    if not repeated:
        return ()
    [(most_common, times)] = times_by_id.most_common(1)
    return (
        f"{repeated} requests have the request_id of an earlier one ({most_common!r} is there "
        f"{times} times); runs in one file, and requests written twice, are simulated as one load",
    )


def _floats(path: Path, name: str, values: Sequence[Any]) -> Floats:
    """Values as float64, NaN in place of None."""
    if any(isinstance(value, bool) for value in values):
        raise FileFormatError(path, None, f"{name} must be numbers, not true or false")
    try:
        return np.array(
            [np.nan if value is None else float(value) for value in values],
            dtype=np.float64,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(path, None, f"{name}: {error}") from None
