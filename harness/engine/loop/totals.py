"""Timeline and sums of the instances that served one cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.records import Records, Timeline, Totals
from .instance import EngineInstance
from .measures import summed


def timeline_of(instances: Sequence[EngineInstance]) -> Timeline:
    """Sums over all instances; an instance is empty from the end of its work on."""
    total = sum(i.kv_manager.total for i in instances)
    times, sums = summed([*i.measures.samples, (i.now_s, 0, 0, 0)] for i in instances)
    return Timeline(times, sums[0], sums[1], sums[2] / total)


def totals_of(instances: Sequence[EngineInstance], records: Records) -> Totals:
    """Sums over all instances; GPU time is left unknown (NaN)."""
    measures = [i.measures for i in instances]
    blocks = sum(i.kv_manager.total for i in instances)
    finish_s = records.finish_s
    makespan_s = float(np.nanmax(finish_s)) if np.isfinite(finish_s).any() else 0.0
    block_s = makespan_s * blocks
    return Totals(
        makespan_s=makespan_s,
        busy_s=sum(i.now_s - i.measures.idle_s for i in instances),
        steps=sum(m.steps for m in measures),
        prefill_tokens=sum(m.prefill_tokens for m in measures),
        decode_tokens=sum(m.decode_tokens for m in measures),
        padded_tokens=sum(m.padded_tokens for m in measures),
        kv_cache_usage_peak=sum(m.kv_peak for m in measures) / blocks if blocks else 0.0,
        kv_cache_usage_mean=sum(m.kv_block_s for m in measures) / block_s if block_s else 0.0,
    )
