"""Files of load generators with an object a request, read by one table of where its times stand.

inference-perf: `inference_perf/reportgen/base.py`, genai-bench: `genai_bench/metrics/metrics.py`,
llmperf: `token_benchmark_ray.py`, evalscope: `evalscope/perf/utils/db_util.py`, guidellm before
0.4: `guidellm/benchmark/benchmark.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.errors import FileFormatError
from ...workloads.parsing import number, parse_json
from .results import Cell, RequestResults, Results

Json = Mapping[str, Any]
LIST = "[]"  # the key of a document that is a list
GAPS_NOTE = (
    "{name}: time per output token is (last − first token) / (tokens − 1) of each request, {what}."
)

# Of a request: arrival, first token, finish (s), tokens of prompt and answer, whether it finished.
RequestRow = tuple[float, float, float, float, float, bool]
RunCell = tuple[str, float | None, str, RequestResults]  # name, rate, model
Paths = tuple[str, ...]


@dataclass(frozen=True)
class RequestPaths:
    """Where a request's times (s) and tokens stand: paths through inner objects and lists
    (`info.times.0`), of which the first that leads to a number counts.

    `first` and `end` are moments like `arrival`, `ttft` and `latency` durations from it, or from 0
    where there is none. A request has failed if a value at `error` is neither absent nor empty; one
    that has 0 at `streamed` has no first token.
    """

    prompt: Paths
    output: Paths
    error: Paths = ()
    arrival: Paths = ()
    sent: Paths = ()
    first: Paths = ()
    end: Paths = ()
    ttft: Paths = ()
    latency: Paths = ()
    streamed: Paths = ()

    def row(self, request: Json) -> RequestRow:
        """The request by these paths; what is absent is NaN."""
        failed = any(at(request, path) for path in self.error)
        arrival_s = first_number(request, self.arrival) if self.arrival else 0.0
        first_s, end_s = (first_number(request, paths) for paths in (self.first, self.end))
        if math.isnan(first_s):
            first_s = arrival_s + first_number(request, self.ttft)
        if math.isnan(end_s):
            end_s = arrival_s + first_number(request, self.latency)
        if any(at(request, path) == 0 for path in self.streamed):
            first_s = math.nan
        output = first_number(request, self.output)
        prompt = first_number(request, self.prompt)
        return arrival_s, first_s, end_s, prompt, output, not failed and output >= 1


@dataclass(frozen=True)
class RequestFormat:
    """A file of one run: its requests at `requests`, which have all keys of `marks`. `duration` is
    the run's, where requests have no moments; at `unit` stands that of durations, seconds without
    it. `gaps` says what our TPOT is in the tool's words.
    """

    kind: str
    marks: Paths
    requests: str
    paths: RequestPaths
    gaps: str
    duration: str = ""
    unit: str = ""
    model: Callable[[Path, Json], str] = lambda _path, _document: ""
    stages: Callable[[Path, int], list[tuple[int, float]]] = lambda _path, _n: []  # requests, rate


_SECONDS = {None: 1.0, "s": 1.0, "ms": 1e-3}


def at(value: Any, path: str) -> Any:
    """What stands at a path; None: nothing."""
    for step in filter(None, path.split(".")):
        try:
            value = value[int(step) if isinstance(value, list) else step]
        except (LookupError, TypeError, ValueError):
            return None
    return value


def first_number(value: Any, paths: Paths) -> float:
    """The number at the first path that leads to one; NaN: none does."""
    numbers = (number(at(value, path)) for path in paths)
    return next((n for n in numbers if not math.isnan(n)), math.nan)


def _beside(path: Path, name: str) -> Json:
    """The JSON object in a file beside; empty where there is none."""
    file = path.with_name(name)
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FileFormatError(file, None, f"cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _genai_bench_model(path: Path, _document: Json) -> str:
    about = _beside(path, "experiment_metadata.json")
    return str(about.get("api_model_name") or about.get("model") or "")


def _evalscope_rate(path: Path, n_requests: int) -> list[tuple[int, float]]:
    rate_rps = number(_beside(path, "benchmark_args.json").get("rate"))
    return [(n_requests, rate_rps if rate_rps > 0 else math.nan)]


def _inference_perf_stages(path: Path, _n_requests: int) -> list[tuple[int, float]]:
    """Requests and rate of each stage, in order; empty where a stage's file is not there."""
    stages: list[tuple[int, float]] = []
    while path.with_name(f"stage_{len(stages)}_lifecycle_metrics.json").is_file():
        summary = _beside(path, f"stage_{len(stages)}_lifecycle_metrics.json")
        load = summary.get("load_summary") or {}
        stages.append((int(number(load.get("count"))), number(load.get("requested_rate"))))
    return stages


# What a file of any tool may be written as; times of tokens are all, or the first and last.
EXAMPLE = (
    '[{"start_time": 0.0, "end_time": 1.2, "info": {"input_tokens": 50, "output_tokens": 9, '
    '"output_token_times": [0.2, 1.2]}}]'
)
_INFERENCE_PERF_METRICS = ("info.response_metrics", "info")
FORMATS = (
    RequestFormat(
        "inference-perf",
        ("start_time", "end_time", "info"),
        LIST,
        RequestPaths(
            prompt=("info.request_metrics.text.input_tokens", "info.input_tokens"),
            output=(
                "info.response_metrics.server_usage.completion_tokens",
                *(f"{place}.output_tokens" for place in _INFERENCE_PERF_METRICS),
            ),
            error=("error",),
            arrival=("start_time",),
            first=tuple(f"{place}.output_token_times.0" for place in _INFERENCE_PERF_METRICS),
            end=(
                *(f"{place}.output_token_times.-1" for place in _INFERENCE_PERF_METRICS),
                "end_time",
            ),
        ),
        "which inference-perf calls TPOT or, of each gap, ITL",
        stages=_inference_perf_stages,
    ),
    RequestFormat(
        "genai-bench",
        ("ttft", "e2e_latency", "num_output_tokens"),
        "individual_request_metrics",
        RequestPaths(
            prompt=("num_input_tokens",),
            output=("num_output_tokens",),
            error=("error_code",),
            ttft=("ttft",),
            latency=("e2e_latency",),
        ),
        "which is its TPOT",
        duration="aggregated_metrics.run_duration",
        unit="_time_unit",
        model=_genai_bench_model,
    ),
    RequestFormat(
        "llmperf",
        ("ttft_s", "end_to_end_latency_s", "number_output_tokens"),
        LIST,
        RequestPaths(
            prompt=("number_input_tokens",),
            output=("number_output_tokens",),
            error=("error_code",),
            ttft=("ttft_s",),
            latency=("end_to_end_latency_s",),
        ),
        "where its inter_token_latency_s includes the first token",
    ),
    RequestFormat(
        "evalscope",
        ("start_time", "completed_time", "first_chunk_latency", "completion_tokens"),
        LIST,
        RequestPaths(
            prompt=("prompt_tokens",),
            output=("completion_tokens",),
            arrival=("start_time",),
            end=("completed_time",),
            ttft=("first_chunk_latency",),
            streamed=("is_stream",),
        ),
        "which is its TPOT",
        model=lambda path, _document: str(_beside(path, "benchmark_args.json").get("model") or ""),
        stages=_evalscope_rate,
    ),
)
GUIDELLM_BEFORE_04 = RequestPaths(
    prompt=("prompt_tokens",),
    output=("output_tokens",),
    arrival=("scheduler_info.targeted_start_time", "start_time"),
    sent=("start_time",),
    first=("first_token_time",),
    end=("last_token_time", "end_time"),
)
GUIDELLM_PATHS = RequestPaths(
    prompt=("prompt_tokens",),
    output=("output_tokens", "output_metrics.total_tokens"),
    arrival=("info.timings.targeted_start", "info.timings.request_start"),
    sent=("info.timings.request_start",),
    first=("info.timings.first_token_iteration",),
    end=("info.timings.last_token_iteration", "info.timings.request_end"),
)


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database, as evalscope writes."""
    with path.open("rb") as file:
        return file.read(16).startswith(b"SQLite format 3")


def database_document(path: Path) -> Json:
    """The requests of evalscope's database, without their texts.

    Raises:
        FileFormatError: it has no table of results.
    """
    import sqlite3

    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            names = [row[1] for row in database.execute("PRAGMA table_info(result)")]
            kept = [name for name in names if name not in ("request", "response_messages")]
            columns = ", ".join(f'"{name}"' for name in kept)
            rows = database.execute(f"SELECT {columns} FROM result").fetchall()
    except sqlite3.Error as error:
        problem = f"is a database, but none of evalscope with a table `result`: {error}"
        raise FileFormatError(path, None, problem) from None
    return {LIST: [dict(zip(kept, row, strict=True)) for row in rows]}


def request_results(
    rows: Sequence[RequestRow],
    duration_s: float | None = None,
    sent_s: Sequence[float] | None = None,
) -> RequestResults:
    """In order of arrival, times from the first; of one that failed nothing later counts."""
    table = np.array(rows, dtype=np.float64).T
    order = np.argsort(table[0], kind="stable")
    table = table[:, order]
    begin_s = float(np.nanmin(table[0])) if duration_s is None else 0.0
    finished = table[5] == 1
    return RequestResults(
        arrival_s=table[0] - begin_s,
        first_token_s=np.where(finished, table[1] - begin_s, np.nan),
        finish_s=np.where(finished, table[2] - begin_s, np.nan),
        prompt_tokens=table[3],
        output_tokens=np.where(finished, table[4], 0.0),
        expected_output_tokens=None,
        finished=finished,
        sent_s=None if sent_s is None else np.array(sent_s)[order] - begin_s,
        duration_s=duration_s,
    )


def seeded(cells: Sequence[RunCell], system: str) -> list[Cell]:
    """Cells; those of the same rate and model count as repetitions."""
    next_seed: dict[tuple[float | None, str], int] = {}
    seeded_cells = []
    for name, rate_rps, model, requests in cells:
        seed = next_seed.get((rate_rps, model), 0)
        next_seed[rate_rps, model] = seed + 1
        requests = replace(requests, offered=rate_rps is not None)
        identity = {"system": system, "backend": "measured", "workload": "", "model": model}
        identity |= {"gpu": "", "gpus": ""}
        seeded_cells.append(Cell(name, identity, rate_rps, seed, _held(requests)))
    return seeded_cells


def _held(requests: RequestResults) -> Callable[[], RequestResults]:
    return lambda: requests


def format_of(document: Json) -> RequestFormat | None:
    """The format of the table that a document has; None: none of it."""
    for request_format in FORMATS:
        requests = document.get(request_format.requests)
        if not isinstance(requests, list) or not requests:
            continue
        if isinstance(requests[0], dict) and all(
            mark in requests[0] for mark in request_format.marks
        ):
            return request_format
    return None


def listed_results(path: Path, document: Json, request_format: RequestFormat) -> Results:
    """Results of a file of the table, a cell for each stage.

    Raises:
        FileFormatError: a request is no object, or none has times.
    """
    name, paths = path.name, request_format.paths
    requests = document[request_format.requests]
    if not all(isinstance(request, dict) for request in requests):
        raise FileFormatError(path, None, "has a request that is no object")
    rows = sorted((paths.row(request) for request in requests), key=lambda row: row[0])
    if any(math.isnan(row[0]) for row in rows):
        raise FileFormatError(path, None, f"has a request without {paths.arrival[0]}")
    refused: dict[str, str] = {}
    notes = [GAPS_NOTE.format(name=name, what=request_format.gaps)]
    if all(math.isnan(row[1]) for row in rows if row[5]):
        for family in ("ttft", "tpot"):
            refused[family] = "no time to first token is in the file; run it with streaming"
    duration_s: float | None = None
    if not paths.arrival:
        unit = at(document, request_format.unit) if request_format.unit else None
        if unit not in _SECONDS:
            raise FileFormatError(path, None, f"has times in {unit!r}; known: s, ms")
        scale = _SECONDS[unit]
        rows = [(0.0, scale * row[1], scale * row[2], *row[3:]) for row in rows]
        duration_s = first_number(document, (request_format.duration,))
        if not duration_s > 0:
            for family in ("goodput", "output_tokens"):
                refused[family] = "the file does not say how long the run took"
    stages = request_format.stages(path, len(rows))
    if sum(count for count, _ in stages) != len(rows):
        stages = [(len(rows), math.nan)]
    cells: list[RunCell] = []
    model = request_format.model(path, document)
    for stage, (count, rate_rps) in enumerate(stages):
        label = f"{name} #{stage + 1}" if len(stages) > 1 else name
        begin = sum(count for count, _ in stages[:stage])
        if count:
            stage_rows = rows[begin : begin + count]
            rate = None if math.isnan(rate_rps) else rate_rps
            cells.append((label, rate, model, request_results(stage_rows, duration_s)))
    return Results(
        name=name,
        kind=request_format.kind,
        cells=seeded(cells, path.stem),
        clock="sent",
        notes=tuple(notes),
        refused=refused,
    )
