"""Profiles a real server: starts it, sends load at several rates, and fits its own step log.

A server that swaps is then started again with few KV blocks, once with a policy that swaps its
victims, once with one that recomputes them. The swaps that the workers time become the profile's
table `transfers`; the steps that recompute judge the fit of the other steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....predictors.profiles.fit_profile import fit_links
from ....predictors.profiles.profile_format import Profile, Source, table_of, write_profile
from ....predictors.profiles.whole_steps import LoggedStep, made_of, profile_of_steps
from ....predictors.specs import ModelSpec, model
from ....workloads.errors import SloBenchError
from ....workloads.parsing import read_json_object
from ...engine.torch.profiling import ProfilingOptions, ProfilingResult, Tell, with_shape
from ...results.engine_logs import meta_path
from ...results.step_log import StepLogContent, logged
from ...servers.launch.server_kind import ServerKind
from ...servers.server_kinds import server_kind
from ..experiment import Experiment

_RATES = (2.0, 8.0, 64.0)  # the last all at once: prompts beside many that decode
_LONGEST_PROMPT, _LONGEST_ANSWER = 1024, 128
_SECONDS_A_REQUEST = 3.0  # of the budget
_LEAST, _MOST = 20, 120
_LONGEST_GROWING, _LEAST_PREEMPTING = 512, 60  # tokens of prompt and of answer; requests
_LONGEST_SEQUENCES = 4  # that the KV blocks of the second server hold
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def measure_server(
    options: ProfilingOptions, backend: str, folder: Path, tell: Tell
) -> ProfilingResult:
    """Serve requests of mixed lengths at three rates, and fit a profile to the server's step log.

    Args:
        options: those of the profile; the most sequences are ignored, the budget in seconds limits
            the requests.
        backend: a server, or one of its versions: `vllm==0.32.0`.
        folder: the run folder, new or empty; it keeps the logs.
        tell: called with (levels done, levels in total).

    Raises:
        SloBenchError: the server did not start, a level failed, or too few steps were logged.
    """
    name, _, version = backend.partition("==")
    shape = model(options.model)
    settings = _settings(options, name, version or None, shape)
    first = len(_RATES)
    preempting = server_kind(name).preempting_systems
    levels = first + len(preempting)
    metas, logged_steps, device = _measured(
        settings, folder, lambda done, total: tell(done, levels)
    )
    kind = _dtype(options.model)
    source = Source(
        f"{name}'s own step log",
        f"{len(metas)} levels",
        version=str(metas[0].get("version", "")),
        note="whole steps in real time, by `slo-bench profile run`",
    )
    profile = profile_of_steps(
        logged_steps.steps, model=options.model_name, gpu=options.gpu or device, source=source
    )
    profile = dataclasses.replace(profile, weight_dtype=kind, kv_dtype=kind)
    recomputation = None
    if preempting:
        settings |= _preempting(settings, shape, server_kind(name))
        beside = folder.with_name(f"{folder.name}-preempting")
        _, preempted, _ = _measured(
            settings, beside, lambda done, total: tell(first + done, levels)
        )
        profile = _with_copies(profile, preempted)
        recomputation = _recomputed(profile, preempted.recomputations)
    if options.gpu is None and device == "cpu":
        profile = _on_cpu(profile, shape, metas[0])
    header = write_profile(with_shape(profile, options), options.out)
    return ProfilingResult(profile, header, 0, float("nan"), recomputation=recomputation)


def _measured(
    settings: dict[str, Any], folder: Path, tell: Tell
) -> tuple[list[dict[str, Any]], StepLogContent, str]:
    """Measure levels; return their servers' settings, step logs, and the device.

    Raises:
        SloBenchError: a level failed.
    """
    run = Experiment(**settings).run(
        folder, progress=lambda progress: tell(progress.finished, progress.cells)
    )
    rows = run.rows()
    # Requests that were sent late make no step longer, so such a level is usable.
    broken = [row for row in rows if not row["finished"]]
    if broken:
        raise SloBenchError(f"a level failed: {broken[0].get('invalid_because')}; see {folder}")
    metas = [read_json_object(meta_path(folder, str(row["cell"]))) for row in rows]
    device = "cpu" if rows[0]["gpu"] == "cpu" else "unknown"
    return metas, StepLogContent.joined(logged(folder, meta) for meta in metas), device


def _preempting(settings: dict[str, Any], shape: ModelSpec, kind: ServerKind) -> dict[str, Any]:
    """Changes with which requests are preempted: all arrive at once, and KV blocks are few."""
    longest = min(_LONGEST_GROWING, shape.context_tokens // 4)
    block_size = max(build.block_size_multiple for build in kind.builds.values())
    blocks = -(-2 * longest // block_size) * _LONGEST_SEQUENCES
    return {
        "name": "profile-preempting",
        "systems": kind.preempting_systems,
        "prompt_tokens": f"uniform({min(8, longest)},{longest})",
        "output_tokens": f"uniform({max(1, longest // 4)},{longest})",
        "rates": _RATES[-1:],
        "requests": max(_LEAST_PREEMPTING, settings["requests"]),
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": blocks,
        "block_size": block_size,
        # Blocks in the prefix cache would be neither copied nor computed again.
        "server": {**settings["server"], "args": kind.no_prefix_cache_args},
    }


def _with_copies(profile: Profile, preempted: StepLogContent) -> Profile:
    """Add the swaps that were timed, and the link that is fitted to them."""
    rows = [(way, moved_bytes, 1e6 * took_s) for way, moved_bytes, took_s in preempted.copies]
    if not rows:
        return profile
    tables = {**profile.tables, "transfers": table_of("transfers", rows)}
    return dataclasses.replace(profile, tables=tables, links=fit_links(tables))


def _recomputed(profile: Profile, steps: Sequence[LoggedStep]) -> tuple[int, float] | None:
    """Number of steps that recomputed, and the mean error of the profile's fit, which has not seen
    them, in percent.
    """
    if not steps:
        return None
    fitted = made_of(profile.fits[profile.best].coefficients)
    errors = [
        abs(fitted.step_s(s.decode_seqs, s.decode_kv_tokens, s.chunks) / s.duration_s - 1)
        for s in steps
    ]
    return len(steps), 100 * sum(errors) / len(errors)


def _settings(
    options: ProfilingOptions, name: str, version: str | None, shape: ModelSpec
) -> dict[str, Any]:
    context = shape.context_tokens
    prompt, answer = min(_LONGEST_PROMPT, context // 2), min(_LONGEST_ANSWER, context // 4)
    requests = round(options.budget_s / _SECONDS_A_REQUEST / len(_RATES))
    return {
        "name": "profile",
        "backend": name,
        "systems": (name,),
        "model": str(options.model),
        "workload": "alpaca",
        "prompt_tokens": f"uniform({min(8, prompt)},{prompt})",
        "output_tokens": f"uniform({min(4, answer)},{answer})",
        "rates": _RATES,
        "requests": max(_LEAST, min(_MOST, requests)),
        "seeds": 1,
        "slo": "e2e=1000",
        "records": "csv",
        "server_version": version,
        "server": {"step_log": True},
    }


def _dtype(folder: Path) -> str:
    """Dtype of the checkpoint, in which servers compute."""
    fields = read_json_object(folder / "config.json")
    dtype = str(fields.get("torch_dtype") or fields.get("dtype") or "float32")
    return _DTYPES.get(dtype, "bf16")


def _on_cpu(profile: Profile, shape: ModelSpec, meta: dict[str, Any]) -> Profile:
    """Add measured figures of this CPU to the profile, if torch is installed."""
    try:
        import torch

        from ...engine.torch.measure import measured_device
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
