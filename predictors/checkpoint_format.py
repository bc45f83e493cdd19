"""Format of a checkpoint's weights: `quantization_config`, or ModelOpt's file beside it."""

from __future__ import annotations

from collections.abc import Mapping
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
}
_OF_METHOD = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}


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


def checkpoint_dtype(config: Fields) -> str:
    """The weight format that `quantization_config` describes; 16 bits without one."""
    quantization = config.fields.get("quantization_config")
    if not quantization:
        return "bf16"
    if not isinstance(quantization, dict):
        raise config.fail(
            f"field 'quantization_config' must be an object but is {quantization!r:.60}"
        )
    method = str(quantization.get("quant_method"))
    groups = quantization.get("config_groups")
    if isinstance(groups, dict) and groups:  # compressed-tensors, and ModelOpt's newer form
        kinds = {_group_dtype(str(quantization.get("format")), group) for group in groups.values()}
    elif method in ("awq", "gptq"):
        kinds = {_INTEGERS.get(str(quantization.get("bits")))}
    elif method == "modelopt":
        kinds = {_MODELOPT.get(str(quantization.get("quant_algo")))}
    else:
        kinds = {_OF_METHOD.get(method) or _of_flags(method, quantization)}
    dtype = kinds.pop()
    if kinds or dtype is None:
        raise config.fail(
            f"weights quantised by {method!r} like this (field 'quantization_config') are not "
            "modelled yet; known: fp8, fbgemm_fp8, mxfp4, awq, gptq, bitsandbytes, "
            "compressed-tensors, modelopt"
        )
    return dtype


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


def checkpoint_kv_dtype(config: Fields) -> str:
    """The KV format that the checkpoint was calibrated for; 16 bits where it names none.

    vLLM takes it where `--kv-cache-dtype` is `auto`: of compressed-tensors as long as it reads
    them, of ModelOpt since 0.12.
    """
    return "bf16"
