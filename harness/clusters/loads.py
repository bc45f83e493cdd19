"""How loaded an instance is, in the terms of the papers on split prefill and decode."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ..core.state import Phase, RequestState
from .routers import load

if TYPE_CHECKING:
    from .site import Site

_FULL_TOKENS = 2048  # of a prefill that keeps a GPU's arithmetic busy


def s_per_token(site: Site) -> float:
    """Compute time of a token where the GPU's arithmetic is the limit (C_l of Eq. 4-20)."""
    return site.step_time.step_s(0, 0, ((0, _FULL_TOKENS),)) / _FULL_TOKENS


def waiting_tokens(site: Site, enough: float = math.inf) -> int:
    """Prompt tokens of all who wait there or are on their way; counting ends at `enough`."""
    tokens = 0
    for r in itertools.chain(site.view.waiting(), site.instance.inbox):
        if r.phase is Phase.WAITING:
            tokens += r.target_tokens
            if tokens >= enough:
                break
    return tokens


def queued_tokens(site: Site, enough: float = math.inf) -> int:
    """Prompt tokens that are still to be computed there; counting ends at `enough`."""
    return site.view.unfilled_tokens + waiting_tokens(site, enough)


def decode_use(site: Site) -> float:
    """Share of the GPU's arithmetic that decoding takes (Eq. 4-22 and 4-23)."""
    view = site.view
    n = view.n_decoding
    if not n:
        return 0.0
    return n * s_per_token(site) / site.step_time.step_s(n, view.decode_kv_tokens, ())


def decode_load(site: Site, promised_blocks: int) -> float:
    """U of an instance that decodes, those on their way and their promised blocks included."""
    place, view, n = site.placement, site.view, load(site)
    kv_tokens = view.decode_kv_tokens + promised_blocks * place.block_tokens
    compute = n * s_per_token(site) / site.step_time.step_s(n, kv_tokens, ()) if n else 0.0
    promised_bytes = promised_blocks * place.block_bytes_per_gpu
    return compute + memory_use(site) + promised_bytes / place.usable_bytes_per_gpu


def memory_bytes(site: Site) -> float:
    """Weights and KV in use on each GPU of the instance (Eq. 4-19 and 4-21)."""
    place, view = site.placement, site.view
    used = site.instance.ledger.total - view.free_blocks
    return place.weight_bytes_per_gpu + used * place.block_bytes_per_gpu


def memory_use(site: Site) -> float:
    """M / Mmax of Eq. 4-28."""
    return memory_bytes(site) / site.placement.usable_bytes_per_gpu


def estimated(r: RequestState, site: Site, window_s: float) -> float:
    """What `r` adds to U = C/Cmax + M/Mmax: EstimateLoad of Algorithm 4-2."""
    place = site.placement
    kv_bytes = site.instance.ledger.blocks(r.prompt_tokens) * place.block_bytes_per_gpu
    return r.prompt_tokens * s_per_token(site) / window_s + kv_bytes / place.usable_bytes_per_gpu


def compute_use(site: Site, window_s: float) -> float:
    """C / Cmax of Eq. 4-28: the share of the GPU's arithmetic in the next `window_s` seconds, if
    nobody else came: prompts that wait, and those who decode.
    """
    each_s = s_per_token(site)
    prompts = queued_tokens(site, window_s / each_s) * each_s / window_s
    return min(1.0, prompts + decode_use(site))
