"""The JSON that `vllm bench serve --save-result --save-detailed` writes, for tools that read it.

Fields and units as in vLLM 0.19's `vllm/benchmarks/serve.py`: times of requests in seconds, from
the moment a request was put; summaries in milliseconds, over requests that were answered whole.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....workloads.whole_file import write_whole
from ....workloads.workload import Workload
from ...core.records.request_records import Outcome
from ...load_generator.routed_load import HttpResult

Floats = NDArray[np.float64]


def write_vllm_json(
    path: Path, workload: Workload, http_result: HttpResult, *, model: str, rate_rps: float | None
) -> None:
    """Write one cell; needs `http_result.token_s` and has texts where they were kept."""
    columns = http_result.columns
    whole = columns.outcome == Outcome.FINISHED
    ttft_s = np.where(whole, columns.first_token_s - columns.started_s, 0.0)
    e2e_s = (columns.last_token_s - columns.started_s)[whole]
    inputs = np.where(columns.prompt_tokens > 0, columns.prompt_tokens, workload.prompt_tokens)
    outputs = np.where(whole, columns.output_tokens, 0)
    answers = np.split(http_result.token_s, np.cumsum(columns.output_tokens)[:-1])
    itl_s = [
        _gaps_s(times, chunks) if ok else np.empty(0)
        for times, chunks, ok in zip(answers, columns.chunks.tolist(), whole, strict=True)
    ]
    several = whole & (outputs > 1)
    tpot_s = ((columns.last_token_s - columns.first_token_s) / np.maximum(1, outputs - 1))[several]
    begin_s = float(np.nanmin(columns.started_s)) if whole.any() else 0.0
    end_s = float(np.nanmax(columns.ended_s)) if whole.any() else 0.0
    duration_s = end_s - begin_s
    completed = int(whole.sum())
    total_input, total_output = int(inputs[whole].sum()), int(outputs.sum())
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    fields = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": "slo-bench",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(workload),
        "request_rate": "inf" if rate_rps is None else rate_rps,
        "burstiness": 1.0,
        "max_concurrency": workload.concurrency,
        "duration": duration_s,
        "completed": completed,
        "failed": len(workload) - completed,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": completed * per_s,
        "request_goodput": None,
        "output_throughput": total_output * per_s,
        "total_token_throughput": (total_input + total_output) * per_s,
        "input_lens": inputs.tolist(),
        "output_lens": outputs.tolist(),
        "ttfts": ttft_s.tolist(),
        "itls": [gaps.tolist() for gaps in itl_s],
        "start_times": np.nan_to_num(columns.started_s).tolist(),
        "generated_texts": [http_result.texts.get(row, "") for row in range(len(workload))],
        "errors": [http_result.details.get(row, "") for row in range(len(workload))],
        "max_output_tokens_per_s": float(_per_second(http_result.token_s).max(initial=0)),
        "max_concurrent_requests": _most_at_once(columns.started_s[whole], columns.ended_s[whole]),
        "rtfx": 0.0,
        **_summary("ttft", ttft_s[whole]),
        **_summary("tpot", tpot_s),
        **_summary("itl", np.concatenate([np.empty(0), *itl_s])),
        **_summary("e2el", e2e_s),
    }
    write_whole(path, [json.dumps(fields).encode()])


def _gaps_s(token_s: Floats, chunks: int) -> Floats:
    """Between chunks, which is what vLLM calls inter-token latency."""
    # Tokens that came with one chunk have one time.
    return np.diff(token_s if chunks == len(token_s) else np.unique(token_s))


def _per_second(token_s: Floats) -> NDArray[np.int64]:
    return np.bincount(np.maximum(0, token_s).astype(np.int64), minlength=1)


def _most_at_once(begin_s: Floats, end_s: Floats) -> int:
    steps = np.concatenate([np.ones(len(begin_s)), -np.ones(len(end_s))])
    order = np.argsort(np.concatenate([begin_s, end_s]), kind="stable")
    return int(np.cumsum(steps[order]).max(initial=0))


def _summary(name: str, seconds: Floats) -> dict[str, float]:
    milliseconds = seconds * 1e3 if len(seconds) else np.zeros(1)
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
        f"p99_{name}_ms": float(np.percentile(milliseconds, 99)),
    }
