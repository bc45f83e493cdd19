"""Readers of public measurements; one function a layout, chosen by what the file looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ....predictors.profiles.importers import recognise
from ....predictors.specs import model as catalogue_model
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.prefixes import BLOCK_SIZE
from ...results.engine_logs import read_log
from ..replay.log_replay import latencies_of
from .clients import AICONFIGURATOR, INFERENCEX, client_of, other_setup, server_of
from .lmbenchmark import conversations
from .measurement import (
    CLOSED_LOOP,
    LOG,
    MAX_RATE,
    OPEN_LOOP,
    Case,
    ClosedLoop,
    HighestRate,
    Measurement,
    OpenLoop,
    Skipped,
)

Found = Iterator[Measurement | Skipped]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_WEIGHTS = {
    "fp8": "fp8",
    "fp8_block": "fp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "int4_wo": "int4",
    "nvfp4": "nvfp4",
}
_SILICON = {"backend", "system", "model_path", "silicon_ttft_ms", "silicon_tpot_ms"}
_LEVELS = {"level", "rate_rps", "arrival_s", "ttft_s", "generation_s"}
_TOKENS = ("prompt_tokens", "output_tokens")
_OWN = {"engine", "gpu", "model", *_TOKENS}
_BOUNDS = tuple(
    f"{latency}_{statistic}"
    for latency in ("ttft", "tpot", "e2e")
    for statistic in ("mean", *_QUANTILES)
)
_SYSTEMS = {
    "a100_sxm": "a100-80g",
    "h100_sxm": "h100-80g",
    "h200_sxm": "h200-141g",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "l40s": "l40s",
}
# Rows of GB200 have a tp of 12 to 72 for models whose heads that does not divide.
_UNCLEAR = ("gb200",)
# Cold starts are in the TTFT of these rows.
_COLD_TTFT = ("trtllm", "1.0.0rc3")


def read_folder(folder: Path) -> Found:
    """Every measurement in a folder and below; a file alone is read, too.

    Raises:
        SloBenchError: there is nothing that can be read.
        FileFormatError: a file is damaged.
    """
    if not folder.exists():
        raise SloBenchError(f"{folder} does not exist; name a folder with measurements")
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    readable = 0
    for file in files:
        reader = _reader(file)
        if reader is not None:
            readable += 1
            yield from reader(file)
        elif file.name.endswith((".csv", ".csv.gz")):
            yield Skipped(stem(file), "a table whose columns are of no known layout")
    if not readable:
        raise SloBenchError(
            f"{folder} holds no measurements: neither CSV files with the columns of "
            "docs/accuracy.md nor requests.jsonl logs"
        )


def stem(file: Path) -> str:
    """The file's name without its suffixes; a log in a folder of its own has the folder's name."""
    if file.name == "requests.jsonl":
        return file.parent.name
    return re.sub(r"\.(csv|csv\.gz|jsonl)$", "", file.name)


def _reader(file: Path) -> Callable[[Path], Found] | None:
    if file.name == "requests.jsonl":
        return _log
    if not file.name.endswith((".csv", ".csv.gz")):
        return None
    columns = set(_frame(file, nrows=0).columns)
    layouts = (
        (_SILICON, _silicon),
        (_LEVELS, _levels),
        (_OWN | {"concurrency"}, _own_closed_loop),
        (_OWN | {"max_rate_rps"}, _own_highest_rate),
    )
    for needed, reader in layouts:
        if needed <= columns:
            return reader
    return None


def _frame(file: Path, nrows: int | None = None) -> pd.DataFrame:
    try:
        return pd.read_csv(file, nrows=nrows)
    except (OSError, ValueError, EOFError) as error:
        raise FileFormatError(file, None, f"cannot be read as CSV: {error}") from None


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line below the head, and its values by column."""
    for line, row in enumerate(_frame(file).to_dict("records"), start=2):
        yield line, {str(name): value for name, value in row.items()}


def _catalogue(section: str, name: str) -> str | None:
    """The catalogue's name, None where it has none."""
    with suppress(SloBenchError):
        return recognise(section, name)
    return None


def _text(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


# ---------------------------------------------------------------- closed loop


def _silicon(file: Path) -> Found:
    """AIConfigurator's table of configurations at a closed concurrency (`silicon.csv.gz`)."""
    return (_silicon_row(stem(file), row) for _, row in _lines(file))


def _silicon_row(name: str, row: dict[str, Any]) -> Measurement | Skipped:
    if row["mode"] != "agg":
        return Skipped(name, "disaggregated serving")
    served = str(row["model_path"])
    if row["system"] in _UNCLEAR:
        return Skipped(name, f"{row['system']}: numbers of GPUs unclear")
    quantised = _text(row["moe_quant_mode"]) or _text(row["gemm_quant_mode"])
    weights = "mxfp4" if "gpt-oss" in served else _WEIGHTS.get(quantised or "bf16")
    if weights is None:
        return Skipped(name, f"weights of {quantised}")
    model = _catalogue("models", served.replace("-FP8", ""))
    gpu = _SYSTEMS.get(str(row["system"]))
    if model is None or gpu is None:
        return Skipped(name, f"{row['system'] if gpu is None else served} is not in the catalogue")
    ranks = int(max(1, row["attention_dp_size"]))
    if ranks > 1 and row["tp_size"] != ranks:
        return Skipped(name, "data-parallel attention: numbers of GPUs and clients unclear")
    tp, ep, dp = int(row["tp_size"]), 1, 1
    spec = catalogue_model(model)
    if spec.experts is not None:
        ep, inside = int(row["moe_ep_size"]), int(row["moe_tp_size"])
        if ranks > 1:  # a GPU a rank; `tp 4, dp 4, ep 16` came in as the square of its GPUs
            tp, dp, ep = 1, ranks, ranks
        elif ep == inside:  # `tp 8, ep 8` came in as 64 GPUs; the figures are those of its 8
            tp = ep
        elif tp != ep * inside:
            return Skipped(name, "shares of experts that do not multiply to tp")
    ttft_s, tpot_s = row["silicon_ttft_ms"] / 1e3, row["silicon_tpot_ms"] / 1e3
    engine, version = str(row["backend"]), _text(row["backend_version"])
    cold = (engine, version) == _COLD_TTFT
    # Batches are those of a data-parallel rank: InferenceX's clients (4, 8, 16, ...) over ranks.
    load = ClosedLoop(int(row["batch_size"]) * ranks, int(row["isl"]), int(row["osl"]))
    source = str(row["silicon_data_source"])
    if why := other_setup(engine, gpu, model, weights, (tp, ep), source):
        return Skipped(name, why)
    harness = _origin(source, load)
    client = client_of(harness, engine, version)
    server = server_of(harness, engine, version, gpu, model, weights, tp)
    if server.expert_parallel and spec.experts is not None:
        ep = tp * dp
    case = Case(
        engine,
        version,
        gpu,
        model,
        load,
        tp=tp,
        pp=int(row["pp_size"]),
        ep=ep,
        dp=dp,
        weight_dtype=weights,
        kv_dtype=server.kv_dtype or client.kv_dtype(gpu, spec),
        memory_share=server.memory_share,
        token_budget=server.token_budget(load.prompt_tokens)
        or client.token_budget(load.prompt_tokens, load.concurrency),
        async_scheduling=client.async_scheduling,
        harness=harness,
    )
    return Measurement(
        name, str(row["id"]), CLOSED_LOOP, case, closed_figures(load, ttft_s, tpot_s, cold)
    )


def _origin(source: str, load: ClosedLoop) -> str:
    """Who measured: InferenceX's nightly runs, AIConfigurator's sweeps (thousands), or others.

    Two `gap-analysis` files hold figures of InferenceX's rows again.
    """
    nightly = r"source_file=(\d{4}-\d\d-\d\d|(qwen3\.5-397b|kimi-k2\.5)-gap-analysis)\.csv|db-dump"
    if re.search(nightly, source):
        return INFERENCEX
    return "other" if load.prompt_tokens % 1000 else AICONFIGURATOR


def closed_figures(
    load: ClosedLoop, ttft_s: float, tpot_s: float, cold: bool = False
) -> dict[str, float]:
    """Mean TTFT and TPOT, and what follows from them (E2E; throughput by Little's law)."""
    e2e_s = ttft_s + tpot_s * (load.output_tokens - 1)
    means = {"tpot_mean": tpot_s}
    if not cold:
        means |= {
            "ttft_mean": ttft_s,
            "e2e_mean": e2e_s,
            "throughput": load.concurrency * load.output_tokens / e2e_s,
        }
    return {name: value for name, value in means.items() if np.isfinite(value) and value > 0}


def _own_case(file: Path, line: int, row: dict[str, Any], load: ClosedLoop | HighestRate) -> Case:
    """A row of a table of one's own (docs/accuracy.md)."""
    try:
        return Case(
            str(row["engine"]),
            _text(row.get("version")),
            recognise("gpus", str(row["gpu"])),
            recognise("models", str(row["model"])),
            load,
            tp=int(row.get("tp", 1)),
            pp=int(row.get("pp", 1)),
            ep=int(row.get("ep", 1)),
            dp=int(row.get("dp", 1)),
            weight_dtype=_text(row.get("weight_dtype")) or "bf16",
            kv_dtype=_text(row.get("kv_dtype")) or "bf16",
        )
    except (ValueError, SloBenchError) as error:
        raise FileFormatError(file, line, str(error)) from None


def _own_number(file: Path, line: int, row: dict[str, Any], column: str, kind: type = int) -> Any:
    """The value of a column, a finite number above 0."""
    try:
        value = kind(row[column])
    except (ValueError, TypeError):
        value = 0
    if not 0 < value < np.inf:
        message = f"{column} = {row[column]!r} is not a number above 0"
        raise FileFormatError(file, line, message)
    return value


def _own_closed_loop(file: Path) -> Found:
    """A table of one's own: a row a closed-loop measurement."""
    for line, row in _lines(file):
        prompt, output = (_own_number(file, line, row, column) for column in _TOKENS)
        load = ClosedLoop(_own_number(file, line, row, "concurrency"), prompt, output)
        case = _own_case(file, line, row, load)
        ttft_s, tpot_s = (float(row.get(c, np.nan)) for c in ("ttft_mean_s", "tpot_mean_s"))
        figures = closed_figures(load, ttft_s, tpot_s)
        if not figures:
            raise FileFormatError(file, line, "has neither ttft_mean_s nor tpot_mean_s")
        yield Measurement(stem(file), str(line), CLOSED_LOOP, case, figures)


def _own_highest_rate(file: Path) -> Found:
    """A table of one's own: a row the highest rate within bounds on latency."""
    for line, row in _lines(file):
        prompt, output = (_own_number(file, line, row, column) for column in _TOKENS)
        bounds = tuple(
            (name, _own_number(file, line, row, f"{name}_s", float))
            for name in _BOUNDS
            if not pd.isna(row.get(f"{name}_s"))
        )
        if not bounds:
            message = "has no bound: one of the columns ttft_p99_s, tpot_mean_s, e2e_p90_s, …"
            raise FileFormatError(file, line, message)
        case = _own_case(file, line, row, HighestRate(prompt, output, bounds))
        rate_rps = _own_number(file, line, row, "max_rate_rps", float)
        yield Measurement(stem(file), str(line), MAX_RATE, case, {"max_rate": rate_rps})


# ---------------------------------------------------------------- open loop


def _levels(file: Path) -> Found:
    """llm-d's open-loop levels; the file is called GPU_MODEL_tpN_xINSTANCES_WORKLOAD."""
    name = stem(file)
    parts = re.fullmatch(
        r"(?P<gpu>[^_]+)_(?P<model>[^_]+)_(?:tp(?P<tp>\d+)_)?x(?P<n>\d+)_(?P<load>.*)", name
    )
    frame = _frame(file)
    levels = list(frame.groupby("level", sort=True))
    gpu = model = None
    reason = "the file's name does not say GPU, model, tp and servers"
    if parts is not None:
        gpu, model = _catalogue("gpus", parts["gpu"]), _catalogue("models", parts["model"])
        if model is None:
            reason = f"{parts['model']} is not in the catalogue"
        elif gpu is None or parts["tp"] is None:
            reason = "the GPU or its number is not recorded"
    for level, rows in levels:
        if parts is None or gpu is None or model is None or parts["tp"] is None:
            yield Skipped(name, reason)
            continue
        rows = rows.sort_values("arrival_s", kind="stable")
        answered = (rows["output_tokens"] > 0).to_numpy()
        load = OpenLoop(
            rows["arrival_s"].to_numpy(dtype=np.float64),
            np.maximum(1, rows["prompt_tokens"].to_numpy(dtype=np.int64)),
            np.maximum(1, rows["output_tokens"].to_numpy(dtype=np.int64)),
            answered,
        )
        if parts["load"] == "sharegpt":
            load = conversations(load)
        case = Case(
            "vllm",
            "0.8",  # May 2025
            gpu,
            model,
            load,
            tp=int(parts["tp"]),
            instances=int(parts["n"]),
            memory_share=0.95,
            harness="llm-d",
        )
        ttft_s = rows["ttft_s"].to_numpy()[answered]
        span_s = rows["generation_s"].to_numpy()[answered]
        tokens = rows["output_tokens"].to_numpy()[answered]
        yield Measurement(
            name,
            str(level),
            OPEN_LOOP,
            case,
            figures(
                {
                    "ttft": ttft_s,
                    "tpot": np.where(tokens > 1, span_s / np.maximum(1, tokens - 1), np.nan),
                    "e2e": ttft_s + span_s,
                }
            ),
        )


def _log(file: Path) -> Found:
    """A log with a request a line and its `meta.json`; the folder's name begins with the GPU."""
    name = stem(file)
    log = read_log(file)
    gpu = _catalogue("gpus", name.split("-")[0])
    model = _catalogue("models", log.engine.model or "")
    if gpu is None or model is None:
        yield Skipped(name, "GPU or model is not told, or not in the catalogue")
        return
    load = OpenLoop(
        log.arrival_s,
        log.prompt_tokens,
        log.output_tokens,
        np.ones(len(log), dtype=np.bool_),
        None if log.shared_blocks is None else log.blocks(BLOCK_SIZE),
    )
    case = Case(
        log.engine.server or "vllm",
        log.engine.version or "",
        gpu,
        model,
        load,
        tp=log.engine.tp or 1,
        token_budget=log.engine.max_num_batched_tokens,
        max_num_seqs=log.engine.max_num_seqs,
        num_gpu_blocks=log.engine.num_gpu_blocks,
        peer_link=log.engine.peer_link,
    )
    yield Measurement(name, "log", LOG, case, figures(latencies_of(log)))


def figures(seconds: dict[str, Any]) -> dict[str, float]:
    """Mean and quantiles (s) by metric, such as `ttft_p50`, of what is known of each request."""
    statistics = {}
    for metric, values in seconds.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            statistics[f"{metric}_mean"] = float(finite.mean())
            for quantile, share in _QUANTILES.items():
                statistics[f"{metric}_{quantile}"] = float(np.quantile(finite, share))
    return statistics
