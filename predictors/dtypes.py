"""How many bytes a number takes, by the name users give its format."""

from __future__ import annotations

from dataclasses import dataclass

from ..workloads.errors import UnknownNameError

SIXTEEN_BIT_BYTES = 2.0
AUTO = "auto"  # the format of the model's checkpoint


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format. `compute_bits` is the width the matrix units multiply at."""

    name: str
    bytes: float
    compute_bits: int


# INT4 is group-quantised (AWQ, GPTQ with groups of 128): a 16-bit scale and a 4-bit zero point
# add 20 bits to 128 weights. INT8, INT4, MXFP4 (8-bit scales of 32 weights) and W4A16 NVFP4 are
# storage here: kernels expand them to 16 bits. NVFP4 (8-bit scales of 16 weights) is multiplied at
# 4 bits.
WEIGHT_DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp32", 4.0, 32),
        Dtype("bf16", SIXTEEN_BIT_BYTES, 16),
        Dtype("fp16", SIXTEEN_BIT_BYTES, 16),
        Dtype("fp8", 1.0, 8),
        Dtype("int8", 1.0, 16),
        Dtype("int4", 0.5 + 20 / 8 / 128, 16),
        Dtype("mxfp4", 0.5 + 1 / 32, 16),
        Dtype("nvfp4", 0.5 + 1 / 16, 4),
        Dtype("nvfp4a16", 0.5 + 1 / 16, 16),
    )
}
KV_DTYPES = {name: WEIGHT_DTYPES[name] for name in ("fp32", "bf16", "fp16", "fp8")}


def weight_dtype(name: str) -> Dtype:
    """The weight format called `name`, or `UnknownNameError`."""
    if name not in WEIGHT_DTYPES:
        raise UnknownNameError("weight dtype", name, WEIGHT_DTYPES)
    return WEIGHT_DTYPES[name]


def kv_dtype(name: str) -> Dtype:
    """The KV cache format called `name`, or `UnknownNameError`."""
    if name not in KV_DTYPES:
        raise UnknownNameError("KV dtype", name, KV_DTYPES)
    return KV_DTYPES[name]
