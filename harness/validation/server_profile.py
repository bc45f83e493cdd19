"""A profile of a real server: started here, loaded at several rates, fitted to its own step log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ...predictors.profiles.profile import Profile, Source, write_profile
from ...predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from ...predictors.specs import ModelSpec, model
from ...workloads.errors import SloBenchError
from ..engine.torch.profiling import ProfilingOptions, ProfilingResult, Tell, with_shape
from ..experiments.experiment import Experiment
from ..results.engine_logs import meta_path, read_meta
from .step_log import read_steps

_RATES = (2.0, 8.0, 64.0)  # the last all at once: prompts beside many that decode
_LONGEST_PROMPT, _LONGEST_ANSWER = 1024, 128
_SECONDS_A_REQUEST = 3.0  # of the budget
_LEAST, _MOST = 20, 120
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def measure_server(
    asked: ProfilingOptions, backend: str, folder: Path, tell: Tell
) -> ProfilingResult:
    """Serve requests of mixed lengths at three rates, and fit a profile to the server's step log.

    Args:
        asked: options of the profile; `most_sequences` is ignored, `budget_s` limits the requests.
        backend: `vllm`, `sglang`, or one of several versions: `vllm==0.32.0`.
        folder: the run folder, new or empty; it keeps the logs.
        tell: called with (levels done, levels in total).

    Raises:
        SloBenchError: the server did not start, a level failed, or too few steps were logged.
    """
    name, _, version = backend.partition("==")
    shape = model(asked.model)
    run = Experiment(**_settings(asked, name, version or None, shape)).run(
        folder, progress=lambda progress: tell(progress.finished, progress.cells)
    )
    rows = run.rows()
    # Requests that were sent late make no step longer, so such a level is usable.
    broken = [row for row in rows if not row["finished"]]
    if broken:
        raise SloBenchError(f"a level failed: {broken[0].get('invalid_because')}; see {folder}")
    metas = [read_meta(meta_path(folder, str(row["cell"]))) for row in rows]
    steps = [step for meta in metas for step in _steps(folder, meta)]
    kind = _dtype(asked.model)
    device = "cpu" if rows[0]["gpu"] == "cpu" else "unknown"
    source = Source(
        f"{name}'s own step log",
        f"{len(rows)} levels",
        version=str(metas[0].get("version", "")),
        note="whole steps in real time, by `slo-bench profile run`",
    )
    profile = profile_of_steps(
        steps, model=asked.model_name, gpu=asked.gpu or device, source=source
    )
    profile = dataclasses.replace(profile, weight_dtype=kind, kv_dtype=kind)
    if asked.gpu is None and device == "cpu":
        profile = _on_cpu(profile, shape, metas[0])
    header = write_profile(with_shape(profile, asked), asked.out)
    return ProfilingResult(profile, header, 0, float("nan"))


def _settings(
    asked: ProfilingOptions, name: str, version: str | None, shape: ModelSpec
) -> dict[str, Any]:
    context = shape.context_tokens
    prompt, answer = min(_LONGEST_PROMPT, context // 2), min(_LONGEST_ANSWER, context // 4)
    requests = round(asked.budget_s / _SECONDS_A_REQUEST / len(_RATES))
    return {
        "name": "profile",
        "backend": name,
        "systems": (name,),
        "model": str(asked.model),
        "workload": "alpaca",
        "prompt_tokens": f"uniform({min(8, prompt)},{prompt})",
        "output_tokens": f"uniform({min(4, answer)},{answer})",
        "rates": _RATES,
        "requests": max(_LEAST, min(_MOST, requests)),
        "seeds": 1,
        "slo": "e2e=1000",
        "records": "csv",
        "server": {"step_log": True, "version": version},
    }


def _steps(folder: Path, meta: dict[str, Any]) -> list[LoggedStep]:
    return [
        step
        for part in meta.get("steps") or []
        for step in read_steps(folder / part["file"], part["begin"], part["end"])
    ]


def _dtype(folder: Path) -> str:
    """The checkpoint's dtype, in which servers compute."""
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    said = str(fields.get("torch_dtype") or fields.get("dtype") or "float32")
    return _DTYPES.get(said, "bf16")


def _on_cpu(profile: Profile, shape: ModelSpec, meta: dict[str, Any]) -> Profile:
    """With what this machine is, where torch is at hand to measure it."""
    try:
        import torch

        from ..engine.torch.measure import measured_device
    except ImportError:
        return profile
    kind = {short: long for long, short in _DTYPES.items()}[profile.kv_dtype]
    dtype: torch.dtype = getattr(torch, kind)
    cache = meta.get("kv_cache") or {}
    tokens = int(cache.get("num_gpu_blocks") or 0) * int(cache.get("block_size") or 0)
    width = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    if not tokens:
        return profile  # the KV capacity is unknown
    kv_bytes = float(tokens * width)
    device = measured_device(torch.device("cpu"), dtype, kv_bytes)
    return dataclasses.replace(profile, device=device)
