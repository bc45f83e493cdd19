"""KV blocks: counted, shared by prefix, kept while idle, lost oldest first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slo_bench.harness.core.kv_cache_manager import BlockLedger
from slo_bench.harness.core.state import RequestState
from slo_bench.workloads.request import Slo


def request(prompt: int, *hashes: int) -> RequestState:
    return RequestState(0, 0.0, prompt, 8, 8, Slo(), prefix_blocks=hashes)


def compute(ledger: BlockLedger, r: RequestState, tokens: int) -> None:
    """What an engine does: blocks are taken, the KV is written, full units are published."""
    blocks = ledger.blocks(tokens)
    ledger.free -= blocks - r.blocks
    r.blocks, r.kv_tokens = blocks, tokens
    ledger.evict()
    ledger.publish(r, tokens)


def served(ledger: BlockLedger, r: RequestState) -> None:
    compute(ledger, r, r.prompt_tokens)
    ledger.release(r)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_round_up(tokens, blocks):
    assert BlockLedger(10).blocks(tokens) == blocks


def test_without_a_cache_nothing_is_kept():
    ledger = BlockLedger(10)
    r = request(40, 1, 2)
    ledger.free -= 3
    r.blocks = 3
    ledger.release(r)
    assert (ledger.free, ledger.idle_blocks, r.blocks) == (10, 0, 0)
    assert ledger.match_units(request(40, 1, 2)) == 0


def test_a_released_prefix_is_found_again():
    ledger = BlockLedger(10, prefix_block_tokens=16)
    served(ledger, request(40, 1, 2))
    assert (ledger.free, ledger.idle_blocks) == (10, 2)  # free, and still worth something
    same, other, longer = request(40, 1, 2), request(40, 1, 3), request(90, 1, 2, 3, 4)
    assert [ledger.match_units(r) for r in (same, other, longer)] == [2, 1, 2]
    assert ledger.match_units(request(40, 7, 2)) == 0  # a prefix begins at the beginning


@pytest.mark.parametrize(("prompt", "units"), [(16, 0), (17, 1), (32, 1), (33, 2), (100, 2)])
def test_the_last_token_is_always_computed(prompt, units):
    ledger = BlockLedger(10, prefix_block_tokens=16)
    served(ledger, request(40, 1, 2))
    assert ledger.match_units(request(prompt, 1, 2)) == units


def test_taking_a_match_takes_idle_blocks_once():
    ledger = BlockLedger(10, prefix_block_tokens=16)
    served(ledger, request(40, 1, 2))
    first, second = request(40, 1, 2), request(40, 1, 2)
    assert ledger.idle_in_match(first, 2) == 2
    ledger.take_match(first, 2)
    assert (first.kv_tokens, first.blocks, ledger.free, ledger.idle_blocks) == (32, 2, 8, 0)
    assert ledger.idle_in_match(second, 2) == 0
    ledger.take_match(second, 2)
    assert ledger.free == 8  # shared
    assert ledger.refs == {1: 2, 2: 2}
    ledger.release(first)
    assert (ledger.free, ledger.idle_blocks) == (8, 0)  # still held by the second
    ledger.release(second)
    assert (ledger.free, ledger.idle_blocks) == (10, 2)


def test_who_computes_the_same_at_the_same_time_keeps_a_private_copy():
    ledger = BlockLedger(10, prefix_block_tokens=16)
    first, second = request(40, 1, 2), request(40, 1, 2)
    compute(ledger, first, 20)
    compute(ledger, second, 40)
    compute(ledger, first, 40)
    assert (first.shared, second.shared) == ([1, 2], [])
    assert ledger.refs == {1: 1, 2: 1}
    ledger.release(second)
    assert (ledger.free, ledger.idle_blocks) == (7, 0)
    ledger.release(first)
    assert (ledger.free, ledger.idle_blocks) == (10, 2)


def test_publishing_follows_the_chunks():
    ledger = BlockLedger(10, prefix_block_tokens=16)
    r = request(60, 1, 2, 3)
    compute(ledger, r, 15)
    assert ledger.refs == {}
    compute(ledger, r, 33)
    assert list(ledger.refs) == [1, 2]
    version = ledger.cache_version
    compute(ledger, r, 40)
    assert ledger.cache_version == version  # nothing new: no queue need be ordered again
    compute(ledger, r, 60)
    assert list(ledger.refs) == [1, 2, 3]
    assert ledger.cache_version > version


def test_the_last_units_of_the_oldest_are_lost_first():
    ledger = BlockLedger(8, prefix_block_tokens=16)
    served(ledger, request(48, 1, 2, 3))
    served(ledger, request(32, 8, 9))
    assert list(ledger.idle) == [3, 2, 1, 9, 8]
    compute(ledger, request(70), 70)  # 5 of 8 blocks: 3 may stay idle
    assert list(ledger.idle) == [1, 9, 8]
    assert ledger.match_units(request(48, 1, 2, 3)) == 1
    assert (ledger.free, ledger.idle_blocks) == (3, 3)


def test_use_makes_a_prefix_young_again():
    ledger = BlockLedger(8, prefix_block_tokens=16)
    served(ledger, request(32, 1, 2))
    served(ledger, request(32, 8, 9))
    again = request(40, 1, 2)
    ledger.take_match(again, 2)
    ledger.release(again)
    assert list(ledger.idle) == [9, 8, 2, 1]


def test_hashes_smaller_than_blocks():
    # Hashes of 24 tokens, blocks of 16: a unit is 48 tokens, 2 hashes and 3 blocks.
    ledger = BlockLedger(20, prefix_block_tokens=24)
    assert (ledger.unit_tokens, ledger.stride, ledger.unit_blocks) == (48, 2, 3)
    served(ledger, request(110, 1, 2, 3, 4))  # 4 hashes, 7 blocks, 2 units
    assert list(ledger.idle) == [4, 2]
    assert (ledger.free, ledger.idle_blocks) == (20, 6)
    same = request(110, 1, 2, 3, 4)
    assert ledger.match_units(same) == 2
    assert ledger.match_units(request(110, 1, 2, 3, 5)) == 1
    assert ledger.match_units(request(110, 1, 5, 3, 4)) == 0
    assert ledger.match_units(request(48, 1, 2)) == 0
    assert ledger.match_units(request(49, 1, 2)) == 1
    assert ledger.idle_in_match(same, 2) == 6
    ledger.take_match(same, 2)
    assert (same.kv_tokens, same.blocks, ledger.free) == (96, 6, 14)
    ledger.release(same)
    compute(ledger, request(16 * 15), 16 * 15)  # 5 left: one unit of 3 stays
    assert list(ledger.idle) == [2]


def test_hashes_larger_than_blocks():
    # Mooncake's hashes of 512 tokens: a unit is one hash and 32 blocks.
    ledger = BlockLedger(100, prefix_block_tokens=512)
    assert (ledger.unit_tokens, ledger.stride, ledger.unit_blocks) == (512, 1, 32)
    served(ledger, request(1100, 1, 2, 3))  # the third hash is not full
    assert list(ledger.idle) == [2, 1]
    assert ledger.idle_blocks == 64
    assert ledger.match_units(request(1100, 1, 2, 3)) == 2


def test_a_half_unit_is_not_published():
    ledger = BlockLedger(20, prefix_block_tokens=24)
    served(ledger, request(95, 1, 2, 3, 4))
    assert list(ledger.refs) == [2]


class Conversations(RuleBasedStateMachine):
    """Requests whose prefixes are paths in a small tree come, grow and go in any order."""

    TOTAL = 24

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(self.TOTAL, prefix_block_tokens=24)
        self.held: list[RequestState] = []

    @rule(path=st.lists(st.sampled_from([0, 1]), max_size=6), extra=st.integers(1, 40))
    def arrive(self, path, extra):
        hashes, node = [], 1
        for turn in path:
            node = 2 * node + turn  # a hash names the whole path up to it
            hashes.append(node)
        r = request(24 * len(path) + extra, *hashes)
        units = self.ledger.match_units(r)
        need = self.ledger.blocks(r.prompt_tokens) - units * self.ledger.unit_blocks
        if need + self.ledger.idle_in_match(r, units) <= self.ledger.free:
            if units:
                self.ledger.take_match(r, units)
            self.held.append(r)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 60))
    def grow(self, which, tokens):
        r = self.held[which % len(self.held)]
        upto = min(r.kv_tokens + tokens, r.prompt_tokens)
        if self.ledger.blocks(upto) - r.blocks <= self.ledger.free:
            compute(self.ledger, r, upto)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def leave(self, which):
        self.ledger.release(self.held.pop(which % len(self.held)))
        self.ledger.evict()

    @invariant()
    def blocks_are_conserved(self):
        ledger = self.ledger
        shared = {h for r in self.held for h in r.shared or ()}
        private = sum(r.blocks - len(r.shared or ()) * ledger.unit_blocks for r in self.held)
        assert ledger.free + private + len(shared) * ledger.unit_blocks == self.TOTAL
        assert ledger.free >= 0

    @invariant()
    def references_are_those_held(self):
        ledger = self.ledger
        counts = dict.fromkeys(ledger.refs, 0)
        for r in self.held:
            for h in r.shared or ():
                counts[h] += 1
        assert counts == ledger.refs
        assert set(ledger.idle) == {h for h, n in counts.items() if not n}

    @invariant()
    def idle_blocks_are_free(self):
        ledger = self.ledger
        assert ledger.idle_blocks == len(ledger.idle) * ledger.unit_blocks <= ledger.free

    @invariant()
    def no_unit_outlives_the_one_before_it(self):
        # Unit hashes lie two levels apart in the tree.
        assert all(h < 16 or h // 4 in self.ledger.refs for h in self.ledger.refs)


Conversations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConversations = Conversations.TestCase
