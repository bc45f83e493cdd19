"""Pack AIConfigurator's kernel tables into the small files that are shipped with the package.

    python scripts/pack_kernels.py FOLDER

FOLDER is a copy of its database (`SYSTEM/OP/BACKEND/VERSION/*.parquet`, `SYSTEM.yaml`). Writes
`predictors/operators/tables/GPU_ENGINE.npz`: matrix multiplications, attention of prompts and of
decoding sequences, linear and sparse attention, experts, collectives. Times are log2 of
microseconds in 16 bits (0.3 % off at most).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "predictors" / "operators" / "tables"
GPUS = {
    "a100_sxm": "a100-80g",
    "h100_sxm": "h100-80g",
    "h200_sxm": "h200-141g",
    "b200_sxm": "b200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
LEAST_SIDE, MOST_TOKENS = 128, 16384  # of a matrix; of a step
HEAD_DIMS = (64, 128)
LATENT = "latent"  # in place of a head size
SPARSE_MODEL = "GLM-5"
LINEAR_DIM = 128  # of keys and values of linear attention
ENGINES = ("vllm", "sglang")
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
# Of experts: hidden size, width, experts a token, experts. All shapes of the catalogue that the
# database has.
EXPERTS = [
    (2048, 512, 8, 256),
    (2048, 512, 10, 512),
    (2048, 768, 8, 128),
    (2880, 2880, 4, 32),
    (2880, 2880, 4, 128),
    (3072, 1536, 8, 256),
    (4096, 1024, 10, 512),
    (4096, 1536, 8, 128),
    (4096, 14336, 2, 8),
    (5120, 8192, 1, 16),
    (5120, 8192, 1, 128),
    (6144, 2048, 8, 256),
    (7168, 2048, 8, 256),
    (7168, 2048, 8, 384),
]
MOE_DTYPES = {
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
# Kernels of experts that servers are told to take in place of their own choice: GPUs, vLLM's
# version, source, format, shapes. Marlin with MXFP4 weights was measured with the experts of one
# other model alone.
MOE_KERNELS = {
    "triton": (("b200_sxm",), "0.19.0", "vllm_fused_moe", "fp8_block", EXPERTS),
    "marlin": (
        ("h100_sxm", "h200_sxm"),
        "0.24.0",
        "marlin",
        "w4a16_mxfp4",
        [(3584, 3072, 16, 896)],
    ),
}
DISTRIBUTION = "power_law_1.01"  # touches as many experts as independent choices do
GRAPH = ("vllm_graph", "sglang_graph")


def _grid(frame: pd.DataFrame, axes: list[str]) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Axes and log2 of the least time (µs) of each point; NaN: not measured."""
    least = frame.groupby(axes)["latency"].min()
    points = [np.sort(frame[axis].unique()) for axis in axes]
    full = least.reindex(pd.MultiIndex.from_product(points, names=axes)).to_numpy()
    return points, np.log2(full.reshape([len(a) for a in points]) * 1e3).astype(np.float16)


def _by_shape(
    frame: pd.DataFrame, shape: list[str], axis: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Shapes, points of the axis and log2 of the least time (µs) of each."""
    times = frame.groupby([*shape, axis])["latency"].min().unstack(axis)
    shapes = np.array(times.index.tolist(), dtype=np.int32)
    return shapes, times.columns.to_numpy(), np.log2(times.to_numpy() * 1e3).astype(np.float16)


def _gemm(frame: pd.DataFrame, packed: dict[str, NDArray[Any]]) -> None:
    kept = (frame.n >= LEAST_SIDE) & (frame.k >= LEAST_SIDE) & (frame.m <= MOST_TOKENS)
    for dtype, rows in frame[kept & frame.gemm_dtype.isin(DTYPES)].groupby("gemm_dtype"):
        (m, n, k), times = _grid(rows, ["m", "n", "k"])
        name = f"gemm/{DTYPES[str(dtype)]}"
        packed |= {f"{name}/m": m, f"{name}/n": n, f"{name}/k": k, f"{name}/time": times}


def _attention(
    frame: pd.DataFrame, kind: str, length: str, packed: dict[str, NDArray[Any]]
) -> None:
    kept = (frame.window_size == 0) if "window_size" in frame else np.ones(len(frame), bool)
    kept &= frame.head_dim.isin((*HEAD_DIMS, LATENT)) & frame.kv_cache_dtype.isin(DTYPES)
    kept &= (frame.attn_dtype == "bfloat16") & (frame.num_key_value_heads <= 8)
    for (dim, dtype), rows in frame[kept].groupby(["head_dim", "kv_cache_dtype"]):
        if kind == "context":
            rows = rows[rows.batch_size == 1]
        axes = ["num_heads", "num_key_value_heads", "batch_size", length]
        (heads, kv_heads, batch, positions), times = _grid(rows, axes)
        shapes = [
            (i, j)
            for i in range(len(heads))
            for j in range(len(kv_heads))
            if np.isfinite(times[i, j]).any()
        ]
        name = f"{kind}/{dim}/{DTYPES[str(dtype)]}"
        packed |= {
            f"{name}/shape": np.array([(heads[i], kv_heads[j]) for i, j in shapes]),
            f"{name}/batch": batch,
            f"{name}/length": positions + (1 if length == "step" else 0),
            f"{name}/time": np.stack([times[i, j] for i, j in shapes]),
        }


def _experts(
    frame: pd.DataFrame,
    shapes: Sequence[tuple[int, ...]],
    packed: dict[str, NDArray[Any]],
    kernel: str = "",
) -> None:
    axes = ["hidden_size", "inter_size", "topk", "num_experts"]
    kept = (frame.distribution == DISTRIBUTION) & (frame.num_tokens <= MOST_TOKENS)
    kept &= frame.moe_dtype.isin(MOE_DTYPES) & (frame.moe_tp_size <= 8) & (frame.moe_ep_size <= 8)
    kept &= pd.MultiIndex.from_frame(frame[axes]).isin(shapes)
    for dtype, rows in frame[kept].groupby("moe_dtype"):
        shape, tokens, times = _by_shape(rows, [*axes, "moe_tp_size", "moe_ep_size"], "num_tokens")
        name = f"moe/{MOE_DTYPES[str(dtype)]}{'-' if kernel else ''}{kernel}"
        packed |= {f"{name}/shape": shape, f"{name}/tokens": tokens, f"{name}/time": times}


def _sparse(frame: pd.DataFrame, packed: dict[str, NDArray[Any]]) -> None:
    """A layer's sparse attention of one prompt, projections and indexer included, by the heads of a
    GPU and the prompt's tokens.
    """
    kept = frame.model.str.contains(SPARSE_MODEL) & (frame.gemm_type == "bfloat16")
    kept &= (frame.batch_size == 1) & (frame.step == 0) & (frame.isl <= MOST_TOKENS)
    for dtype, rows in frame[kept].groupby("kv_cache_dtype"):
        (heads, length), times = _grid(rows, ["num_heads", "isl"])
        name = f"sparse_context/{DTYPES[str(dtype)]}"
        packed |= {f"{name}/heads": heads, f"{name}/length": length, f"{name}/time": times}


def _recurrences(frame: pd.DataFrame, packed: dict[str, NDArray[Any]]) -> None:
    """The gated delta rule of one prompt by its tokens, and of decoding sequences by their number,
    for the key and value heads of a GPU.
    """
    heads = ["num_k_heads", "num_v_heads"]
    kept = (frame.head_k_dim == LINEAR_DIM) & (frame.head_v_dim == LINEAR_DIM)
    kept &= frame.kernel_source.str.contains("gated_delta_rule")
    for phase, axis in (("context", "seq_len"), ("generation", "batch_size")):
        rows = frame[kept & (frame.phase == phase)]
        if phase == "context":
            rows = rows[(rows.batch_size == 1) & (rows.seq_len <= MOST_TOKENS)]
        shape, points, times = _by_shape(rows, heads, axis)
        name = f"linear_{phase}"
        packed |= {f"{name}/shape": shape, f"{name}/at": points, f"{name}/time": times}


def _collective(frame: pd.DataFrame, name: str, packed: dict[str, NDArray[Any]]) -> None:
    """A collective of 16-bit elements, by the number of GPUs and the bytes."""
    (gpus, elements), times = _grid(frame, ["num_gpus", "message_size"])
    packed |= {f"{name}/gpus": gpus, f"{name}/bytes": elements * 2, f"{name}/time": times}


def pack(folder: Path, system: str, engine: str) -> None:
    """Write the file of one GPU and engine, from the newest version of each table."""

    def newest(op: str, name: str) -> pd.DataFrame | None:
        for measured in (engine, *ENGINES, "nccl"):  # of latent attention on one engine
            tables = sorted(
                (folder / system / op / measured).glob(f"*/{name}.parquet"),
                key=lambda p: [int(part) for part in p.parent.name.split(".")],
            )
            if tables:
                versions.extend([tables[-1].parent.name] if measured == engine else [])
                return pd.read_parquet(tables[-1])
        return None

    versions: list[str] = []
    packed: dict[str, NDArray[Any]] = {}
    gemm = newest("gemm", "gemm_perf")
    context = newest("attention", "context_attention_perf")
    generation = newest("attention", "generation_attention_perf")
    experts = newest("moe", "moe_perf")
    reduce = newest("comm", "custom_allreduce_perf")
    if gemm is None or context is None or generation is None:
        raise SystemExit(f"{folder / system} lacks tables of {engine}")
    _gemm(gemm, packed)
    _attention(context, "context", "isl", packed)
    _attention(generation, "generation", "step", packed)
    for kind, length in (("context", "isl"), ("generation", "step")):
        latent = newest("mla", f"{kind}_mla_perf")
        if latent is not None:
            shared = latent.assign(num_key_value_heads=1, head_dim=LATENT, attn_dtype="bfloat16")
            _attention(shared, kind, length, packed)
    if experts is not None:
        _experts(experts, EXPERTS, packed)
    for kernel, (systems, version, source, dtype, shapes) in MOE_KERNELS.items():
        if engine == "vllm" and system in systems:
            moe_table = pd.read_parquet(
                folder / system / "moe" / engine / version / "moe_perf.parquet"
            )
            named = moe_table.kernel_source.str.contains(source) & (moe_table.moe_dtype == dtype)
            _experts(moe_table[named], shapes, packed, kernel)
    sparse = newest("sparse_attention", "dsa_context_module_perf")
    if sparse is not None:
        _sparse(sparse, packed)
    recurrences = newest("linear_attention", "gdn_perf")
    if recurrences is not None:
        _recurrences(recurrences, packed)
    nccl = newest("comm", "nccl_perf")
    if nccl is not None:
        for name in ("all_gather", "reduce_scatter"):
            kept = (nccl.op_name == name) & (nccl.nccl_dtype == "half")
            _collective(nccl[kept], name, packed)
    if reduce is not None:
        _collective(reduce[reduce.backend.isin(GRAPH)], "all_reduce", packed)
    sheet = (folder / f"{system}.yaml").read_text()
    names = ("mem_bw", "bfloat16_tc_flops", "fp8_tc_flops", "fp4_tc_flops")
    peaks = [re.search(rf"^  {name}: *(\d+)", sheet, re.M) for name in names]
    packed["peaks"] = np.array([float(peak[1]) if peak else 0.0 for peak in peaks])
    packed["version"] = np.array(f"{engine} {max(versions)}")
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / f"{GPUS[system]}_{engine}.npz").open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **packed)


if __name__ == "__main__":
    for system in GPUS:
        for engine in ENGINES:
            pack(Path(sys.argv[1]), system, engine)
