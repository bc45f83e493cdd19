"""Which idle model leaves a GPU first.

Source: Prism (see docs/papers.md), §6.2: eviction only where GPUs are short of memory, the largest
SLO first.
"""

from __future__ import annotations

from collections.abc import Iterable


def eviction_order(idle: Iterable[tuple[int, float, float, float]]) -> list[int]:
    """Models to evict, the first one first, from (model, SLO, idle time, its threshold).

    Those past their threshold by falling SLO; after them, for want of anything better, the others,
    the longest idle first: a request that has no memory at all is worse than one that waits for
    weights again.
    """
    ranked = sorted(
        (spell_s < threshold_s, -slo_s if spell_s >= threshold_s else -spell_s, model)
        for model, slo_s, spell_s, threshold_s in idle
    )
    return [model for _, _, model in ranked]
