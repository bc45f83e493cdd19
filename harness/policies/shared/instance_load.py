"""How loaded an instance is, in the terms of the papers on split prefill and decode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from ...core.instance import Site
from ...core.state import Phase, RequestState


def waiting_tokens(site: Site, enough: float = math.inf) -> int:
    """Prompt tokens of all who wait there or are on their way; counting ends at `enough`."""
    tokens = 0
    waiting: Iterable[RequestState] = site.inbox
    if site.roster.n_waiting:
        waiting = itertools.chain(site.roster.waiting(), waiting)
    for r in waiting:
        if r.phase is Phase.WAITING:
            tokens += r.target_tokens
            if tokens >= enough:
                break
    return tokens


def queued_tokens(site: Site, enough: float = math.inf) -> int:
    """Prompt tokens that are still to be computed there; counting ends at `enough`."""
    unfilled = site.roster.unfilled_tokens if site.roster.n_prefilling else 0
    return unfilled + waiting_tokens(site, enough)


def decode_use(site: Site) -> float:
    """Share of the GPU's arithmetic that decoding takes (Eq. 4-22 and 4-23)."""
    n = site.roster.n_decoding
    if not n:
        return 0.0
    return n * site.sizes.s_per_token / site.step_time.step_s(n, site.decode_kv_tokens, ())


def decode_load(site: Site, promised_blocks: int) -> float:
    """U of an instance that decodes, those on their way and their promised blocks included."""
    sizes, ledger, n = site.sizes, site.ledger, site.n_requests
    free_blocks, kv_tokens = site.lengths()
    kv_tokens += promised_blocks * ledger.block_tokens
    compute = n * sizes.s_per_token / site.step_time.step_s(n, kv_tokens, ()) if n else 0.0
    kv_bytes = (ledger.total - free_blocks) * sizes.block_bytes
    promised_bytes = promised_blocks * sizes.block_bytes
    usable_bytes = sizes.usable_bytes
    return compute + (sizes.weight_bytes + kv_bytes) / usable_bytes + promised_bytes / usable_bytes


def memory_bytes(site: Site) -> float:
    """Weights and KV in use on each GPU of the instance (Eq. 4-19 and 4-21)."""
    used = site.ledger.total - site.free_blocks
    return site.sizes.weight_bytes + used * site.sizes.block_bytes


def memory_use(site: Site) -> float:
    """M / Mmax of Eq. 4-28."""
    return memory_bytes(site) / site.sizes.usable_bytes


def estimated(r: RequestState, site: Site, window_s: float) -> float:
    """What `r` adds to U = C/Cmax + M/Mmax: EstimateLoad of Algorithm 4-2."""
    sizes = site.sizes
    kv_bytes = site.ledger.blocks(r.prompt_tokens) * sizes.block_bytes
    return r.prompt_tokens * sizes.s_per_token / window_s + kv_bytes / sizes.usable_bytes


def compute_use(site: Site, window_s: float) -> float:
    """C / Cmax of Eq. 4-28: the share of the GPU's arithmetic in the next `window_s` seconds, if
    nobody else came: prompts that wait, and those who decode.
    """
    each_s = site.sizes.s_per_token
    prompts = queued_tokens(site, window_s / each_s) * each_s / window_s
    return min(1.0, prompts + decode_use(site))
