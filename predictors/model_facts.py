"""How a model was read, and what fits of it on a GPU: plain values for tables and JSON."""

from __future__ import annotations

from typing import Any

from .dtypes import kv_dtype
from .model_spec import ModelSpec
from .placement import Placement
from .server_memory import server_memory
from .specs import GpuSpec

_RECURRENCES = {
    "gated-delta": "gated delta rule",
    "mamba2": "state space (Mamba 2)",
    "kda": "Kimi delta attention",
    "lightning": "lightning attention",
    "convolution": "short convolution",
}


def layers_by_kind(spec: ModelSpec) -> dict[str, int]:
    """Number of layers with each kind of mixer and of MLP; a layer counts for all that it has."""
    window = spec.window
    sliding = window.layers if window else 0
    full = spec.attention_layers - sliding
    kinds = {"latent attention" if spec.latent else "full attention": full}
    if window is not None:
        kinds[f"sliding window ({window.tokens:,} tokens)"] = sliding
    if spec.linear is not None:
        kinds[_RECURRENCES[spec.linear.kind]] = spec.linear.layers
    if spec.sparse is not None:
        kinds[f"indexer (chooses {spec.sparse.tokens:,} tokens)"] = spec.sparse_layers
    if spec.experts is not None:
        experts = spec.experts
        shared = ", and a shared one" if experts.shared_intermediate else ""
        kinds[f"experts ({experts.per_token} of {experts.routed}{shared})"] = spec.expert_layers
    kinds["dense MLP"] = spec.mlp_layers - spec.expert_layers
    return {kind: count for kind, count in kinds.items() if count}


def kv_bytes_by_kind(spec: ModelSpec, dtype: str) -> dict[str, int]:
    """KV bytes that one more token leaves in all layers of each kind, however long its window."""
    if spec.kind == "encoder":
        return {}
    each = spec.layer_kv_elements * kv_dtype(dtype).bytes
    sliding = spec.window.layers if spec.window else 0
    kinds = {"latent attention" if spec.latent else "full attention": spec.attention_layers}
    if spec.window is not None:
        kinds = {"full attention": spec.attention_layers - sliding, "sliding window": sliding}
    byte_counts = {kind: round(count * each) for kind, count in kinds.items() if count}
    if spec.sparse is not None:
        byte_counts["indexer"] = spec.sparse_layers * spec.sparse.key_bytes
    return byte_counts


def prefix_block_tokens(spec: ModelSpec, dtype: str) -> int | None:
    """Tokens of a block of vLLM's prefix cache where layers keep a state: as many as take what one
    layer's state takes, in multiples of 16; None: blocks are as small as in other models.
    """
    if not spec.state_bytes or spec.linear is None:
        return None
    each = spec.layer_kv_elements * kv_dtype(dtype).bytes
    return 16 * -(-spec.linear.state_bytes // round(16 * each))


def model_facts(spec: ModelSpec, kv: str) -> dict[str, Any]:
    """The model as it was read, with KV of the format `kv`."""
    return {
        "model": spec.name,
        "family": spec.family,
        "origin": spec.origin,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "image_encoder_parameters": spec.image_encoder_parameters,
        "layers": spec.layers,
        "layers_by_kind": layers_by_kind(spec),
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab": spec.vocab,
        "context_tokens": spec.context_tokens,
        "tied_embeddings": spec.tied_embeddings,
        "checkpoint_dtype": spec.checkpoint_dtype,
        "checkpoint_kv_dtype": spec.checkpoint_kv_dtype,
        "kv_dtype": kv,
        "kv_bytes_per_token": sum(kv_bytes_by_kind(spec, kv).values()),
        "kv_bytes_per_token_by_kind": kv_bytes_by_kind(spec, kv),
        "state_bytes_per_sequence": spec.state_bytes,
        "prefix_block_tokens": prefix_block_tokens(spec, kv),
    }


def placed_as_served(
    spec: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    weights: str,
    kv: str,
    memory_share: float,
    server: str,
    version: str,
) -> Placement:
    """The model on `tp` GPUs with the steps of a server that is told nothing else."""
    row = server_memory(server, version)
    large = row.is_large(gpu.name, gpu.memory_bytes)
    return Placement(
        spec,
        gpu,
        tp=tp,
        weight_dtype=weights,
        kv_dtype=kv,
        memory_share=memory_share,
        batched_tokens=row.tokens_large if large else row.tokens,
        sampled_sequences=row.sequences_large if large else row.sequences,
        server=server,
        server_version=version,
    )


def memory_facts(place: Placement) -> dict[str, Any]:
    """What each GPU of a placement holds, in bytes, and how many tokens of KV are left."""
    parts, row = place.memory_parts, server_memory(place.server, place.server_version)
    held = place.weight_bytes_per_gpu + place.reserve_bytes_per_gpu
    tokens = place.kv_tokens if place.model.kind == "decoder" else None
    return {
        "gpu": place.gpu.name,
        "tp": place.tp,
        "server": f"{row.server} {row.version}".removesuffix(" 0"),  # 0: any version
        "memory_share": place.memory_share,
        "weight_dtype": place.weight_dtype,
        "batched_tokens": place.batched_tokens,
        "sequences": place.sampled_sequences,
        "usable_bytes": place.usable_bytes_per_gpu,
        "weight_bytes": place.weight_bytes_per_gpu,
        "activation_bytes": parts.activations,
        "buffer_bytes": parts.outside,
        "state_bytes": place.reserve_bytes_per_gpu - parts.total,
        "state_sequences": place.state_slots,
        "kv_bytes": place.usable_bytes_per_gpu - held,
        "fits": place.fits,
        "kv_tokens": tokens,
        "longest_context_tokens": min(tokens or 0, place.model.context_tokens),
        "memory_source": row.origin,
    }
