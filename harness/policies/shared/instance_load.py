"""How loaded an instance is, in the terms of the papers on split prefill and decode."""

from __future__ import annotations

from ...core.instance import Instance
from ...core.state import RequestState


def queued_tokens(instance: Instance) -> int:
    """Prompt tokens that are still to be computed there."""
    snapshot = instance.snapshot
    unfilled = snapshot.remaining_prefill_tokens if snapshot.n_prefilling else 0
    return unfilled + instance.waiting_tokens


def decode_use(instance: Instance) -> float:
    """Share of the GPU's arithmetic that decoding takes (Eq. 4-22 and 4-23)."""
    n = instance.snapshot.n_decoding
    if not n:
        return 0.0
    step_s = instance.step_time.step_s(n, instance.decode_kv_tokens, ())
    return n * instance.sizes.s_per_token / step_s


def decode_load(instance: Instance, promised_blocks: int) -> float:
    """U of an instance that decodes, those on their way and their promised blocks included."""
    sizes, kv_manager, n = instance.sizes, instance.kv_manager, instance.n_requests
    free_blocks, kv_tokens = instance.lengths()
    kv_tokens += promised_blocks * kv_manager.block_size
    compute = n * sizes.s_per_token / instance.step_time.step_s(n, kv_tokens, ()) if n else 0.0
    kv_bytes = (kv_manager.total - free_blocks) * sizes.block_bytes
    promised_bytes = promised_blocks * sizes.block_bytes
    usable_bytes = sizes.usable_bytes
    return compute + (sizes.weight_bytes + kv_bytes) / usable_bytes + promised_bytes / usable_bytes


def memory_use(instance: Instance) -> float:
    """M / Mmax of Eq. 4-28: weights and KV in use on each GPU (Eq. 4-19 and 4-21)."""
    sizes, used = instance.sizes, instance.kv_manager.total - instance.free_blocks
    return (sizes.weight_bytes + used * sizes.block_bytes) / sizes.usable_bytes


def estimated(r: RequestState, instance: Instance, window_s: float) -> float:
    """What `r` adds to U = C/Cmax + M/Mmax: EstimateLoad of Algorithm 4-2."""
    sizes = instance.sizes
    kv_bytes = instance.kv_manager.blocks(r.prompt_tokens) * sizes.block_bytes
    return r.prompt_tokens * sizes.s_per_token / window_s + kv_bytes / sizes.usable_bytes


def compute_use(instance: Instance, window_s: float) -> float:
    """C / Cmax of Eq. 4-28: the share of the GPU's arithmetic in the next `window_s` seconds
    without new arrivals: waiting prompts and decodes.
    """
    prompts = queued_tokens(instance) * instance.sizes.s_per_token / window_s
    return min(1.0, prompts + decode_use(instance))


def ends_in_s(r: RequestState, instance: Instance, answer_tokens: int) -> float:
    """Predicted seconds until an answer of `answer_tokens` to `r` would end at `instance`: the
    prompts that wait there and its own, then so many steps of the batch that it joins.
    """
    prompts_s = (queued_tokens(instance) + r.prompt_tokens) * instance.sizes.s_per_token
    seqs = instance.n_requests + 1
    kv_tokens = instance.decode_kv_tokens + r.prompt_tokens
    return prompts_s + answer_tokens * instance.step_time.step_s(seqs, kv_tokens, ())
