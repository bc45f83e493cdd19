"""Format of a checkpoint's weights: `quantization_config`, or ModelOpt's file beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError
from ..workloads.file_cache import depends_on
from ..workloads.parsing import parse_json
from .config_fields import Fields

_INTEGERS = {"4": "int4", "8": "int8"}
_MODELOPT = {
    **dict.fromkeys(("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_REAL"), "fp8"),
    **dict.fromkeys(("NVFP4", "FP4", "NVFP4_AWQ"), "nvfp4"),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"), "int4"),
    **dict.fromkeys(("W8A8_SQ_PER_CHANNEL", "W8A16"), "int8"),
    "MXFP8": "fp8",
    "W4A16_NVFP4": "nvfp4a16",
}
_QUARK = {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "uint4": "int4", "fp4": "mxfp4"}
_OF_METHOD = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
_KNOWN = "fp8, fbgemm_fp8, mxfp4, awq, gptq, bitsandbytes, compressed-tensors, modelopt, quark"
# Names of what mixes tokens: attention, recurrences, and Nemotron-H's projections of both.
_MIXING = re.compile(r"attn|attention|mixer\\?\.(in|out|q|k|v|o|qkv)_proj")
_ASIDE = re.compile(r"head|embed|mtp")


@dataclass(frozen=True, slots=True)
class CheckpointFormats:
    """Formats of the weights and of KV, and, where it is another one, that `beside`: of all but the
    routed experts, or where there are none of what mixes tokens ("": none is named).
    """

    weights: str = "bf16"
    beside: str = ""
    kv: str = "bf16"


def side_file(file: Path) -> dict[str, Any]:
    """What `hf_quant_config.json` says, as `quantization_config` says it.

    Raises:
        FileFormatError: it cannot be read.
    """
    depends_on(file)
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return {"quant_method": "modelopt", **content["quantization"]}
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise FileFormatError(
            file, None, f"must be JSON with an object 'quantization': {error!r:.60}"
        ) from None


def checkpoint_formats(config: Fields) -> CheckpointFormats:
    """The formats that `quantization_config` describes; 16 bits without one.

    Raises:
        FileFormatError: one is not modelled, or parts have formats of their own.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return CheckpointFormats()
    if not isinstance(quantization, dict):
        raise config.fail(
            f"field 'quantization_config' must be an object but is {quantization!r:.60}"
        )
    method = str(quantization.get("quant_method"))
    parts = _named_parts(quantization)
    mixing = {dtype for name, dtype in parts if _MIXING.search(name) and not _ASIDE.search(name)}
    others = [(n, d) for n, d in parts if not _MIXING.search(n) and not _ASIDE.search(n)]
    routed = {dtype for name, dtype in others if re.search(r"experts(\.|$)", name)}
    routed = routed if len(routed) == 1 else {dtype for _, dtype in others}
    if len({dtype for _, dtype in parts}) > 1:
        if len(routed) != 1 or len(mixing) > 1 or None in routed | mixing:
            formats = sorted({str(dtype) for _, dtype in parts})
            raise config.fail(
                f"weights in several formats ({', '.join(formats)}; field 'quantization_config') "
                "are modelled only as one of routed experts or MLPs and one of the rest"
            )
        return CheckpointFormats(
            str(routed.pop()), str(mixing.pop()) if mixing else "bf16", _kv(config, quantization)
        )
    dtype = parts[0][1] if parts else _whole(method, quantization)
    if dtype is None:
        raise config.fail(
            f"weights quantised by {method!r} like this (field 'quantization_config') are not "
            f"modelled yet; known: {_KNOWN}"
        )
    return CheckpointFormats(dtype, "", _kv(config, quantization))


def _named_parts(quantization: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Names of modules, or patterns, with their formats, where the file lists them."""
    groups = quantization.get("config_groups")
    layers = quantization.get("quantized_layers")
    if isinstance(layers, dict) and layers:  # ModelOpt's mixed precision
        return [
            (
                str(name),
                _MODELOPT.get(str(layer.get("quant_algo"))) if isinstance(layer, dict) else None,
            )
            for name, layer in layers.items()
        ]
    if not isinstance(groups, dict):
        return []
    parts = []
    for group in groups.values():  # compressed-tensors, and ModelOpt's newer form
        form = (
            str(group.get("format") or quantization.get("format"))
            if isinstance(group, dict)
            else ""
        )
        targets = group.get("targets") if isinstance(group, dict) else None
        dtype = _group_dtype(form, group)
        parts += [(str(name), dtype) for name in (targets if isinstance(targets, list) else [""])]
    return parts


def _whole(method: str, quantization: Mapping[str, Any]) -> str | None:
    """The format of a checkpoint that has one; None: not known."""
    if method in ("awq", "gptq"):
        return _INTEGERS.get(str(quantization.get("bits")))
    if method.startswith("modelopt"):
        return _MODELOPT.get(str(quantization.get("quant_algo")))
    if method == "quark":
        weight = (quantization.get("global_quant_config") or {}).get("weight")
        weight = weight[0] if isinstance(weight, list) and weight else weight
        return _QUARK.get(str(weight.get("dtype"))) if isinstance(weight, dict) else None
    return _OF_METHOD.get(method) or _of_flags(method, quantization)


def _kv(config: Fields, quantization: Mapping[str, Any]) -> str:
    """The format of KV that the checkpoint has scales for, which vLLM 0.27 and 0.32 and SGLang
    0.5.23 take where the option says `auto`; quark's is taken only when it is asked for.
    """
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if scheme is None:
        return "bf16"
    if isinstance(scheme, dict):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}".replace("float", "FP")
    if str(scheme).upper() == "FP8":
        return "fp8"
    raise config.fail(
        f"KV of the format {scheme!r:.40} (field 'kv_cache_scheme' or 'kv_cache_quant_algo') is "
        "not modelled yet; known: FP8"
    )


def _of_flags(method: str, quantization: Mapping[str, Any]) -> str | None:
    """The format of bitsandbytes, which sets a flag for each."""
    if method != "bitsandbytes":
        return None
    flags = {"load_in_4bit": "int4", "load_in_8bit": "int8"}
    return next((dtype for flag, dtype in flags.items() if quantization.get(flag) is True), None)


def _group_dtype(form: str, group: Any) -> str | None:
    """The format of the weights of one group of `config_groups`; None: not known."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    bits = str(weights.get("num_bits"))
    if weights.get("type") != "float":
        return _INTEGERS.get(bits)
    return {"8": "fp8", "4": "mxfp4" if "mxfp4" in form else "nvfp4"}.get(bits)
