"""Options of vLLM's command line beside those that `vllm_kind` starts it with."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from ....predictors.dtypes import AUTO
from ....workloads.errors import SloBenchError
from ..launch.server_flags import PARAMETER, Flag, ServerCommand, count, named, refuse_half

_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
_DTYPES |= {"bfloat16": "bf16"}
_FP8 = dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), "fp8")
_ASYNC = f"{PARAMETER}async_scheduling"


def _on(text: str) -> bool:
    return text.lower() != "false"


def _off(text: str) -> bool:
    return not _on(text)


def _length(text: str) -> int | None:
    return None if text in (AUTO, "-1") else count(text)  # as long as fits


def _half(text: str) -> str | None:
    """The role of a server that does only prefill or decode."""
    match = re.search("kv_(?:producer|consumer)", text)
    return match and match[0]


FLAGS = (
    Flag(("--kv-transfer-config",), "half", _half),
    Flag(("--model",), "model"),
    Flag(("--tensor-parallel-size", "-tp"), "tp", count),
    Flag(("--pipeline-parallel-size", "-pp"), "pp", count),
    Flag(("--data-parallel-size", "-dp"), "dp", count),
    Flag(("--enable-expert-parallel", "-ep"), "expert_parallel", _on, switch=True),
    Flag(("--block-size",), "block_size", count, named("--block-size")),
    Flag(("--max-model-len",), "server.max_model_tokens", _length, named("--max-model-len")),
    # vLLM keeps one block for itself.
    Flag(
        ("--num-gpu-blocks-override",),
        "num_gpu_blocks",
        lambda text: count(text) - 1,
        lambda blocks, settings: ("--num-gpu-blocks-override", str(blocks + 1)),
    ),
    Flag(("-q",), "weight_dtype", {"fp8": "fp8"}.get),
    Flag(("--kv-cache-dtype",), "kv_dtype", {**_FP8, **_DTYPES}.get),
    Flag(("--kv-offloading-size",), "kv_offload_gib", float),
    Flag(("--swap-space",), "host_memory_gib", float),
    Flag(("--enable-lora",), "lora", _on, switch=True),
    Flag(("--max-loras",), "max_loras", count),
    Flag(("--max-lora-rank",), "lora_rank", count),
    Flag(("--speculative-config",), "speculative", json.loads),
    Flag(
        ("--async-scheduling",),
        _ASYNC,
        _on,
        lambda on, settings: ("--async-scheduling" if on else "--no-async-scheduling",),
        switch=True,
    ),
    Flag(("--no-async-scheduling",), _ASYNC, _off, switch=True),
)


def settle(command: ServerCommand) -> ServerCommand:
    """The command with settings in place of what is not one by itself."""
    settings = dict(command.settings)
    unused = list(command.unused)
    refuse_half(settings.pop("half", None))
    if settings.pop("expert_parallel", False):
        settings["ep"] = settings.get("tp", 1) * settings.get("dp", 1)
    if settings.pop("lora", False):
        settings.setdefault("max_loras", 1)
    elif "max_loras" in settings:
        del settings["max_loras"]
        unused.append("--max-loras (without --enable-lora)")
    speculative = settings.pop("speculative", None)
    if speculative is not None:
        settings["speculation"] = _speculation(speculative)
    return replace(command, settings=settings, unused=tuple(unused))


def _speculation(config: Any) -> str:
    """Speculative decoding as `predictors.speculation` writes it, without the acceptance.

    Raises:
        SloBenchError: it is of a kind that is not known.
    """
    if not isinstance(config, dict) or not isinstance(config.get("num_speculative_tokens"), int):
        raise SloBenchError("--speculative-config must be JSON with num_speculative_tokens")
    method, model = config.get("method"), config.get("model")
    tokens = config["num_speculative_tokens"]
    head = f"={model}" if method in ("eagle", "eagle3") and model else ""
    if method in (None, "draft_model"):
        if not isinstance(model, str):
            raise SloBenchError("--speculative-config names neither a method nor a model")
        method = model
    elif isinstance(method, str) and method.endswith("mtp"):
        method = "mtp"
    ranges = config.get("num_speculative_tokens_per_batch_size") or []
    on = [high for _, high, number in ranges if number]
    limit = (max(on) if on else 0) if ranges else None
    return f"{method}{head}:{tokens}" + ("" if limit is None else f"<{limit}")
