"""S3's packing: within memory, never worse than first-fit on Eq. 2-2, best of all sorted cuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slo_bench.harness.policies.uellm.s3 import (
    NO_BUDGET_TOKENS,
    S3,
    BatchCapacity,
    Item,
    cut_sorted,
    first_fit,
    pack,
    padding_tokens,
)


def item(id_, output, prompt=10, reserved=None):
    return Item(id_, output, prompt, output if reserved is None else reserved)


def cases(n):
    rng = np.random.default_rng(3)
    for _ in range(n):
        room = BatchCapacity(
            int(rng.integers(1, 12)),
            int(rng.integers(4, 200)),
            int(rng.choice([1, 16])),
            int(rng.choice([100, 400, NO_BUDGET_TOKENS])),
        )
        requests = int(rng.integers(1, 30))
        outputs = np.maximum(1, rng.lognormal(4, 1.2, requests)).astype(int)
        prompts = np.maximum(1, rng.lognormal(3, 1, requests)).astype(int)
        more = rng.integers(0, 50, requests)
        yield (
            room,
            [
                item(i, int(o), int(p), int(o + m))
                for i, (o, p, m) in enumerate(zip(outputs, prompts, more, strict=True))
            ],
        )


def test_s3_fits_memory_and_is_never_worse_than_first_fit():
    better = 0
    for room, items in cases(1000):
        batches = pack(items, room)
        assert sorted(i.request for b in batches for i in b) == list(range(len(items)))
        for batch in batches:
            blocks = len(batch) * -(
                -(max(i.prompt_tokens for i in batch) + max(i.reserved_tokens for i in batch))
                // room.block_size
            )
            # What is too long even alone is the engine's to refuse.
            assert len(batch) == 1 or (blocks <= room.blocks and len(batch) <= room.max_batch)
            assert len(batch) == 1 or sum(i.output_tokens for i in batch) <= room.token_budget
        plain = padding_tokens(first_fit(items, room))
        assert padding_tokens(batches) <= plain
        better += padding_tokens(batches) < plain
    assert better > 400


def every_cut(items):
    n = len(items)
    for cuts in itertools.product((False, True), repeat=n - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield [items[a:b] for a, b in itertools.pairwise(bounds)]


def holds(room, batch):
    prompt_tokens = max(i.prompt_tokens for i in batch)
    reserved_tokens = max(i.reserved_tokens for i in batch)
    output_tokens = sum(i.output_tokens for i in batch)
    return room.holds(len(batch), prompt_tokens, reserved_tokens, output_tokens)


def test_s3_sorted_cut_is_the_best_by_brute_force():
    tried = 0
    for room, items in cases(200):
        if len(items) > 9:
            continue
        tried += 1
        items = sorted(items, key=lambda i: -i.output_tokens)
        fitting = (c for c in every_cut(items) if all(holds(room, batch) for batch in c))
        best = min((len(c), padding_tokens(c)) for c in fitting)
        batches = cut_sorted(items, room)
        assert (len(batches), padding_tokens(batches)) == best
    assert tried > 30


def test_padding_tokens_by_hand():
    batches = [[item(0, 8), item(1, 8)], [item(2, 58), item(3, 50), item(4, 1)]]
    assert padding_tokens(batches) == 0 + 8 + 57


def test_s3_token_budget_closes_batches_and_is_counted(serve, requests):
    # Sorted 8, 8, 16, 40: 8 + 8 + 16 = 32 fit together, 40 goes alone.
    workload = requests((0, 4, 40), (0, 4, 8), (0, 4, 16), (0, 4, 8))
    served = serve(workload, S3(first="shortest", token_budget=32))
    assert served.records.first_scheduled_s.tolist() == [16, 0, 0, 0]
    assert served.result.counts["closed_by_budget"] == 1
    assert "closed_by_budget" not in serve(workload, S3()).result.counts


def test_first_fit_by_hand():
    # Four blocks of 16 tokens; a batch of two may hold 32 tokens each, one of one anything.
    room = BatchCapacity(4, 4, 16)
    items = [item(0, 20), item(1, 100), item(2, 20), item(3, 6), item(4, 6)]
    ids = [[i.request for i in b] for b in first_fit(items, room)]
    assert ids == [[0, 2], [1], [3, 4]]


@pytest.mark.parametrize("first", ["oldest", "shortest"])
def test_s3_first_parameter_picks_the_first_batch(first, serve, requests):
    workload = requests((0, 4, 50), (0, 4, 2), (0, 4, 3), (0, 4, 51))
    records = serve(workload, S3(max_batch=2, first=first)).records
    long_s, short_s = records.first_scheduled_s[[0, 1]]
    assert records.first_scheduled_s.tolist() == [long_s, short_s, short_s, long_s]
    assert (long_s < short_s) == (first == "oldest")
