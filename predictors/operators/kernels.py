"""Kernel times of one GPU and engine: from its own tables, else from those of the nearest GPU.

Tables are by shape. A shape between the measured ones takes their ratio to the roofline (the
larger of operations and bytes, and a launch), interpolated along the logarithms of its sides; so
does a GPU without tables, with the ratios of the GPU that is nearest to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.arrays import Floats, Mask
from ..dtypes import kv_dtype, weight_dtype
from ..model_parts import Experts
from ..specs import GpuSpec, LinkSpec, gpus
from .layers import Attention, ExpertLayer, Indexer, Recurrence

LAUNCH_S = 2e-6  # of one kernel in a CUDA graph: the least time in the tables of all GPUs
DISTURBED = 1.25  # times the time of a larger size
# Times what a kernel takes that is measured alone, where arithmetic bounds it: under a server's
# load GPUs reach their power limit (ML.ENERGY: H100 and B200 at 97 %; Splitwise: prompts on A100 at
# 101 to 109 %), and the clock falls. Chosen with Qwen3-32B on H100 in view; in Vidur's profiles,
# matrices of 512 tokens and more take 1.16 times the tables on H100, 1.12 times on A100.
SUSTAINED = 1.07
_SCORE_BYTES = 4
_SPARSE_HEADS = 64
_SPARSE_SHARE = 640 / 989
_FOLDER = "tables"


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do at most: bytes/s, and operations/s by width in bits."""

    bandwidth: float
    flops: dict[int, float]

    @classmethod
    def of(cls, gpu: GpuSpec) -> Peaks:
        """Those of the catalogue's entry."""
        return cls(
            gpu.bandwidth_bytes_per_s,
            {16: gpu.flops_16bit, 8: gpu.flops_8bit, 4: gpu.flops_4bit},
        )

    def roofline_s(self, moved_bytes: Floats, operations: Floats, bits: int) -> Floats:
        """Seconds of a kernel that moves these bytes and performs these operations."""
        peak = self.flops.get(bits) or self.flops[16]
        seconds: Floats = np.maximum(moved_bytes / self.bandwidth, operations / peak) + LAUNCH_S
        return seconds


class Kernels:
    """Times of kernels on `gpu`, whose tables or the nearest GPU's are `tables`."""

    def __init__(self, gpu: GpuSpec, source: str, tables: dict[str, Any]) -> None:
        self.gpu = gpu
        self.source = source
        self.exact = source.partition("_")[0] == gpu.name
        self.version = str(tables["version"])
        bandwidth, *flops = tables["peaks"].tolist()
        self._measured = Peaks(bandwidth, dict(zip((16, 8, 4), flops, strict=True)))
        # A catalogue entry may round its data sheet otherwise than the tables' origin does.
        self._own = self._measured if self.exact else Peaks.of(gpu)
        self._tables = tables

    def small_s(self, moved_bytes: Floats) -> Floats:
        """A kernel that only moves bytes (norm, activation, rotary embedding), at 80 % of peak."""
        return LAUNCH_S + moved_bytes / (0.8 * self._own.bandwidth)

    def roofline_s(self, moved_bytes: Floats, operations: Floats, bits: int = 16) -> Floats:
        """A kernel without tables: 80 % of the bandwidth, or all operations."""
        return self._own.roofline_s(moved_bytes / 0.8, operations, bits)

    # ---------------------------------------------------------------- matrix multiplications

    def gemm_s(self, tokens: Floats, n: int, k: int, dtype: str) -> Floats:
        """Seconds of (tokens x k) by (k x n) for each number of tokens."""
        has_table = f"gemm/{dtype}/m" in self._tables
        table_tokens, ratios = self._gemm_ratios(n, k, dtype if has_table else "bf16")
        ratio = np.exp(np.interp(np.log(tokens), np.log(table_tokens), np.log(ratios)))
        seconds: Floats = ratio * _gemm_roofline(self._own, tokens, n, k, dtype)
        return seconds

    def sustained_gemm_s(self, tokens: Floats, n: int, k: int, dtype: str) -> Floats:
        """`gemm_s` under a server's load: longer where arithmetic bounds it."""
        roofline = _gemm_roofline(self._own, tokens, n, k, dtype)
        return self.gemm_s(tokens, n, k, dtype) * self._slowed(2 * tokens * n * k, dtype, roofline)

    def _slowed(self, operations: Floats, dtype: str, roofline_s: Floats) -> Floats:
        """Factors on the times of kernels: `SUSTAINED` where arithmetic bounds them."""
        bits = weight_dtype(dtype).compute_bits
        arithmetic_s = operations / (self._own.flops.get(bits) or self._own.flops[16])
        return np.where(arithmetic_s + LAUNCH_S >= roofline_s, SUSTAINED, 1.0)

    def gemm_tokens(self, dtype: str) -> Floats:
        """Numbers of tokens at which matrix multiplications were measured.

        Beyond 64 the multiples of 16: FP8 kernels with other sizes were measured up to 1.6 times
        slower than padded ones, which steps of servers are not.
        """
        name = f"gemm/{dtype}/m" if f"gemm/{dtype}/m" in self._tables else "gemm/bf16/m"
        return np.asarray(self._tables[name][self._sizes(name)], dtype=np.float64)

    def _sizes(self, name: str) -> Mask:
        tokens = self._tables[name]
        kept: Mask = (tokens <= 64) | (tokens % 16 == 0)
        return kept

    def _gemm_ratios(self, n: int, k: int, dtype: str) -> tuple[Floats, Floats]:
        tokens = self.gemm_tokens(dtype)
        sides_n = np.asarray(self._tables[f"gemm/{dtype}/n"], dtype=np.float64)
        sides_k = np.asarray(self._tables[f"gemm/{dtype}/k"], dtype=np.float64)
        seconds = _seconds(self._tables[f"gemm/{dtype}/time"][self._sizes(f"gemm/{dtype}/m")])
        total, weight = np.zeros(len(tokens)), np.zeros(len(tokens))
        for i, share_n in _neighbours(sides_n, n):
            for j, share_k in _neighbours(sides_k, k):
                share = share_n * share_k
                roofline = _gemm_roofline(self._measured, tokens, sides_n[i], sides_k[j], dtype)
                ratio = np.log(seconds[:, i, j] / roofline)
                there = np.isfinite(ratio)
                total[there] += share * ratio[there]
                weight[there] += share
        there = weight > 0
        tokens, ratio = tokens[there], np.exp(total[there] / weight[there])
        times = ratio * _gemm_roofline(self._measured, tokens, n, k, dtype)
        # Padding to a larger size is always possible: what takes much longer was disturbed.
        least = np.minimum.accumulate(times[::-1])[::-1]
        return tokens, ratio * np.minimum(1.0, DISTURBED * least / times)

    # ---------------------------------------------------------------- attention

    def generation_s(self, attention: Attention, dtype: str) -> tuple[Floats, Floats, Floats]:
        """Sequences, their KV tokens, and seconds [sequences, KV tokens]; NaN: not measured."""
        nearest, times, batch, length = self._attention("generation", attention, dtype)
        sizes = (batch[:, None], 1.0, length[None, :])
        theirs = _attention_roofline(self._measured, *sizes, nearest, dtype)
        return (
            batch,
            length,
            times * _attention_roofline(self._own, *sizes, attention, dtype) / theirs,
        )

    def context_s(self, attention: Attention, dtype: str) -> tuple[Floats, Floats]:
        """Lengths of a prompt and the seconds of its causal attention."""
        nearest, times, _, length = self._attention("context", attention, dtype)
        sizes = (1.0, length, 0.5 * length)
        theirs = _attention_roofline(self._measured, *sizes, nearest, dtype)
        finite = np.isfinite(times[0])
        ours = _attention_roofline(self._own, *sizes, attention, dtype)
        return length[finite], (times[0] * ours / theirs)[finite]

    def index_s(self, read: Floats, pairs: Floats, indexer: Indexer) -> Floats:
        """Seconds in which an indexer scores `pairs` of a query and an earlier token, of which it
        reads `read`; by the roofline, as no table has it.
        """
        moved = read * indexer.key_bytes + 2 * _SCORE_BYTES * pairs
        return self.roofline_s(moved, pairs * indexer.operations, 8)

    def sparse_context(self, attention: Attention, dtype: str) -> tuple[Floats, Floats] | None:
        """Tokens of a prompt, and the seconds of one layer's sparse attention with 16-bit
        projections and its indexer (vLLM's module); None: not measured.
        """
        name = f"sparse_context/{dtype}"
        if f"{name}/heads" not in self._tables:
            return None
        heads = self._tables[f"{name}/heads"]
        nearest = int(np.argmin(np.abs(np.log(heads / attention.heads))))
        times = _seconds(self._tables[f"{name}/time"][nearest])
        there = np.isfinite(times)
        if not self.exact:
            times = times * self._measured.flops[16] / self._own.flops[16]
        return np.asarray(self._tables[f"{name}/length"], dtype=np.float64)[there], times[there]

    def chosen_s(self, attention: Attention, indexer: Indexer) -> float:
        """Seconds in which a query of a prompt attends to the tokens that an indexer chose, where
        no table has them; 0: as long as with a window.

        Prompts longer than the number of chosen tokens run through FlashMLA's sparse kernel on
        Hopper, which takes multiples of 64 heads: fewer are padded (SGLang,
        `_forward_flashmla_sparse`), and reaches 640 TFLOP/s on H800, 65 % of the data sheet (its
        README).
        """
        if not attention.latent or self.gpu.flops_4bit:
            return 0.0
        heads = _SPARSE_HEADS * -(-attention.heads // _SPARSE_HEADS)
        return heads * indexer.chosen_operations / (_SPARSE_SHARE * self.gpu.flops_16bit)

    def _attention(
        self, kind: str, attention: Attention, dtype: str
    ) -> tuple[Attention, Floats, Floats, Floats]:
        """The measured shape nearest to `attention`, its times, and the axes."""
        measured_dims = [dim for dim in (64, 128) if f"{kind}/{dim}/bf16/shape" in self._tables]
        dim: int | str = min(
            measured_dims, key=lambda candidate: abs(candidate - attention.head_dim), default=128
        )
        if attention.latent and f"{kind}/latent/bf16/shape" in self._tables:
            dim = "latent"
        name = f"{kind}/{dim}/{dtype}"
        if f"{name}/shape" not in self._tables:
            name = f"{kind}/{dim}/bf16"
        shapes = self._tables[f"{name}/shape"]
        group = attention.heads / attention.kv_heads
        far = 2 * np.abs(np.log(shapes[:, 0] / shapes[:, 1] / group)) + np.abs(
            np.log(shapes[:, 1] / attention.kv_heads)
        )
        nearest = int(np.argmin(far))
        times = _seconds(self._tables[f"{name}/time"][nearest])
        batch = np.asarray(self._tables[f"{name}/batch"], dtype=np.float64)
        length = np.asarray(self._tables[f"{name}/length"], dtype=np.float64)
        measured = Attention(
            int(shapes[nearest, 0]),
            int(shapes[nearest, 1]),
            attention.head_dim if isinstance(dim, str) else dim,
            attention.calls,
            latent=isinstance(dim, str),
        )
        return measured, times, batch, length

    # ---------------------------------------------------------------- linear attention

    def has_recurrence(self, recurrence: Recurrence) -> bool:
        """Whether linear attention of this kind was measured; else it is computed by its
        roofline.
        """
        shapes = self._tables.get("linear_context/shape", ())  # none on A100
        return recurrence.kind == "gated-delta" and len(shapes) > 0

    def recurrence_s(self, tokens: Floats, recurrence: Recurrence) -> Floats:
        """Seconds in which one layer computes a prompt's chunk of each number of `tokens`."""
        tokens = np.asarray(tokens, dtype=np.float64)
        if not self.has_recurrence(recurrence):
            return self.roofline_s(
                recurrence.token_bytes * tokens, recurrence.token_operations * tokens
            )
        return self._recurrence("context", tokens, recurrence)

    def recurrent_s(self, sequences: Floats, recurrence: Recurrence) -> Floats:
        """Seconds of one layer's update of the states of decoding sequences."""
        if not self.has_recurrence(recurrence):
            return self.small_s(recurrence.state_bytes * sequences)
        return self._recurrence("generation", sequences, recurrence)

    def _recurrence(self, phase: str, counts: Floats, recurrence: Recurrence) -> Floats:
        """Times of the nearest measured heads, along logarithms; beyond the table in proportion.
        What is bound by bandwidth or arithmetic grows with the value heads, which are scaled where
        another number was measured.
        """
        shapes = self._tables[f"linear_{phase}/shape"]
        heads = np.array([recurrence.key_heads, recurrence.value_heads])
        nearest = int(np.argmin(np.abs(np.log(shapes / heads)) @ [1.0, 2.0]))
        table_counts = np.asarray(self._tables[f"linear_{phase}/at"], dtype=np.float64)
        times = _seconds(self._tables[f"linear_{phase}/time"][nearest])
        there = np.isfinite(times)
        table_counts, times = table_counts[there], times[there]
        inside = np.exp(
            np.interp(
                np.log(np.maximum(counts, table_counts[0])), np.log(table_counts), np.log(times)
            )
        )
        seconds = inside * np.maximum(1.0, counts / table_counts[-1])
        scale = recurrence.value_heads / shapes[nearest, 1]
        if not self.exact:
            scale *= self._measured.bandwidth / self._own.bandwidth
        return np.asarray(np.maximum(LAUNCH_S, seconds * scale))

    # ---------------------------------------------------------------- experts

    def experts_s(self, tokens: Floats, layer: ExpertLayer) -> Floats:
        """Seconds of one layer's experts on the GPU with most load, for each number of tokens.

        Under a server's load, as `sustained_gemm_s`. Where another number of experts was measured,
        it is with as many tokens an expert.
        """
        has_table = f"moe/{layer.dtype}/shape" in self._tables
        dtype = layer.dtype if has_table else "bf16"
        variant = f"{layer.dtype}-{layer.kernel}"
        name = f"moe/{variant if f'moe/{variant}/shape' in self._tables else dtype}"
        roofline = _experts_roofline(self._own, tokens, layer)
        shapes = self._tables[f"{name}/shape"]
        e = layer.experts
        sides = (layer.hidden, e.intermediate, e.per_token, e.routed, layer.tp, layer.ep)
        nearest = int(np.argmin(np.abs(np.log(shapes / np.array(sides))).sum(axis=1)))
        hidden, inner, per_token, routed, tp, ep = map(int, shapes[nearest])
        measured = replace(
            layer,
            hidden=hidden,
            experts=Experts(routed, per_token, inner),
            tp=tp,
            ep=ep,
            skew=0.0,
            dtype=dtype,
        )
        times = _seconds(self._tables[f"{name}/time"][nearest])
        there = np.isfinite(times)
        table_tokens = np.asarray(self._tables[f"{name}/tokens"], dtype=np.float64)[there]
        ratio = np.log(times[there] / _experts_roofline(self._measured, table_tokens, measured))
        table_tokens = table_tokens * (per_token / routed) / (e.per_token / e.routed)
        measured_s = np.exp(np.interp(np.log(tokens), np.log(table_tokens), ratio)) * roofline
        slowed = self._slowed(_experts_operations(tokens, layer), layer.dtype, roofline)
        return np.asarray(measured_s * slowed)

    # ---------------------------------------------------------------- collectives

    def all_reduce_s(self, gpus: int, sizes_bytes: Floats, link: LinkSpec) -> Floats:
        """Seconds of one all-reduce of each size: by a measured link, else by the tables of this
        GPU, else by the link's data sheet.
        """
        return self._collective_s("all_reduce", 2, gpus, sizes_bytes, link)

    def exchange_s(self, gpus: int, sizes_bytes: Floats, link: LinkSpec) -> Floats:
        """Seconds to gather the tokens of all ranks before experts, and to scatter the sums after.

        An all-gather and a reduce-scatter of `sizes_bytes` in all (vLLM's default,
        `allgather_reducescatter`), by NCCL's times; otherwise as `all_reduce_s`.
        """
        return self._collective_s("all_gather", 1, gpus, sizes_bytes, link) + self._collective_s(
            "reduce_scatter", 1, gpus, sizes_bytes, link
        )

    def _collective_s(
        self, name: str, rounds: int, gpus: int, sizes_bytes: Floats, link: LinkSpec
    ) -> Floats:
        """Seconds of one collective; in each of its rounds a GPU sends all but its own share."""
        if self.exact and f"{name}/gpus" in self._tables and not link.measured:
            row = np.flatnonzero(self._tables[f"{name}/gpus"] == gpus)
            if len(row):
                times = _seconds(self._tables[f"{name}/time"][row[0]])
                table_bytes = np.asarray(self._tables[f"{name}/bytes"], dtype=np.float64)
                finite = np.isfinite(times)
                # A larger message never takes less; what says so was disturbed.
                least = np.minimum.accumulate(times[finite][::-1])[::-1]
                log_s = np.interp(np.log(sizes_bytes), np.log(table_bytes[finite]), np.log(least))
                return np.asarray(np.exp(log_s))
        moved = rounds * (gpus - 1) / gpus * sizes_bytes
        return np.asarray(rounds * link.latency_s + moved / link.bandwidth_bytes_per_s)


def _seconds(packed: NDArray[Any]) -> Floats:
    return np.asarray(np.exp2(packed.astype(np.float64)) * 1e-6)


def _neighbours(sides: Floats, side: float) -> list[tuple[int, float]]:
    """Rows on both sides of `side` with their shares, by logarithms; the end row beyond."""
    if side <= sides[0]:
        return [(0, 1.0)]
    if side >= sides[-1]:
        return [(len(sides) - 1, 1.0)]
    after = int(np.searchsorted(sides, side))
    if sides[after] == side:
        return [(after, 1.0)]
    share = math.log(side / sides[after - 1]) / math.log(sides[after] / sides[after - 1])
    return [(after - 1, 1 - share), (after, share)]


def _gemm_roofline(peaks: Peaks, tokens: Floats, n: float, k: float, dtype: str) -> Floats:
    width = weight_dtype(dtype).bytes
    moved = n * k * width + tokens * (k * min(2.0, width) + 2 * n)
    return peaks.roofline_s(moved, 2 * tokens * n * k, weight_dtype(dtype).compute_bits)


def _attention_roofline(
    peaks: Peaks, batch: Any, queries: Any, keys: Any, shape: Attention, dtype: str
) -> Floats:
    """`queries` tokens a sequence attend to `keys` tokens each."""
    kv = (1 if shape.latent else 2) * shape.kv_heads * shape.head_dim
    held, query = np.maximum(queries, keys), shape.heads * shape.head_dim
    moved = batch * (held * kv * kv_dtype(dtype).bytes + 4 * queries * query)
    return peaks.roofline_s(moved, 4.0 * batch * queries * keys * query, 16)


def _experts_roofline(peaks: Peaks, tokens: Floats, layer: ExpertLayer) -> Floats:
    """The chosen experts' weights are read once; each choice of a token is computed."""
    experts, dtype = layer.experts, weight_dtype(layer.dtype)
    expert_parameters = _expert_parameters(layer)
    read = np.array([experts.distinct(n, layer.skew, layer.ep) for n in tokens])
    choices = tokens * experts.per_token * experts.most_loaded_share(layer.skew, layer.ep)
    moved = read * expert_parameters * dtype.bytes + 4 * choices * layer.hidden
    return peaks.roofline_s(moved, _experts_operations(tokens, layer), dtype.compute_bits)


def _experts_operations(tokens: Floats, layer: ExpertLayer) -> Floats:
    choices = tokens * layer.experts.per_token
    share = layer.experts.most_loaded_share(layer.skew, layer.ep)
    return np.asarray(2 * choices * share * _expert_parameters(layer))


def _expert_parameters(layer: ExpertLayer) -> float:
    """Parameters of one expert on one of the GPUs that share it."""
    return (3 if layer.gated else 2) * layer.hidden * layer.experts.intermediate / layer.tp


# ---------------------------------------------------------------- which tables


@lru_cache(maxsize=1)
def _packed() -> tuple[str, ...]:
    folder = files(__package__) / _FOLDER
    return tuple(
        sorted(f.name.removesuffix(".npz") for f in folder.iterdir() if f.name.endswith(".npz"))
    )


@lru_cache(maxsize=8)
def _read(name: str) -> dict[str, Any]:
    with (files(__package__) / _FOLDER / f"{name}.npz").open("rb") as file:
        return dict(np.load(file, allow_pickle=False))


def has_tables(gpu_name: str) -> bool:
    """Whether kernels were measured on this GPU."""
    return f"{gpu_name}_vllm" in _packed()


def kernels(gpu: GpuSpec, engine: str = "vllm", without: tuple[str, ...] = ()) -> Kernels:
    """The kernel times of `gpu` under `engine`; tables of the GPUs `without` are not used.

    Where there are none, those of the GPU whose bandwidth and operations/s are nearest.
    """
    engine = "sglang" if engine == "sglang" else "vllm"
    specs = gpus()
    names = [name.removesuffix(f"_{engine}") for name in _packed() if name.endswith(f"_{engine}")]
    names = [name for name in names if name in specs and name not in without]

    def far(name: str) -> float:
        other = specs[name]
        return (
            2.0 * (bool(other.flops_8bit) != bool(gpu.flops_8bit))
            + abs(math.log(other.bandwidth_bytes_per_s / gpu.bandwidth_bytes_per_s))
            + abs(math.log(other.flops_16bit / gpu.flops_16bit))
        )

    base = gpu.name.partition("@")[0]
    nearest = gpu.name if gpu.name in names else min(names, key=far)
    if base != gpu.name and base in names:
        nearest = base  # a power cap
    source = f"{nearest}_{engine}"
    return Kernels(gpu, source, _read(source))
