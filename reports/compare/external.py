"""Result files of other load generators as `Results`, their definitions converted or refused.

| | vllm `--save-detailed` | guidellm `benchmarks.json` | aiperf `profile_export.jsonl` |
|---|---|---|---|
| latencies count from | sending | the moment aimed at, or sending | sending |
| TPOT of ours is its | TPOT | ITL; its TPOT includes the first token | ITL, a mean per request |
| tokens are counted by | the server | the server | its tokenizer; the server's are taken |
| its goodput counts | met of those that succeeded | none | met of those that succeeded |
| its goodput divides by | its duration, drain included | none | its duration, drain included |

Every figure is taken anew from times and token counts of single requests, so that it means what it
means everywhere in slo-bench; what a file does not hold is refused, never guessed. Formats read:
vllm/benchmarks/serve.py, SGLang's bench_serving.py, guidellm/schemas/{info,request_stats}.py (0.4
and later) and aiperf docs/tutorials/working-with-profile-exports.md, as they stood in 2026;
`request_files.py` has the formats that one table of names is enough for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import number, parse_json
from ...workloads.readers.table_reader import lines
from .request_files import (
    EXAMPLE,
    FORMATS,
    GAPS_NOTE,
    GUIDELLM_BEFORE_04,
    GUIDELLM_PATHS,
    LIST,
    Json,
    RequestRow,
    RunCell,
    at,
    database_document,
    first_number,
    format_of,
    is_database,
    listed_results,
    request_results,
    seeded,
)
from .results import RequestResults, Results

VLLM, GUIDELLM, AIPERF = "vllm bench serve", "guidellm", "aiperf"
SGLANG = "SGLang's bench_serving"
HEAD_CHARACTERS = 1000  # of a file, by which it is recognised


def external_results(path: Path) -> Results:
    """Read a result file of another load generator, which of them is seen from the file.

    Raises:
        SloBenchError: it is none of them, or one without requests.
    """
    documents = [database_document(path)] if is_database(path) else list(_documents(path))
    try:
        return _results(path, documents)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        # Foreign files are taken as their makers write them; any other shape ends here.
        problem = f"is not as its maker writes it: {error}"
        raise FileFormatError(path, None, problem) from error


def _results(path: Path, documents: Sequence[Json]) -> Results:
    first = documents[0]
    if "benchmarks" in first:
        return _guidellm(path, first)
    if "metadata" in first and "metrics" in first:
        return _aiperf(path, documents)
    if "request_throughput" in first and "model_id" in first:
        return _vllm(path, documents)
    if {"backend", "dataset_name", "request_rate", "completed"} <= first.keys():
        return _vllm(path, documents, SGLANG)
    if (request_format := format_of(first)) is not None:
        return listed_results(path, first, request_format)
    if "request_latency" in first and "time_to_first_token" in first:
        raise FileFormatError(
            path,
            None,
            "is aiperf's summary, which has no single requests; give profile_export.jsonl, "
            "which lies beside it",
        )
    if "experiments" in first:
        raise FileFormatError(
            path,
            None,
            "is genai-perf's, which counts no tokens; measure with aiperf, its successor",
        )
    if "load_summary" in first or "aggregated_metrics" in first or "results_ttft_s_mean" in first:
        raise FileFormatError(
            path,
            None,
            "holds only a summary, from which no interval can be had; give the file with single "
            "requests beside it (inference-perf: per_request_lifecycle_metrics.json, by report: "
            "request_lifecycle: per_request: true; llmperf: …_individual_responses.json)",
        )
    kinds = ", ".join(
        (*(f"{VLLM!r}".replace("'", "`"), SGLANG, GUIDELLM), *(f.kind for f in FORMATS))
    )
    raise FileFormatError(
        path,
        None,
        f"is neither a run folder nor a result file of {kinds} or {AIPERF}; write it as "
        f"inference-perf does, a list of requests with times in seconds: {EXAMPLE}",
    )


def is_loadgen_summary(text: str) -> bool:
    """Whether a text begins as LoadGen's summary of MLPerf does."""
    return "MLPerf Results Summary" in text[:HEAD_CHARACTERS]


def _documents(path: Path) -> Iterator[Json]:
    """The JSON object of a file, or those of its lines."""
    text = "".join(lines(path))
    if not text.strip():
        raise FileFormatError(path, None, "is empty")
    if is_loadgen_summary(text):
        raise FileFormatError(
            path,
            None,
            "is LoadGen's summary, which has no single requests and so no interval; `slo-bench "
            "compare RUN mlperf_log_summary.txt` shows its figures beside those of a run",
        )
    try:
        pieces: Sequence[tuple[int | None, Any]] = [(None, parse_json(text))]
    except json.JSONDecodeError:
        pieces = list(_lines(path, text))
    for place, document in pieces:
        if place is None and isinstance(document, list):
            document = {LIST: document}
        if not isinstance(document, dict):
            raise FileFormatError(path, place, "must hold a JSON object")
        yield document


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The JSON value of each line, with the line's number; one that repeats another is refused, for
    it would count as a repetition.
    """
    lines: dict[str, int] = {}
    for line, piece in enumerate(text.split("\n"), start=1):
        if not piece.strip():
            continue
        if piece in lines:
            raise FileFormatError(path, line, f"repeats line {lines[piece]}; take one line out")
        lines[piece] = line
        try:
            yield line, parse_json(piece)
        except json.JSONDecodeError as error:
            raise FileFormatError(path, line, f"is not JSON: {error.msg}") from error


# ---------------------------------------------------------------- vllm bench serve


def _vllm(path: Path, documents: Sequence[Json], kind: str = VLLM) -> Results:
    """Of SGLang the same, but for the model's name and the option that keeps single requests."""
    option = "--save-result --save-detailed" if kind == VLLM else "--output-details"
    name = path.name
    cells: list[RunCell] = []
    refused: dict[str, str] = {}
    notes = [GAPS_NOTE.format(name=name, what="which is its TPOT")]
    for index, document in enumerate(documents):
        if "ttfts" not in document or "output_lens" not in document:
            raise FileFormatError(
                path,
                None,
                f"holds only the summary of {'`' + kind + '`' if kind == VLLM else kind}, from "
                f"which no interval can be had; run it with {option}",
            )
        if "itls" not in document and "latencies" not in document:
            raise FileFormatError(path, None, "lacks itls, and so the time of the last token")
        rate_rps = number(document.get("request_rate"))
        limit = document.get("max_concurrency")
        open_loop = math.isfinite(rate_rps)
        if limit is not None and open_loop and "queue_times" not in document:
            for family in ("ttft", "e2e", "attainment", "goodput"):
                refused[family] = (
                    f"requests waited in the client for --max-concurrency {limit}, "
                    "and the file does not say how long"
                )
        if "start_times" not in document:
            notes.append(
                f"{name}: no start_times in the file; rates are per second of its `duration`."
            )
            if open_loop:
                refused["goodput"] = (
                    "the file lacks start_times, and so the window of arrivals that goodput "
                    "divides by" + ("; run a vllm that writes them" if kind == VLLM else "")
                )
        requests = _vllm_requests(path, document)
        if not any(document["ttfts"]) and requests.finished.any():
            for family in ("ttft", "tpot", "e2e"):
                refused[family] = "all its ttfts are 0; measure with streaming"
        if document.get("accept_length") and "oai" in str(document.get("backend")):
            for family in ("tpot", "e2e"):
                refused[family] = (
                    "SGLang divides the gaps of its OpenAI backends by accept_length where it "
                    "speculates; measure with --backend sglang"
                )
        label = f"{name} #{index + 1}" if len(documents) > 1 else name
        rate = rate_rps if open_loop else None
        cells.append((label, rate, str(document.get("model_id", "")), requests))
    return Results(
        name=name,
        kind=kind,
        cells=seeded(cells, path.stem),
        clock="sent",
        notes=tuple(dict.fromkeys(notes)),
        refused=refused,
    )


def _vllm_requests(path: Path, document: Json) -> RequestResults:
    columns: dict[str, list[Any]] = {}
    for key in ("ttfts", "output_lens", "input_lens", "errors", "itls", "latencies"):
        if key in document:
            columns[key] = list(document[key])
    n = len(columns["ttfts"])
    for key, values in columns.items():
        if len(values) != n:
            raise FileFormatError(path, None, f"{key} has {len(values)} entries, ttfts has {n}")
    if not n:
        raise FileFormatError(path, None, "holds no request")
    begins = document.get("start_times")
    waits = document.get("queue_times") or [0.0] * n
    rows: list[RequestRow] = []
    for i in range(n):
        failed = bool(columns["errors"][i]) if "errors" in columns else False
        tokens = number(columns["output_lens"][i])
        finished = not failed and tokens >= 1
        sent_s = number(begins[i]) if begins is not None else 0.0
        ttft_s = number(columns["ttfts"][i])
        latency_s = (
            number(columns["latencies"][i])
            if "latencies" in columns
            else ttft_s + sum(columns["itls"][i])
        )
        rows.append(
            (
                sent_s - (number(waits[i]) if begins is not None else 0.0),
                sent_s + ttft_s,
                sent_s + latency_s,
                number(columns["input_lens"][i]) if "input_lens" in columns else math.nan,
                tokens,
                finished,
            )
        )
    duration_s = None if begins is not None else number(document.get("duration"))
    return request_results(rows, duration_s)


# ---------------------------------------------------------------- guidellm


def _guidellm(path: Path, document: Json) -> Results:
    cells: list[RunCell] = []
    name = path.name
    refused: dict[str, str] = {}
    notes = [
        GAPS_NOTE.format(
            name=name, what="which guidellm calls ITL; its TPOT includes the first token"
        ),
        f"{name}: latencies count from the moment aimed at (targeted_start), where it is there, "
        "instead of sending.",
    ]
    for index, benchmark in enumerate(document["benchmarks"]):
        config = benchmark.get("config")
        is_old = not isinstance(config, Mapping)
        if is_old:  # before 0.4
            config = benchmark.get("args") or {}
        strategy = config.get("strategy") or {}
        kind = str(strategy.get("type_", ""))
        rate_rps = number(strategy.get("rate")) if kind in ("constant", "poisson") else None
        by_status = benchmark.get("requests") or {}
        sampled = config.get("sample_requests")
        totals = at(benchmark, "request_totals") or at(benchmark, "metrics.request_totals") or {}
        kept = {status: len(by_status.get(status) or ()) for status in by_status}
        if any(number(totals.get(status)) > n for status, n in kept.items()):
            sampled = max(kept.values())
        if sampled is not None and any(n >= sampled for n in kept.values()):
            for family in ("attainment", "goodput", "output_tokens"):
                refused[family] = (
                    f"the file keeps a sample of {sampled} requests of each outcome, so that "
                    "shares of all are unknown; run guidellm without --sample-requests"
                )
        requests, incomplete = _guidellm_requests(path, benchmark, by_status, is_old)
        if incomplete:
            notes.append(
                f"{name}: {incomplete} requests were under way when guidellm stopped; "
                "they arrived and did not finish, and so count as missed."
            )
        arguments = document.get("args") or {}
        model = str((config.get("backend") or {}).get("model") or arguments.get("model") or "")
        cells.append((f"{name} #{index + 1} {kind}", rate_rps, model, requests))
    if not cells:
        raise FileFormatError(path, None, "holds no benchmark")
    return Results(
        name=name,
        kind=GUIDELLM,
        cells=seeded(cells, path.stem),
        notes=tuple(dict.fromkeys(notes)),
        refused=refused,
    )


def _guidellm_requests(
    path: Path, benchmark: Json, by_status: Json, is_old: bool
) -> tuple[RequestResults, int]:
    rows: list[RequestRow] = []
    sent: list[float] = []
    incomplete = 0
    paths = GUIDELLM_BEFORE_04 if is_old else GUIDELLM_PATHS
    begin_s, end_s = number(benchmark.get("start_time")), number(benchmark.get("end_time"))
    for status in ("successful", "incomplete", "errored"):
        for request in by_status.get(status) or ():
            if not is_old and at(request, "info.timings") is None:
                raise FileFormatError(path, None, "has a request without info.timings")
            arrival_s, first_s, last_s, prompt, output, _ = paths.row(request)
            sent_s = first_number(request, paths.sent)
            # The time of the benchmark begins when its first request is sent, which is later than
            # the moment aimed at.
            began_s = arrival_s if math.isnan(sent_s) else sent_s
            if began_s < begin_s or began_s > end_s:
                continue  # warm-up and cool-down, as guidellm was told
            if math.isnan(arrival_s):
                continue  # cancelled before it was ever due
            incomplete += status == "incomplete"
            sent.append(began_s)
            rows.append((arrival_s, first_s, last_s, prompt, output, status == "successful"))
    if not rows:
        raise FileFormatError(path, None, "has a benchmark that holds no request")
    return request_results(rows, sent_s=sent), incomplete


# ---------------------------------------------------------------- aiperf


def _aiperf(path: Path, records: Sequence[Json]) -> Results:
    rows: list[RequestRow] = []
    refused: dict[str, str] = {}
    notes = [
        GAPS_NOTE.format(
            name=path.name, what="which is what aiperf calls ITL (a mean of each request)"
        )
    ]
    other_counts = 0
    for line, record in enumerate(records, start=1):
        about, metrics = record.get("metadata") or {}, record.get("metrics") or {}
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        sent_s = number(about.get("request_start_ns")) * 1e-9
        if math.isnan(sent_s):
            raise FileFormatError(path, line, "has no metadata.request_start_ns")
        failed = record.get("error") is not None or bool(about.get("was_cancelled"))
        latency_s = _aiperf_s(path, line, metrics, "request_latency")
        if math.isnan(latency_s):
            latency_s = number(about.get("request_end_ns")) * 1e-9 - sent_s
        ttft_s = _aiperf_s(path, line, metrics, "time_to_first_token")
        if not failed and math.isnan(ttft_s):
            for family in ("ttft", "tpot"):
                refused[family] = "no time to first token is known; run aiperf with --streaming"
        prompt, output, client_count = _aiperf_tokens(metrics)
        other_counts += not failed and output != client_count
        rows.append(
            (
                sent_s,
                sent_s + ttft_s,
                sent_s + latency_s,
                prompt,
                output,
                not failed,
            )
        )
    if not rows:
        raise FileFormatError(path, None, "holds no request of the phase `profiling`")
    if other_counts:
        notes.append(
            f"{path.name}: tokens are those that the server counted; aiperf tokenized the answers "
            f"itself, came to other counts in {other_counts} requests, and prints an ITL by those."
        )
    model, rate_rps = _aiperf_settings(path)
    system = path.parent.name or path.stem
    return Results(
        name=path.name if not path.parent.name else f"{path.parent.name}/{path.name}",
        kind=AIPERF,
        cells=seeded([(path.name, rate_rps, model, request_results(rows))], system),
        clock="sent",
        notes=tuple(notes),
        refused=refused,
    )


def _aiperf_s(path: Path, line: int, metrics: Json, name: str) -> float:
    """A time in seconds; its unit stands beside it."""
    measured = metrics.get(name)
    if not isinstance(measured, Mapping):
        return math.nan
    scales = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0, "seconds": 1.0}
    unit = str(measured.get("unit"))
    if unit not in scales:
        raise FileFormatError(path, line, f"{name} is in {unit!r}; known: {', '.join(scales)}")
    return number(measured.get("value")) * scales[unit]


def _aiperf_count(metrics: Json, name: str) -> float:
    measured = metrics.get(name)
    return number(measured.get("value")) if isinstance(measured, Mapping) else math.nan


def _aiperf_tokens(metrics: Json) -> tuple[float, float, float]:
    """Tokens of prompt and answer as the server counts them, as every other client's file has
    them, or else as aiperf does; and of the answer as aiperf does.
    """
    prompt = _aiperf_count(metrics, "usage_prompt_tokens")
    output = _aiperf_count(metrics, "usage_completion_tokens")
    own_prompt = _aiperf_count(metrics, "input_sequence_length")
    own_output = _aiperf_count(metrics, "output_sequence_length")
    return (
        own_prompt if math.isnan(prompt) else prompt,
        own_output if math.isnan(output) else output,
        own_output,
    )


def _aiperf_settings(path: Path) -> tuple[str, float | None]:
    """Model and rate, from the summary beside the records, where there is one."""
    beside = path.with_name("profile_export_aiperf.json")
    if not beside.is_file():
        return "", None
    try:
        summary = parse_json(beside.read_text(encoding="utf-8"))
        config = summary.get("input_config") or {}
        names = (config.get("endpoint") or {}).get("model_names") or [
            item.get("name", "") for item in (config.get("models") or {}).get("items") or []
        ]
        rate_rps = number((config.get("loadgen") or {}).get("request_rate"))
        phases = [p for p in config.get("phases") or [] if p.get("kind") == "profiling"]
        if len(phases) == 1:  # as aiperf 0.13 tells it
            rate_rps = number(phases[0].get("rate"))
    except (OSError, ValueError, AttributeError) as error:
        raise SloBenchError(f"{beside} cannot be read: {error}") from error
    return ",".join(map(str, names)), rate_rps if math.isfinite(rate_rps) else None
