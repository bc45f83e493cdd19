"""The operators of a model, with their shapes on one GPU of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import SIXTEEN_BIT_BYTES, weight_dtype
from ..model_parts import (
    Experts,
    LatentAttention,
    LinearAttention,
    RecurrenceKind,
    SparseAttention,
)
from ..placement import Placement


@dataclass(frozen=True)
class Gemm:
    """A matrix multiplication: (tokens x k) by (k x n), `calls` times in a pass."""

    name: str
    n: int
    k: int
    dtype: str
    calls: int


@dataclass(frozen=True)
class Small:
    """A kernel that moves `bytes_per_token` and hardly computes, `calls` times in a pass."""

    name: str
    bytes_per_token: float
    calls: int


@dataclass(frozen=True)
class Attention:
    """Attention of one layer on one GPU, `calls` times in a pass.

    `window_calls` times more with the last `window` tokens alone. `latent`: multi-head latent
    attention, whose one vector of `head_dim` elements all heads share.
    """

    heads: int
    kv_heads: int
    head_dim: int
    calls: int
    window: int = 0
    window_calls: int = 0
    latent: bool = False


@dataclass(frozen=True)
class Recurrence:
    """Linear attention of one layer on one GPU, `calls` times in a pass.

    `key_heads` and `value_heads` are those of the GPU. A pass reads and writes the state of each
    sequence. Prompts are computed in chunks of `CHUNK_TOKENS`, with matrix products inside a chunk
    and between chunks.
    """

    state_bytes: float
    token_bytes: float
    token_operations: float
    calls: int
    key_heads: float
    value_heads: float
    kind: RecurrenceKind = "gated-delta"


@dataclass(frozen=True)
class Indexer:
    """Scores of sparse attention in one layer, `calls` times in a pass; every GPU has all heads.

    A query reads `key_bytes` of each earlier token and does `operations` in 8 bits; its score is
    written, and read by the choice of the highest. `chosen_operations`: of one head and query with
    the chosen tokens, in 16 bits, where keys and values are latent vectors.
    """

    key_bytes: float
    operations: float
    chosen_operations: float
    calls: int


CHUNK_TOKENS = 64  # of the kernels that vLLM and SGLang use (flash-linear-attention)


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer on one GPU, `calls` times in a pass.

    Each of `ep` groups holds its share of the experts whole, over `tp` GPUs. `kernel`: the one
    that the server was told to take; empty: its own choice.
    """

    hidden: int
    experts: Experts
    gated: bool
    tp: int
    ep: int
    skew: float
    dtype: str
    calls: int
    kernel: str = ""


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of `bytes_per_token` over the tensor-parallel group."""

    bytes_per_token: float
    calls: int


@dataclass(frozen=True)
class Operators:
    """Everything that one pass launches; `head` is per sequence, all else per token."""

    gemms: tuple[Gemm, ...]
    small: tuple[Small, ...]
    attention: Attention
    experts: ExpertLayer | None
    all_reduces: tuple[AllReduce, ...]
    head: Gemm
    logits_bytes: float  # of one sequence
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None

    @property
    def launches(self) -> int:
        """Kernels that a pass launches where nothing is compiled or captured in a CUDA graph.

        Activations are quantised before each matrix multiplication in 8 or 4 bits. Experts are
        sorted, multiplied twice with an activation between, and combined (fused MoE of SGLang and
        vLLM); linear attention in chunks takes the kernels of flash-linear-attention
        (`chunk_gated_delta_rule_fwd`: norms of queries and keys, gates, their sums, products,
        triangular solve, weights, states, outputs).
        """
        count = sum(gemm.calls * _multiplied(gemm.dtype) for gemm in self.gemms)
        count += sum(small.calls for small in self.small if small.name != "quantise")
        count += sum(reduce.calls for reduce in self.all_reduces)
        count += self.attention.calls + self.attention.window_calls
        if self.experts is not None:
            count += self.experts.calls * (3 + 2 * _multiplied(self.experts.dtype))
        if self.recurrence is not None:
            count += 10 * self.recurrence.calls
        if self.indexer is not None:
            count += self.indexer.calls
        return count


def _multiplied(dtype: str) -> int:
    """Kernels of a matrix multiplication."""
    return 2 if weight_dtype(dtype).compute_bits < 16 else 1


def operators(placement: Placement) -> Operators:
    """The operators of a pass through the model on each GPU of a tensor-parallel group."""
    spec, tp = placement.model, placement.tp
    layers, hidden, width = spec.layers, spec.hidden, SIXTEEN_BIT_BYTES
    traits, experts = spec.traits, spec.experts
    dtype = spec.mixing_dtype(placement.weight_dtype)
    heads, kv_heads = spec.heads // tp, placement.kv_heads_per_gpu
    query, kv = heads * spec.head_dim, kv_heads * spec.head_dim
    small = [
        Small("norm", 4 * hidden * width, traits.norms_per_layer * layers),
        Small("embedding", 2 * hidden * width, 1),
    ]
    attending = spec.attention_layers
    if spec.latent is None:
        gate = query if traits.output_gate else 0
        gemms = [
            Gemm("qkv_proj", query + gate + 2 * kv, hidden, dtype, attending),
            Gemm("o_proj", hidden, query, dtype, attending),
        ]
        if gate:
            small.append(Small("output_gate", 3 * gate * width, attending))
        attended = query
    else:
        gemms, attended = _latent_gemms(spec.latent, hidden, heads, dtype, attending)
        query = heads * (spec.latent.key_dim + spec.latent.rope_dim)
        if spec.sparse is not None:
            gemms += _indexer_gemms(spec.sparse, spec.latent, hidden, dtype, spec.sparse_layers)
            small += _indexer_small(spec.sparse, spec.sparse_layers)
        small.append(Small("latent_norm", 4 * gemms[0].n * width, 2 * attending))
        if traits.output_gate:
            gemms.append(Gemm("output_gate_proj", attended, hidden, dtype, attending))
            small.append(Small("output_gate", 3 * attended * width, attending))
    small.append(Small("rotary_and_cache", (2 * query + 4 * kv) * width, 2 * attending))
    if traits.qk_norm:
        small.append(Small("qk_norm", 2 * (query + kv) * width, 2 * attending))
    if spec.linear is not None:
        more, less = _linear_operators(spec.linear, hidden, tp, dtype)
        gemms, small = [*gemms, *more], [*small, *less]
    mixing = spec.attention_layers + (spec.linear.layers if spec.linear else 0)
    if spec.linear is not None and spec.linear.beside_attention:
        mixing = spec.attention_layers  # both are summed before the all-reduce
    reduces = [AllReduce(hidden * width, mixing + spec.mlp_layers)]
    if traits.qk_norm_over_heads:  # sums of squares of queries and keys, 32 bits each
        reduces.append(AllReduce(8.0, attending))
    dtype = spec.dense_dtype(placement.weight_dtype)
    expert_layers = spec.expert_layers
    dense_layers = spec.mlp_layers - expert_layers
    mlps = [("", spec.intermediate, dense_layers)]
    routed = None
    if experts:
        mlps.append(("shared_", experts.shared_intermediate, expert_layers))
        gemms.append(Gemm("router", experts.routed, hidden, "bf16", expert_layers))
        if experts.width:
            gemms.append(Gemm("narrowing_proj", experts.width, hidden, dtype, expert_layers))
            gemms.append(Gemm("widening_proj", hidden, experts.width, dtype, expert_layers))
        if spec.family == "qwen3-next" and experts.shared_intermediate:
            # `shared_expert_gate` of Qwen3-Next and Qwen3.5 weighs their shared expert.
            gemms.append(Gemm("shared_gate", 1, hidden, "bf16", expert_layers))
            small.append(Small("shared_scale", 3 * hidden * width, expert_layers))
            small.append(Small("shared_add", 3 * hidden * width, expert_layers))
        small.append(Small("top_k", 2 * experts.routed * width, expert_layers))
        routed = ExpertLayer(
            experts.width or hidden,
            experts,
            traits.gated_mlp,
            placement.expert_gpus // placement.ep,
            placement.ep,
            placement.expert_skew,
            placement.weight_dtype,
            expert_layers,
        )
    for name, intermediate, calls in mlps:
        if not intermediate or not calls:
            continue
        inner = max(1, intermediate // tp)
        widened = (2 if traits.gated_mlp else 1) * inner
        gemms.append(Gemm(f"{name}up_proj", widened, hidden, dtype, calls))
        gemms.append(Gemm(f"{name}down_proj", hidden, inner, dtype, calls))
        small.append(Small(f"{name}activation", (widened + inner) * width, calls))
    if weight_dtype(dtype).compute_bits < 16:
        # Compilation fuses the other three quantisations into norms and activation.
        quantised = width + weight_dtype(dtype).bytes
        small.append(Small("quantise", attended * quantised, layers))
    window, sliding = 0, 0
    if spec.window is not None:
        window, sliding = spec.window.tokens, spec.window.layers
    elif spec.sparse is not None:  # as many tokens as a window has, chosen by the indexer
        window, sliding = spec.sparse.tokens, attending
    return Operators(
        tuple(gemms),
        tuple(small),
        Attention(
            heads,
            kv_heads,
            spec.head_dim,
            attending - sliding,
            window,
            sliding,
            spec.latent is not None,
        ),
        routed,
        tuple(reduces) if tp > 1 else (),
        Gemm("lm_head", -(-spec.vocab // tp), hidden, "bf16", 1),
        -(-spec.vocab // tp) * 4.0,
        None if spec.linear is None else _recurrence(spec.linear, tp),
        None if spec.sparse is None else _indexer(spec.sparse, spec.latent, spec.sparse_layers),
    )


def _linear_operators(
    linear: LinearAttention, hidden: int, tp: int, dtype: str
) -> tuple[list[Gemm], list[Small]]:
    """Projections of linear attention (`in_proj_qkvz` and `in_proj_ba`, whose results are split),
    its convolution and its gated norm.
    """
    mixed, value = linear.mixed_width // tp, linear.value_width // tp
    gates = linear.gates_width
    projected = (linear.projected_width - gates) // tp
    gemms = [Gemm("linear_in_proj", projected, hidden, dtype, linear.layers)]
    if gates:
        gemms.append(Gemm("linear_gates_proj", max(1, gates // tp), hidden, dtype, linear.layers))
    if linear.kind == "kda":  # decay and narrow gate, from the width of one head
        widenings = linear.layers * (1 if linear.full_gate else 2)
        gemms.append(Gemm("linear_widening_proj", value, linear.value_dim, dtype, widenings))
    gemms.append(Gemm("linear_out_proj", hidden, value, dtype, linear.layers))
    small = [
        Small("linear_split", 2 * projected * SIXTEEN_BIT_BYTES, linear.layers),
        Small("convolution", 2 * mixed * SIXTEEN_BIT_BYTES, linear.layers),
        Small("gated_norm", 3 * value * SIXTEEN_BIT_BYTES, linear.layers),
    ]
    return gemms, small


def _indexer_gemms(
    sparse: SparseAttention, latent: LatentAttention, hidden: int, dtype: str, layers: int
) -> list[Gemm]:
    """Projections of the indexer, which are not split over GPUs."""
    queries = sparse.heads * sparse.head_dim
    return [
        Gemm("index_q_proj", queries, latent.query_rank or hidden, dtype, layers),
        Gemm("index_k_proj", sparse.head_dim, hidden, dtype, layers),
        Gemm("index_weights", sparse.heads, hidden, "bf16", layers),
    ]


def _indexer_small(sparse: SparseAttention, layers: int) -> list[Small]:
    """Kernels around the scores, as in DeepSeek-V3.2's `Indexer` (vLLM and SGLang follow it): norm
    of the key; rotary embedding, rotation and quantisation of queries and key; two factors of the
    heads' weights; the cache; the choice.
    """
    key = sparse.head_dim * SIXTEEN_BIT_BYTES
    queries = sparse.heads * key
    return [
        Small("index_norm", 2 * key, layers),
        Small("index_rotary", 2 * (queries + key), layers),
        Small("index_rotate_queries", 2 * queries, layers),
        Small("index_rotate_key", 2 * key, layers),
        Small("index_quantise_queries", 1.5 * queries, layers),
        Small("index_quantise_key", 1.5 * key, layers),
        Small("index_weights", 8 * sparse.heads, 2 * layers),
        Small("index_cache", 2 * key, layers),
        Small("index_choice", 4 * sparse.tokens, layers),
    ]


def _indexer(sparse: SparseAttention, latent: LatentAttention | None, layers: int) -> Indexer:
    scores = 2 * sparse.heads * sparse.head_dim
    width = 0 if latent is None else 2 * latent.kv_rank + latent.rope_dim
    return Indexer(sparse.key_bytes, scores, 2 * sparse.tokens * width, layers)


def _recurrence(linear: LinearAttention, tp: int) -> Recurrence:
    """Operations of a token and value head, with chunks of C tokens. Delta rules: 6 key_dim
    value_dim for the products with the state and its update, C (6 key_dim + 4 value_dim) inside a
    chunk. Without a delta rule (state-space, lightning): 4 key_dim value_dim, and 2 C (value_dim +
    key_dim for each key head).
    """
    keys, values = linear.key_dim, linear.value_dim
    if linear.kind in ("gated-delta", "kda"):
        products = 6.0 * keys * values + CHUNK_TOKENS * (6 * keys + 4 * values)
    else:
        shared = keys * linear.key_heads / linear.value_heads
        products = 4.0 * keys * values + 2 * CHUNK_TOKENS * (values + shared)
    if linear.kind == "convolution":
        products = 2.0 * linear.kernel * values
    return Recurrence(
        2 * linear.state_bytes / tp,
        (linear.mixed_width + linear.value_width) / tp * SIXTEEN_BIT_BYTES,
        products * linear.value_heads / tp,
        linear.layers,
        linear.key_heads / tp,
        linear.value_heads / tp,
        linear.kind,
    )


def _latent_gemms(
    latent: LatentAttention, hidden: int, heads: int, dtype: str, layers: int
) -> tuple[list[Gemm], int]:
    """Projections of latent attention, and the width of its output.

    `kv_b_proj` widens the latent vector in a prefill; absorbed into queries and outputs of a
    decode it has as many operations. What makes the latent vectors is not split over GPUs.
    """
    narrow = latent.kv_rank + latent.rope_dim
    query = heads * (latent.key_dim + latent.rope_dim)
    gemms = [Gemm("qkv_a_proj", (latent.query_rank or 0) + narrow, hidden, dtype, layers)]
    gemms.append(Gemm("q_b_proj", query, latent.query_rank or hidden, dtype, layers))
    widened = heads * (latent.key_dim + latent.value_dim)
    gemms.append(Gemm("kv_b_proj", widened, latent.kv_rank, dtype, layers))
    attended = heads * latent.value_dim
    gemms.append(Gemm("o_proj", hidden, attended, dtype, layers))
    return gemms, attended
