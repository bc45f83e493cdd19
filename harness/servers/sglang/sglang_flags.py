"""Options of SGLang's command line beside those that `sglang_kind` starts it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....workloads.errors import SloBenchError
from ..launch.server_flags import PARAMETER, Flag, ServerCommand, count, named, refuse_half

_GB, _GIB = 10**9, 1 << 30
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
_DTYPES |= {"bfloat16": "bf16"}
_FP8 = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
_ALGORITHMS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "NEXTN": "mtp", "NGRAM": "ngram"}

_LIMITS = {
    "--chunked-prefill-size": f"{PARAMETER}chunked_prefill_tokens",
    "--max-running-requests": f"{PARAMETER}max_running_requests",
}


def _on(text: str) -> bool:
    return True


def _of_all_ranks(name: str) -> Callable[[Any, Mapping[str, Any]], Sequence[str]]:
    return lambda value, settings: (name, str(value * (settings.get("dp") or 1)))


def _total_tokens(blocks: int, settings: Mapping[str, Any]) -> Sequence[str]:
    return ("--max-total-tokens", str(blocks * settings.get("block_size", 1)))


FLAGS = (
    Flag(("--disaggregation-mode",), "half", {"prefill": "prefill", "decode": "decode"}.get),
    Flag(("--model-path", "--model"), "model"),
    Flag(("--tp-size", "--tp", "--tensor-parallel-size"), "tp", count),
    Flag(("--pp-size", "--pp", "--pipeline-parallel-size"), "pp", count),
    Flag(("--dp-size", "--dp", "--data-parallel-size"), "dp", count),
    Flag(("--ep-size", "--ep", "--expert-parallel-size"), "ep", count),
    # With attention of dp ranks SGLang divides these among them.
    *(Flag((n,), s, count, _of_all_ranks(n)) for n, s in _LIMITS.items()),
    Flag(("--enable-dp-attention",), "dp_attention", _on, switch=True),
    Flag(("--attn-dp-size",), "attention_dp", count),
    Flag(("--page-size",), "block_size", count, named("--page-size")),
    Flag(("--context-length",), "server.max_model_tokens", count, named("--context-length")),
    Flag(("--max-total-tokens",), "num_gpu_blocks", count, _total_tokens),
    Flag(("--kv-cache-dtype",), "kv_dtype", {**_FP8, **_DTYPES}.get),
    Flag(("--enable-hierarchical-cache",), "hierarchical", _on, switch=True),
    Flag(("--hicache-size",), "hicache_gb", float),
    Flag(("--enable-lora",), "lora", _on, switch=True),
    Flag(("--max-loras-per-batch",), "max_loras", count),
    Flag(("--max-lora-rank",), "lora_rank", count),
    Flag(("--speculative-algorithm",), "algorithm"),
    Flag(("--speculative-num-steps",), "draft_steps", count),
    Flag(("--speculative-num-draft-tokens",), "draft_tokens", count),
    Flag(("--speculative-draft-model-path", "--speculative-draft-model"), "draft_model"),
)


def settle(command: ServerCommand) -> ServerCommand:
    """The command with settings in place of what is not one by itself."""
    settings = dict(command.settings)
    unused, notes = list(command.unused), list(command.notes)
    refuse_half(settings.pop("half", None))
    attention_dp = settings.pop("attention_dp", 1)
    dp = settings.get("dp", 1)
    if settings.pop("dp_attention", False) or attention_dp > 1:
        settings["dp"] = dp = max(dp, attention_dp)
        if settings.get("tp", 1) % dp:
            raise SloBenchError(f"--tp-size must be a multiple of --dp-size ({dp})")
        settings["tp"] = settings.get("tp", 1) // dp  # of a rank
        for limit in _LIMITS.values() & settings.keys():
            settings[limit] = max(1, settings[limit] // dp) if settings[limit] > 0 else -1
    elif dp > 1:
        del settings["dp"]
        settings["instances"] = dp
        notes.append(f"--dp-size {dp} without --enable-dp-attention: {dp} instances")
    if "num_gpu_blocks" in settings:  # in tokens so far
        settings["num_gpu_blocks"] //= settings.setdefault("block_size", 1)
    hicache_gb = settings.pop("hicache_gb", 0)
    is_hierarchical = settings.pop("hierarchical", False)
    if is_hierarchical and not hicache_gb:
        unused.append("--enable-hierarchical-cache (without --hicache-size)")
    elif is_hierarchical:
        gpus = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("dp", 1)
        settings["kv_offload_gib"] = round(hicache_gb * gpus * _GB / _GIB, 3)
    if "max_loras" in settings and not settings.pop("lora", False):
        del settings["max_loras"]
        unused.append("--max-loras-per-batch (without --enable-lora)")
    settings.pop("lora", None)
    algorithm = settings.pop("algorithm", None)
    steps, tokens = settings.pop("draft_steps", None), settings.pop("draft_tokens", None)
    draft_model = settings.pop("draft_model", None)
    if algorithm is not None:
        name = str(algorithm).upper()
        method = draft_model if name == "STANDALONE" else _ALGORITHMS.get(name)
        if method is None:
            raise SloBenchError(f"--speculative-algorithm {algorithm} is not modelled")
        head = f"={draft_model}" if method.startswith("eagle") and draft_model else ""
        # The tree of EAGLE counts as its deepest chain.
        settings["speculation"] = f"{method}{head}:{steps or tokens or 3}"
    if settings.get("parameters.chunked_prefill_tokens", 1) < 1:
        del settings["parameters.chunked_prefill_tokens"]
        unused.append("--chunked-prefill-size -1")
    return replace(command, settings=settings, unused=tuple(unused), notes=tuple(notes))
