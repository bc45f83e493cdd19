"""A step-time model from operators: their times summed into the tables that the simulator leaps in.

Linear layers, small kernels and all-reduces by tokens; output head, sampler and host by sequences;
attention by a grid of sequences, lengths and chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError, UnknownNameError
from ..dtypes import SIXTEEN_BIT_BYTES, kv_dtype
from ..placement import Placement
from ..profiles.build_model import grid_of
from ..profiles.data_parallel import DataParallelStepTime
from ..profiles.step_time_table import Curve, DecodeGrid, Host, MixedGrid, TableStepTime
from ..specs import model
from ..speculation import SpeculativeStepTime, parse_speculation
from ..step_time import DEFAULT_HOST_S, StepTimeModel, coefficients_of, step_time
from .kernels import SUSTAINED, Kernels, has_tables, kernels
from .layers import ExpertLayer, Indexer, Operators, operators
from .server_version import DEFAULT_ENGINE, ServerVersion, version_numbers

_SEQUENCES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], dtype=np.float64)
_CONTEXTS = np.array([0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536], dtype=np.float64)
_CHUNKS = np.array([1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], dtype=np.float64)

# Query rows of a tile of FlashAttention 2 with paged KV. In a step with prompts a decoding sequence
# takes a tile for each query head and fills one row of it: in tables of such steps (LLMServingSim,
# vLLM 0.19: three models, RTX PRO 6000 and 4090, up to 64 sequences) one costs what 52 to 88 rows
# of a prompt do.
_TILE_ROWS = 64


@dataclass(frozen=True)
class HostTimes:
    """Seconds that the host adds to a step, and to a step for each of its sequences; `kernel_s`:
    seconds in which it launches a kernel of a step with prompts (0: faster than the GPU).
    """

    step_s: float
    sequence_s: float
    kernel_s: float = 0.0


NEWEST_SERVER = ServerVersion()
OPERATORS, ROOFLINE = "operators", "roofline"  # in place of a profile's file
_OF_ATTENTION = ("qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
GRAPH_TOKENS = 512  # the largest CUDA graph that is captured
# SGLang launches prompts kernel by kernel, with Python between. Chosen with half of its rows of
# mixtures of experts in view: 110 ms for the 1,575 kernels of DeepSeek-V3 (`Operators.launches`).
# Published: 82.6 ms for a prompt of one token, 23.1 ms with a CUDA graph
# (github.com/sgl-project/sglang/pull/12160).
EAGER_KERNEL_S = 70e-6
# Chosen with closed-loop rows in view (docs/accuracy.md); not for TensorRT-LLM.
_SYNCHRONOUS_VLLM = HostTimes(1.3e-3, 30e-6)
_HOSTS = {
    "vllm": HostTimes(0.0, 10e-6),  # of a version that schedules ahead
    "sglang": HostTimes(0.8e-3, 10e-6, EAGER_KERNEL_S),
    "trtllm": HostTimes(0.0, 10e-6),
}


def host_times(server: ServerVersion) -> HostTimes:
    """What the host of a server adds to its steps.

    Raises:
        UnknownNameError: there are no host times of the engine.
    """
    if server.engine not in _HOSTS:
        raise UnknownNameError("engine", server.engine, _HOSTS)
    if server.engine == "vllm" and not server.schedules_ahead:
        return _SYNCHRONOUS_VLLM
    return _HOSTS[server.engine]


def is_file(profile: str | None) -> bool:
    """Whether a profile is a file, and not the name of step times without one."""
    return profile is not None and profile.partition(":")[0] not in (OPERATORS, ROOFLINE)


def simulated_server(profile: str | None, version: str | None) -> ServerVersion:
    """The server that `--profile operators:ENGINE` and `--server-version` name; the newest vLLM.

    Raises:
        SloBenchError: one is unknown, or they name two engines.
    """
    name, _, engine = (profile or "").partition(":")
    engine = engine if name == OPERATORS else ""
    if engine and version and version[0].isdigit():
        version = f"{engine}-{version}"
    server = ServerVersion.parse(version or engine or DEFAULT_ENGINE)
    if engine and engine != server.engine:
        raise SloBenchError(
            f"profile names the engine {engine}, and server_version {server.engine}; leave one out"
        )
    return server


def operator_step_time(
    placement: Placement,
    server: ServerVersion = NEWEST_SERVER,
    *,
    host_s: float | None = None,
    without: tuple[str, ...] = (),
    experts_kernel: str = "",
) -> StepTimeModel:
    """The step-time model of a placement on a server, from kernel times.

    `host_s` replaces the host's seconds of a step. Tables of GPUs `without` are not used (to see
    what a GPU without tables would get). `experts_kernel` (`triton`, `marlin`): the one that the
    server is told to take for experts; its own choice where that was not measured.

    Raises:
        UnknownNameError: there are no host times of the engine.
        SloBenchError: the model is not a decoder.
    """
    host, engine = host_times(server), server.engine
    if placement.model.kind != "decoder":
        raise SloBenchError(f"{placement.model.name} is an encoder; step times are for decoders")
    step_s = host.step_s if host_s is None else host_s
    kernel_times = kernels(placement.gpu, engine, without)
    listed = operators(_as_run(placement, engine))
    if listed.experts is not None:
        listed = replace(listed, experts=_with_kernel(listed.experts, experts_kernel))
    linear, experts = (
        _linear(kernel_times, listed, placement),
        _experts(kernel_times, listed, placement),
    )
    decode = _decode(kernel_times, listed, placement)
    rest = (
        _per_sequence(kernel_times, listed, host),
        decode,
        _mixed(kernel_times, listed, placement, decode, server),
        Host(step_s, graph_tokens=GRAPH_TOKENS, prefill_s=host.kernel_s * listed.launches),
    )
    if placement.dp > 1 and experts is not None:
        table: TableStepTime = DataParallelStepTime(placement.dp, linear, experts, *rest)
    else:
        if experts is not None:
            linear = Curve(linear.counts, linear.seconds + experts.seconds)
        table = TableStepTime(linear, *rest)
    origin = (
        f"operators: kernel times of {kernel_times.version} on "
        f"{kernel_times.source.partition('_')[0]}"
    )
    if not kernel_times.exact:
        origin += f", scaled to {placement.gpu.name}"
    origin += f" (AIConfigurator), host times of {server}"
    recurrence = listed.recurrence
    by_roofline = recurrence is not None and not kernel_times.has_recurrence(recurrence)
    if by_roofline:
        origin += "; linear attention by its roofline"
    fitted = kernel_times.exact and not by_roofline
    return StepTimeModel(table, fitted=fitted, provenance=origin)


def _as_run(placement: Placement, engine: str) -> Placement:
    """A placement as the engine runs it: without expert parallelism SGLang computes DeepSeek-V3's
    shared expert as one more routed expert, which every token chooses
    (`determine_num_fused_shared_experts`, github.com/sgl-project/sglang/pull/5571).
    """
    spec, experts = placement.model, placement.model.experts
    if engine != "sglang" or spec.latent is None or spec.sparse is not None or experts is None:
        return placement
    if placement.ep > 1 or experts.routed != 256 or experts.shared_intermediate == 0:
        return placement
    fused = replace(
        experts,
        routed=experts.routed + 1,
        per_token=experts.per_token + 1,
        shared_intermediate=0,
    )
    return replace(placement, model=replace(spec, experts=fused))


def _with_kernel(layer: ExpertLayer, kernel: str) -> ExpertLayer:
    """The experts by this kernel. For Marlin with MXFP4 weights vLLM pads the hidden size to a
    multiple of 256 and the width on a GPU to one of 128
    (`mxfp4_round_up_hidden_size_and_intermediate_size`).
    """
    if kernel == "marlin" and layer.dtype == "mxfp4":
        width = 128 * layer.tp
        padded = width * -(-layer.experts.intermediate // width)
        layer = replace(
            layer,
            hidden=256 * -(-layer.hidden // 256),
            experts=replace(layer.experts, intermediate=padded),
        )
    return replace(layer, kernel=kernel)


def speculative_step_time(
    placement: Placement, text: str, server: ServerVersion, host_s: float | None = None
) -> StepTimeModel:
    """Step times with the speculation called `text` (`predictors.speculation`), from operators.

    Raises:
        SloBenchError: the speculation or its draft model cannot be, or attention is data-parallel.
    """
    speculation = parse_speculation(text)
    served = operator_step_time(placement, server, host_s=host_s)
    if speculation is None:
        return served
    if placement.dp > 1 or placement.pp > 1:
        raise SloBenchError("speculation is simulated with dp 1 and pp 1; leave it or them out")
    assert isinstance(served.model, TableStepTime)
    shape, draft = speculation.drafter(placement.model), None
    if shape is not None:
        small = model(shape) if isinstance(shape, str) else shape
        drafting = replace(placement, model=small, ep=placement.ep if small.experts else 1)
        draft_table = operator_step_time(drafting, server, host_s=0.0).model
        assert isinstance(draft_table, TableStepTime)
        draft = draft_table
    return replace(
        served,
        model=SpeculativeStepTime(served.model, speculation, draft),
        provenance=f"speculation {text}, {speculation.tokens_per_step:.2f} tokens a step; "
        + served.provenance,
    )


def draft_bytes(placement: Placement, text: str) -> int:
    """Bytes on each GPU of the weights that compute proposals; embeddings and head are the model's.

    A draft model has its own. Its KV is not counted.
    """
    speculation = parse_speculation(text)
    shape = speculation.drafter(placement.model) if speculation else None
    if shape is None:
        return 0
    if isinstance(shape, str):
        return model(shape).weight_bytes() // placement.tp
    return shape.layer_weight_bytes(placement.weight_dtype) // placement.tp


def default_step_time(
    placement: Placement,
    server: ServerVersion = NEWEST_SERVER,
    *,
    host_s: float | None = None,
    without: tuple[str, ...] = (),
    experts_kernel: str = "",
) -> StepTimeModel:
    """The step times that every command takes unless it is told otherwise: from operators, but a
    fit of the model on the GPU where the GPU has no kernel tables. Arguments are those of
    `operator_step_time`.

    Raises:
        SloBenchError: the model is not a decoder.
    """
    tables = has_tables(placement.gpu.name) or not placement.model.is_plain
    if not tables and coefficients_of(placement).fitted:
        return step_time(placement, DEFAULT_HOST_S if host_s is None else host_s)
    return operator_step_time(
        placement, server, host_s=host_s, without=without, experts_kernel=experts_kernel
    )


def _linear(kernel_times: Kernels, listed: Operators, placement: Placement) -> Curve:
    tokens = kernel_times.gemm_tokens(listed.gemms[0].dtype)
    seconds = np.zeros(len(tokens))
    for gemm in listed.gemms:
        seconds += gemm.calls * kernel_times.sustained_gemm_s(tokens, gemm.n, gemm.k, gemm.dtype)
    for small in listed.small:
        seconds += small.calls * kernel_times.small_s(small.bytes_per_token * tokens)
    for reduce in listed.all_reduces:
        seconds += reduce.calls * kernel_times.all_reduce_s(
            placement.tp, reduce.bytes_per_token * tokens, placement.peer_link
        )
    if placement.pp > 1:
        hop, link = placement.model.hidden * 2 / placement.tp, placement.peer_link
        per_token = hop / link.bandwidth_bytes_per_s
        seconds += (placement.pp - 1) * (link.latency_s + tokens * per_token)
    return Curve(tokens, seconds)


def _experts(kernel_times: Kernels, listed: Operators, placement: Placement) -> Curve | None:
    """Seconds of the experts by the tokens of all data-parallel ranks, exchange included."""
    if listed.experts is None:
        return None
    tokens = kernel_times.gemm_tokens(listed.gemms[0].dtype)
    seconds = kernel_times.experts_s(tokens, listed.experts)
    if placement.dp > 1:
        sizes = placement.model.hidden * SIXTEEN_BIT_BYTES * tokens
        seconds = seconds + kernel_times.exchange_s(placement.dp, sizes, placement.peer_link)
    return Curve(tokens, listed.experts.calls * seconds)


def _per_sequence(kernel_times: Kernels, listed: Operators, host: HostTimes) -> Curve:
    head = listed.head
    seconds = kernel_times.gemm_s(_SEQUENCES, head.n, head.k, head.dtype)
    sampled = kernel_times.small_s(4 * listed.logits_bytes * _SEQUENCES)
    if (recurrence := listed.recurrence) is not None:
        sampled += recurrence.calls * kernel_times.recurrent_s(_SEQUENCES, recurrence)
    return Curve(_SEQUENCES, seconds + sampled + host.sequence_s * _SEQUENCES)


def _decode(kernel_times: Kernels, listed: Operators, placement: Placement) -> DecodeGrid:
    a = listed.attention
    batch, length, seconds = kernel_times.generation_s(a, placement.kv_dtype)
    there = np.isfinite(seconds)
    rows, columns = np.nonzero(there)
    (sequences, kv), filled = grid_of(
        [batch[rows], length[columns]], seconds[there], fill_along=(1, 0)
    )
    total = a.calls * filled
    if a.window_calls:
        attended = np.minimum(kv, a.window)
        total += a.window_calls * np.array([np.interp(attended, kv, row) for row in filled])
    if (indexer := listed.indexer) is not None:
        read = sequences[:, None] * kv[None, :]
        total += indexer.calls * kernel_times.index_s(read, read, indexer)
    return DecodeGrid(sequences, kv, total)


def _mixed(
    kernel_times: Kernels,
    listed: Operators,
    placement: Placement,
    decode: DecodeGrid,
    server: ServerVersion,
) -> MixedGrid:
    """Prompts and decoding sequences one after the other, or together in tiles (`_in_tiles`).

    A chunk behind a context takes what the causal attention to both takes longer than that to the
    context alone; so no measurement of such chunks is needed.
    """
    a = listed.attention
    length, seconds = kernel_times.context_s(a, placement.kv_dtype)
    seconds = seconds * SUSTAINED
    pairs_s = np.polyfit(length[-3:] ** 2, seconds[-3:], 1)[0]

    def alone(tokens: Floats) -> Floats:
        inside = np.interp(tokens, length, seconds)
        beyond = seconds[-1] + pairs_s * (tokens**2 - length[-1] ** 2)
        return np.where(tokens > length[-1], beyond, inside)

    def windowed(tokens: Floats) -> Floats:
        pairs = a.window * np.maximum(0.0, tokens - a.window)
        return np.asarray(alone(np.minimum(tokens, a.window)) + 2 * pairs_s * pairs)

    def behind(contexts: Floats, alone: Callable[[Floats], Floats]) -> Floats:
        chunks = _CHUNKS[:, None]
        later = alone(contexts + chunks) - np.where(contexts > 0, alone(contexts), 0.0)
        return np.asarray(np.maximum(later, alone(np.broadcast_to(chunks, later.shape))))

    def indexed(contexts: Floats, indexer: Indexer) -> Floats:
        chunks = _CHUNKS[:, None]
        pairs = chunks * (contexts + 0.5 * chunks)
        return kernel_times.index_s(contexts + chunks, pairs, indexer)

    contexts = _CONTEXTS[None, :]
    later = a.calls * behind(contexts, alone)
    if a.window_calls and (chosen_s := _chosen_s(kernel_times, listed, placement)):
        dense = behind(contexts, alone)
        chosen = chosen_s * _CHUNKS[:, None]
        later += a.window_calls * np.where(contexts + _CHUNKS[:, None] > a.window, chosen, dense)
    elif a.window_calls:
        later += a.window_calls * behind(np.minimum(contexts, a.window), windowed)
    if listed.indexer is not None:
        later += listed.indexer.calls * indexed(contexts, listed.indexer)
    if (recurrence := listed.recurrence) is not None:
        later = later + recurrence.calls * kernel_times.recurrence_s(_CHUNKS[:, None], recurrence)
    sequences = np.concatenate([[0.0], decode.sequences])
    decode_s = decode.seconds
    if _in_tiles(placement, server) and listed.indexer is None and not a.latent:
        kv = decode.kv_tokens
        attended = a.calls * kv + a.window_calls * np.minimum(kv, a.window)
        decode_s = np.maximum(
            decode_s, 2 * pairs_s * _TILE_ROWS * np.outer(decode.sequences, attended)
        )
    decodes = np.concatenate([np.zeros((1, len(decode.kv_tokens))), decode_s])
    total = later[:, :, None, None] + decodes[None, None, :, :]
    return MixedGrid(_CHUNKS, _CONTEXTS, sequences, decode.kv_tokens, total)


def _in_tiles(placement: Placement, server: ServerVersion) -> bool:
    """Whether prompts and decoding sequences are attended to by one call of FlashAttention 2: vLLM
    since its V1 engine, with KV of 16 bits.
    """
    return (
        server.engine == "vllm"
        and version_numbers(server.version) >= (0, 8)
        and placement.gpu.flash_attention == 2
        and kv_dtype(placement.kv_dtype).bytes == SIXTEEN_BIT_BYTES
    )


def _chosen_s(kernel_times: Kernels, listed: Operators, placement: Placement) -> float:
    """Seconds in which a query of a prompt attends to the tokens that an indexer chose.

    Of a measured layer with the longest prompt, less what is computed apart here: projections,
    small kernels and scores of the indexer.
    """
    indexer, a = listed.indexer, listed.attention
    if indexer is None:
        return 0.0
    measured = kernel_times.sparse_context(a, placement.kv_dtype)
    if measured is None:
        return kernel_times.chosen_s(a, indexer)
    tokens, seconds = (column[-1:] for column in measured)
    beside = kernel_times.index_s(tokens, 0.5 * tokens**2, indexer)
    for gemm in listed.gemms:
        if gemm.name in _OF_ATTENTION or gemm.name.startswith("index_"):
            beside = beside + kernel_times.gemm_s(tokens, gemm.n, gemm.k, "bf16")
    for small in listed.small:
        if small.name.startswith(("index_", "latent_", "rotary_")):
            calls = small.calls / indexer.calls
            beside = beside + calls * kernel_times.small_s(small.bytes_per_token * tokens)
    return max(0.0, float((seconds - beside)[0] / tokens[0]))
