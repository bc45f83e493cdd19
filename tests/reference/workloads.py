"""Random workloads for comparisons of an engine with the reference, and the comparison."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import Records
from slo_bench.workloads.workload import Workload


def one_prefix() -> Workload:
    """A prompt of 640 tokens, and later the same twice at once."""
    return Workload(
        arrival_s=np.array([0.0, 5.0, 5.0]),
        prompt_tokens=np.full(3, 640),
        output_tokens=np.full(3, 2),
        prefix_blocks=[tuple(range(40))] * 3,
        prefix_block_size=16,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rate = draw(st.sampled_from([2.0, 10.0, 40.0, 1000.0]))
    longest = draw(st.sampled_from([30, 200, 600]))
    prompts = rng.integers(1, longest, n)
    outputs = rng.integers(1, draw(st.sampled_from([3, 60, 300])), n)
    follows = np.full(n, -1)
    prefixes = None
    if draw(st.booleans()):
        # Conversations: each request continues one of the last few, sharing its whole context.
        prefixes = []
        for row in range(n):
            parent = int(rng.integers(max(0, row - 6), row)) if row and rng.random() < 0.6 else -1
            shared = prefixes[parent] if parent >= 0 else ()
            prompts[row] = min(longest, len(shared) * 16 + prompts[row] % 40 + 1)
            blocks = (prompts[row] + outputs[row]) // 16
            fresh = tuple(int(h) for h in rng.integers(1, 2**62, blocks))
            prefixes.append((*shared[:blocks], *fresh[len(shared) :]))
            if parent >= 0 and rng.random() < 0.5:
                follows[row] = parent
    return Workload(
        np.cumsum(rng.exponential(1 / rate, n)),
        prompts,
        outputs,
        max_output_tokens=outputs + rng.integers(0, 40, n),
        ttft_slo_s=rng.uniform(0.05, 3, n),
        follows=follows,
        think_s=rng.uniform(0, 2, n),
        prefix_blocks=prefixes,
        concurrency=draw(st.sampled_from([None, None, None, 3])) if prefixes is None else None,
    )


def assert_same(a: Records, b: Records) -> None:
    for field in dataclasses.fields(Records):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name.endswith("_s"):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9, err_msg=field.name)
        else:
            np.testing.assert_array_equal(x, y, err_msg=field.name)
