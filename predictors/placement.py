"""A model on GPUs and pipeline stages: whether it fits, KV blocks that it leaves, bytes moved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..workloads.errors import SloBenchError
from .dtypes import AUTO, kv_dtype, weight_dtype
from .server_memory import ANY, MemoryParts, server_memory
from .specs import GIB, GpuSpec, LinkSpec, ModelSpec, link

DEFAULT_HOST_MEMORY_BYTES = 4 * GIB
OVERHEAD_BYTES = GIB  # of CUDA and workspaces on one GPU
ACTIVATION_BYTES = 2
LEAST_KV_TOKENS = 2048
TP_DEGREES = (1, 2, 4, 8)
_FROM_ONE = ("tp", "pp", "ep", "dp", "block_size", "batched_tokens", "sampled_sequences")
_FROM_ZERO = ("host_memory_bytes", "beside_bytes", "fixed_num_cpu_blocks")
_LEAST = dict.fromkeys((*_FROM_ONE, "fixed_num_gpu_blocks"), 1) | dict.fromkeys(_FROM_ZERO, 0)


@dataclass(frozen=True)
class Placement:
    """One instance: a model on `dp * tp * pp` GPUs of one kind.

    Each holds an equal share of the layers. With `dp` above 1 attention and dense layers are
    copied to `dp` ranks of `tp` GPUs, each with requests and KV of its own; all ranks share out the
    experts and take every step together. Blocks, token budget and sequences are those of all ranks,
    over which requests are spread evenly.

    `split` gives the pipeline stages one by one instead, each on one GPU of its own kind (tp is 1,
    and `gpu` that of the first stage). `fixed_lanes` says how many batches are in flight; by
    default as many as there are stages, while an eager loop over mapped layers has one.

    `memory_share` of each GPU's memory is for serving. From it go the weights, then a reserve for
    what a forward pass needs, as servers of the kind `server` (and `server_version`) take it: CUDA,
    NCCL and workspaces, the activations of `batched_tokens` tokens and logits of
    `sampled_sequences` sequences.
    What is left holds KV blocks of `block_size` tokens, unless `fixed_num_gpu_blocks` says how many
    of them are used, as vLLM's `--num-gpu-blocks-override` does; so does `fixed_num_cpu_blocks` for
    swapped KV in place of what `host_memory_bytes` would hold. Both count for the whole instance.
    `beside_bytes` of each GPU hold the weights of another model. `weight_dtype` and `kv_dtype`
    `auto` become the formats of the model's checkpoint.

    Experts are held whole by `ep` groups of GPUs, each sharing them out to its `dp * tp / ep`
    GPUs. `expert_skew` is the exponent of the power law by which tokens choose them (0: balanced).

    KV of prefixes is also kept in `kv_offload_gib` of host memory and `kv_disk_gib` of a disk, for
    the whole instance.
    """

    model: ModelSpec
    gpu: GpuSpec
    tp: int = 1
    pp: int = 1
    weight_dtype: str = AUTO
    kv_dtype: str = AUTO
    memory_share: float = 0.9
    block_size: int = 16
    host_memory_bytes: int = DEFAULT_HOST_MEMORY_BYTES  # for swapped KV, per GPU
    batched_tokens: int = 8192
    sampled_sequences: int = 256
    fixed_num_gpu_blocks: int | None = None
    fixed_num_cpu_blocks: int | None = None
    beside_bytes: int = 0
    split: tuple[PipelineStage, ...] = ()
    fixed_lanes: int | None = None
    ep: int = 1
    expert_skew: float = 0.0
    dp: int = 1
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    server: str = ANY
    server_version: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_dtype", self.model.dtype_of(self.weight_dtype))
        object.__setattr__(self, "kv_dtype", self.model.kv_dtype_of(self.kv_dtype))
        weight_dtype(self.weight_dtype)
        kv_dtype(self.kv_dtype)
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                shown = name.removeprefix("fixed_")
                raise SloBenchError(f"{shown} must be at least {low} but is {value}")
        if not 0 < self.memory_share <= 1:
            raise SloBenchError(
                f"memory_share must be above 0 and at most 1 but is {self.memory_share}"
            )
        if not 1 <= self.lanes <= self.pp:
            raise SloBenchError(f"lanes must be 1 to {self.pp} (the stages) but is {self.lanes}")
        if not 0 <= self.expert_skew < math.inf:
            raise SloBenchError(f"expert_skew must be at least 0 but is {self.expert_skew}")
        self._check_experts()
        if self.split:
            self._check_split()

    def _check_experts(self) -> None:
        name, experts = self.model.name, self.model.experts
        if experts is None:
            if self.ep > 1 or self.expert_skew or self.dp > 1:
                raise SloBenchError(
                    f"{name} has no experts; leave ep, dp and expert_skew out (instances are "
                    "copies of a whole model)"
                )
        elif self.expert_gpus % self.ep or experts.routed % self.ep:
            shared = f"tp {self.tp}" + (f" × dp {self.dp}" if self.dp > 1 else "")
            raise SloBenchError(
                f"ep {self.ep} must divide {shared} and the {experts.routed} experts of {name}"
            )

    @property
    def expert_gpus(self) -> int:
        """GPUs over which the experts of a layer are shared out."""
        return self.tp * self.dp

    def _check_split(self) -> None:
        mapped = sum(stage.layers for stage in self.split)
        if min(stage.layers for stage in self.split) < 1:
            raise SloBenchError("a stage must hold at least 1 layer; leave empty ones out")
        if mapped != self.model.layers:
            raise SloBenchError(
                f"the stages hold {mapped} layers but {self.model.name} has {self.model.layers}"
            )
        if self.pp != len(self.split) or self.tp != 1:
            raise SloBenchError(
                f"{len(self.split)} stages of their own need pp {len(self.split)} and tp 1, "
                f"not pp {self.pp} and tp {self.tp}"
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs of the instance."""
        return self.dp * self.tp * self.pp

    @property
    def lanes(self) -> int:
        """Number of batches in flight."""
        return self.pp if self.fixed_lanes is None else self.fixed_lanes

    @cached_property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The pipeline stages in order; where layers do not divide, the first hold one more."""
        if self.split:
            return self.split
        layers = even_layers(self.model.layers, self.pp)
        peer = self.peer_link
        return tuple(PipelineStage(self.gpu, n, peer) for n in layers)

    @property
    def host_link(self) -> LinkSpec:
        """Between each GPU and its host's memory."""
        return link(self.gpu.host_link)

    @property
    def peer_link(self) -> LinkSpec:
        """Between two GPUs of the instance."""
        return link(self.gpu.peer_link)

    @property
    def kv_heads_per_gpu(self) -> int:
        """KV heads on each GPU of a tensor-parallel group; with tp above kv_heads, copies."""
        return -(-self.model.kv_heads // self.tp)

    @property
    def stage_layers(self) -> int:
        """Layers of the longest pipeline stage."""
        return max(stage.layers for stage in self.stages)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token on all GPUs of the instance together, copies included."""
        if self.model.kind == "encoder":
            return 0
        return self._kv_copies(self.model.kv_bytes_per_token(self.kv_dtype))

    def _kv_copies(self, kv_bytes: int) -> int:
        """KV bytes on all GPUs of the instance, of the model's own `kv_bytes`."""
        return kv_bytes * self.kv_heads_per_gpu * self.tp // self.model.kv_heads

    @cached_property
    def weight_bytes_per_gpu(self) -> int:
        """Weight bytes on the fullest GPU."""
        return max(map(self._stage_weight_bytes, range(self.pp)))

    def _stage_weight_bytes(self, stage: int) -> int:
        """On each GPU of a stage: its layers, and a vocabulary table on the first and the last.

        With pp = 1 all weights split over tp, routed experts over all ranks.
        """
        spared = self.model.routed_weight_bytes(self.weight_dtype) * (1 - 1 / self.dp)
        if self.pp == 1:
            return -(-(self.model.weight_bytes(self.weight_dtype) - round(spared)) // self.tp)
        held = self.stages[stage].layers * self.layer_weight_bytes
        held -= round(spared * self.stages[stage].layers / self.model.layers)
        if stage in (0, self.pp - 1):
            width = max(2.0, weight_dtype(self.weight_dtype).bytes)
            return round((held + self.model.embedding_parameters * width) / self.tp)
        return round(held / self.tp)

    @cached_property
    def reserve_bytes_per_gpu(self) -> int:
        """What a forward pass takes besides weights and KV, on each GPU (see the class)."""
        slots = self.state_slots
        held = self.sampled_sequences if slots is None else slots / self.dp
        return self.memory_parts.total + round(held * self._held_bytes)

    @property
    def _held_bytes(self) -> float:
        """Bytes that are set aside on each GPU for one sequence: its windows and its states."""
        model = self.model
        windows = self._kv_copies(model.window_bytes(self.kv_dtype)) / self.tp
        return windows + model.state_bytes / self.tp

    @cached_property
    def state_slots(self) -> int | None:
        """Sequences of the instance for whose states there is room: `sampled_sequences` of each
        rank, but no more than half of what weights and reserve leave would hold. None: the model's
        layers keep no states.

        vLLM takes states and KV from one pool, SGLang splits the pool nearly in halves
        (`--mamba-full-memory-ratio`).
        """
        if not self.model.state_bytes:
            return None
        occupied_bytes = self.weight_bytes_per_gpu + self.memory_parts.total
        room = max(0, self.usable_bytes_per_gpu - occupied_bytes - self.beside_bytes)
        return min(self.sampled_sequences, int(room / 2 / self._held_bytes)) * self.dp

    @cached_property
    def memory_parts(self) -> MemoryParts:
        """What the server takes of each GPU beside weights, KV and states."""
        row = server_memory(self.server, self.server_version)
        return row.parts(self.model, self.tp, self.batched_tokens, self.sampled_sequences)

    @cached_property
    def usable_bytes_per_gpu(self) -> int:
        """Bytes of a GPU's memory in `memory_share`."""
        return int(self.gpu.memory_bytes * self.memory_share)

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of `block_size` tokens: those fixed, else all that fit."""
        return (
            self.fitting_num_gpu_blocks
            if self.fixed_num_gpu_blocks is None
            else self.fixed_num_gpu_blocks
        )

    @cached_property
    def fitting_num_gpu_blocks(self) -> int:
        """Blocks of `block_size` tokens that fit in addition to the weights; 0 if no memory is
        left. The stage with the least room for its layers' KV decides.
        """
        return max(0, min(map(self._stage_blocks, range(self.pp))))

    def _stage_blocks(self, stage: int) -> int:
        held = self.stages[stage]
        usable = int(held.gpu.memory_bytes * self.memory_share)
        occupied_bytes = (
            self._stage_weight_bytes(stage) + self.reserve_bytes_per_gpu + self.beside_bytes
        )
        return (usable - occupied_bytes) // self._block_bytes(held.layers) * self.dp

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV blocks."""
        return self.num_gpu_blocks * self.block_size

    @cached_property
    def num_cpu_blocks(self) -> int:
        """Blocks of swapped KV: those fixed, else what fits into the host memory set aside."""
        if self.fixed_num_cpu_blocks is not None:
            return self.fixed_num_cpu_blocks
        return self.host_memory_bytes // self.block_bytes_per_gpu * self.dp

    @cached_property
    def swap_s_per_block(self) -> float:
        """Seconds to move one block over the host links, every GPU its own part at once.

        Without the latency of starting a transfer.
        """
        return self.block_bytes_per_gpu / self.host_link.bandwidth_bytes_per_s

    @cached_property
    def layer_weight_bytes(self) -> int:
        """Bytes of one layer's weights, of all `tp` GPUs together."""
        return self.model.layer_weight_bytes(self.weight_dtype)

    @cached_property
    def block_bytes_per_gpu(self) -> int:
        """Bytes of one KV block on the fullest GPU."""
        return self._block_bytes(self.stage_layers)

    def _block_bytes(self, layers: int) -> int:
        of_model = self.kv_bytes_per_token // self.tp * self.block_size
        return max(1, of_model * layers // self.model.layers)

    def check(self) -> None:
        """Raise `SloBenchError` unless the split is possible and everything fits.

        Everything: weights, reserve, and the fixed KV blocks, or else KV for 2,048 tokens (or the
        context, if shorter).
        """
        self.check_tp()
        if self.pp > self.model.layers:
            raise SloBenchError(
                f"{self.model.name} has {self.model.layers} layers, fewer than pp {self.pp} stages"
            )
        if not self.fits:
            raise SloBenchError(self._too_small())

    def check_tp(self) -> None:
        """Raise `SloBenchError` unless heads can be split over the GPUs of a group."""
        model = self.model
        if model.heads % self.tp:
            raise SloBenchError(
                f"{model.name} has {model.heads} attention heads, not divisible by tp {self.tp}"
            )
        linear = model.linear
        if linear is None or linear.kind == "convolution":
            return
        copied = linear.kind == "mamba2" and linear.key_heads == 1  # to all GPUs, as vLLM does
        heads = linear.value_heads if copied else linear.key_heads
        if heads % self.tp:
            raise SloBenchError(
                f"{model.name} has {heads} key heads of linear attention, not divisible by tp "
                f"{self.tp}"
            )

    @property
    def fits(self) -> bool:
        """Whether there is room for weights, reserve and the least KV that `check` asks for."""
        if self.model.kind == "encoder":
            needed = self.weight_bytes_per_gpu + self.reserve_bytes_per_gpu + self.beside_bytes
            return needed <= self.usable_bytes_per_gpu
        if self.fixed_num_gpu_blocks is not None:
            return self.fitting_num_gpu_blocks >= self.fixed_num_gpu_blocks
        return self.kv_tokens >= min(LEAST_KV_TOKENS, self.model.context_tokens)

    def _too_small(self) -> str:
        if self.split:
            return self._too_small_split()
        weights_gb = self.model.weight_bytes(self.weight_dtype) / 1e9
        offered_gb = self.usable_bytes_per_gpu * self.gpus / 1e9
        reserve_gb = self.reserve_bytes_per_gpu * self.gpus / 1e9
        where = f"{self.gpu.name} × tp {self.tp}" + "".join(
            f" × {name} {count}" for name, count in (("pp", self.pp), ("dp", self.dp)) if count > 1
        )
        beside_gb = self.beside_bytes * self.gpus / 1e9
        beside = f", {beside_gb:.1f} GB of another model's weights" if beside_gb else ""
        problem = (
            f"{self.model.name} needs {weights_gb:.1f} GB of weights, {reserve_gb:.1f} GB of "
            f"workspace{beside} and room for KV; {where} offers {offered_gb:.1f} GB"
        )
        if self.fixed_num_gpu_blocks is not None and self.fitting_num_gpu_blocks:
            problem = (
                f"{self.fixed_num_gpu_blocks:,} KV blocks of {self.block_size} tokens do not fit "
                f"beside {self.model.name} on {where}: at most {self.fitting_num_gpu_blocks:,} do"
            )
        for tp in tp_degrees(self.model):
            if tp > self.tp and replace(self, tp=tp).fits:
                return f"{problem}; use tp {tp} or more"
        return f"{problem}; use a larger GPU, smaller weights (weight_dtype) or pp above {self.pp}"

    def _too_small_split(self) -> str:
        fewest = min(range(self.pp), key=self._stage_blocks)
        stage = self.split[fewest]
        return (
            f"{stage.layers} layers of {self.model.name} and their KV do not fit on stage {fewest} "
            f"({stage.gpu.name}); give it fewer"
        )


def tp_degrees(model: ModelSpec) -> list[int]:
    """Those of `TP_DEGREES` on which servers start the model."""
    return [tp for tp in TP_DEGREES if model.heads % tp == 0 and uneven_kv_heads(model, tp) is None]


def uneven_kv_heads(model: ModelSpec, tp: int) -> str | None:
    """Why servers refuse `tp` for a model's KV heads, and with what it is simulated; else None."""
    if model.kv_heads % tp == 0 or tp % model.kv_heads == 0:
        return None
    return (
        f"{model.name} has {model.kv_heads} KV heads, which tp {tp} does not divide: vLLM and "
        f"SGLang refuse it; simulated with {-(-model.kv_heads // tp)} on each GPU"
    )


def smallest_tp(
    model: ModelSpec,
    gpu: GpuSpec,
    pp: int = 1,
    weight_dtype: str = AUTO,
    kv_dtype: str = AUTO,
    memory_share: float = 0.9,
    dp: int = 1,
) -> int:
    """The smallest tensor-parallel degree (1, 2, 4, 8) on which the model fits.

    Raises:
        SloBenchError: it does not fit even on the largest.
    """
    base = Placement(
        model,
        gpu,
        pp=pp,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        memory_share=memory_share,
        dp=dp,
    )
    degrees = tp_degrees(model)
    for tp in degrees:
        if replace(base, tp=tp).fits:
            return tp
    replace(base, tp=degrees[-1]).check()
    raise AssertionError("check() accepts what does not fit")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Contiguous layers on one GPU, and the link to the stage after it (None: none follows).

    Each layer takes `layer_extra_s` longer than the step-time model says, as measured there.
    """

    gpu: GpuSpec
    layers: int
    link: LinkSpec | None = None
    layer_extra_s: float = 0.0


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each of `stages` stages, as even as can be; the first hold one more."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))
