"""KV blocks: counted, shared by prefix, kept while idle, lost oldest first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager
from slo_bench.harness.core.state import RequestState
from slo_bench.workloads.request import Slo


def request(prompt: int, *hashes: int) -> RequestState:
    return RequestState(0, 0.0, prompt, 8, 8, Slo(), prefix_blocks=hashes)


def compute(kv_manager: KVCacheManager, r: RequestState, tokens: int) -> None:
    """What an engine does: blocks are taken, the KV is written, full units are published."""
    blocks = kv_manager.blocks(tokens)
    kv_manager.free -= blocks - r.blocks
    r.blocks, r.kv_tokens = blocks, tokens
    kv_manager.evict()
    kv_manager.cache_blocks(r, tokens)


def served(kv_manager: KVCacheManager, r: RequestState) -> None:
    compute(kv_manager, r, r.prompt_tokens)
    kv_manager.release(r)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_of_tokens_round_up(tokens, blocks):
    assert KVCacheManager(10).blocks(tokens) == blocks


def test_release_without_prefix_cache_keeps_no_blocks():
    kv_manager = KVCacheManager(10)
    r = request(40, 1, 2)
    kv_manager.free -= 3
    r.blocks = 3
    kv_manager.release(r)
    assert (kv_manager.free, kv_manager.idle_blocks, r.blocks) == (10, 0, 0)
    assert kv_manager.get_computed_blocks(request(40, 1, 2)) == 0


def test_released_prefix_is_matched_by_a_later_request():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    served(kv_manager, request(40, 1, 2))
    assert (kv_manager.free, kv_manager.idle_blocks) == (10, 2)  # free, and still worth something
    same, other, longer = request(40, 1, 2), request(40, 1, 3), request(90, 1, 2, 3, 4)
    assert [kv_manager.get_computed_blocks(r) for r in (same, other, longer)] == [2, 1, 2]
    # a prefix begins at the beginning
    assert kv_manager.get_computed_blocks(request(40, 7, 2)) == 0


@pytest.mark.parametrize(("prompt", "units"), [(16, 0), (17, 1), (32, 1), (33, 2), (100, 2)])
def test_the_last_token_is_always_computed(prompt, units):
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    served(kv_manager, request(40, 1, 2))
    assert kv_manager.get_computed_blocks(request(prompt, 1, 2)) == units


def test_taking_a_match_takes_idle_blocks_once():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    served(kv_manager, request(40, 1, 2))
    first, second = request(40, 1, 2), request(40, 1, 2)
    assert kv_manager.num_evictable_blocks(first, 2) == 2
    kv_manager.allocate(first, 2)
    assert (first.kv_tokens, first.blocks, kv_manager.free, kv_manager.idle_blocks) == (32, 2, 8, 0)
    assert kv_manager.num_evictable_blocks(second, 2) == 0
    kv_manager.allocate(second, 2)
    assert kv_manager.free == 8  # shared
    assert kv_manager.refs == {1: 2, 2: 2}
    kv_manager.release(first)
    assert (kv_manager.free, kv_manager.idle_blocks) == (8, 0)  # still held by the second
    kv_manager.release(second)
    assert (kv_manager.free, kv_manager.idle_blocks) == (10, 2)


def test_unit_computed_twice_is_cached_as_a_copy_that_outlives_the_first():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    first, second = request(40, 1, 2), request(60, 1, 2, 3)
    compute(kv_manager, first, 20)
    compute(kv_manager, second, 50)
    compute(kv_manager, first, 40)
    assert first.shared[0] == 1
    assert second.shared[1:] == [2, 3]  # what follows a copy is cached, too
    (copy_of_1,), (copy_of_2,) = kv_manager.copies[1], kv_manager.copies[2]
    assert (first.shared, second.shared) == ([1, copy_of_2], [copy_of_1, 2, 3])
    kv_manager.release(first)
    kv_manager.release(second)
    assert (kv_manager.free, kv_manager.idle_blocks) == (10, 5)
    compute(kv_manager, request(16 * 7), 16 * 7)  # 3 may stay idle: those of the second
    assert list(kv_manager.idle) == [3, 2, copy_of_1]
    assert kv_manager.get_computed_blocks(request(60, 1, 2, 3)) == 3
    later = request(40, 1, 2)
    assert kv_manager.num_evictable_blocks(later, 2) == 2
    kv_manager.allocate(later, 2)
    assert later.shared == [copy_of_1, 2]
    kv_manager.release(later)
    kv_manager.forget()
    assert not kv_manager.copies
    assert kv_manager.get_computed_blocks(later) == 0


def test_evicted_copy_is_not_found():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    first, second = request(16, 1), request(16, 1)
    compute(kv_manager, first, 16)
    compute(kv_manager, second, 16)
    kv_manager.release(second)
    compute(kv_manager, request(16 * 9), 16 * 9)
    assert (kv_manager.copies, list(kv_manager.idle)) == ({}, [])
    kv_manager.release(first)
    assert kv_manager.get_computed_blocks(request(20, 1)) == 1


def test_prefix_units_are_published_as_chunks_complete_them():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    r = request(60, 1, 2, 3)
    compute(kv_manager, r, 15)
    assert kv_manager.refs == {}
    compute(kv_manager, r, 33)
    assert list(kv_manager.refs) == [1, 2]
    version = kv_manager.cache_version
    compute(kv_manager, r, 40)
    assert kv_manager.cache_version == version  # nothing new: no queue need be ordered again
    compute(kv_manager, r, 60)
    assert list(kv_manager.refs) == [1, 2, 3]
    assert kv_manager.cache_version > version


def test_eviction_takes_the_last_units_of_the_oldest_prefix():
    kv_manager = KVCacheManager(8, prefix_block_size=16)
    served(kv_manager, request(48, 1, 2, 3))
    served(kv_manager, request(32, 8, 9))
    assert list(kv_manager.idle) == [3, 2, 1, 9, 8]
    compute(kv_manager, request(70), 70)  # 5 of 8 blocks: 3 may stay idle
    assert list(kv_manager.idle) == [1, 9, 8]
    assert kv_manager.get_computed_blocks(request(48, 1, 2, 3)) == 1
    assert (kv_manager.free, kv_manager.idle_blocks) == (3, 3)


def test_blocks_of_answers_are_lost_in_turn_although_no_prompt_finds_them():
    """As in vLLM: what a request generated waits in the same queue as its prompt, before it."""
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    answered, later = request(32, 1, 2), request(16, 8)
    compute(kv_manager, answered, 32)
    compute(kv_manager, answered, 32 + 40)  # two full blocks of an answer, and a part of one
    kv_manager.release(answered)
    served(kv_manager, later)
    assert list(kv_manager.idle)[2:] == [2, 1, 8]
    assert (kv_manager.free, kv_manager.idle_blocks) == (10, 5)
    compute(kv_manager, request(16 * 7), 16 * 7)  # 3 of 10 may stay: the answer is lost
    assert list(kv_manager.idle) == [2, 1, 8]
    assert kv_manager.get_computed_blocks(request(40, 1, 2)) == 2


def test_blocks_that_were_reserved_and_not_filled_are_not_kept():
    kv_manager = KVCacheManager(10, prefix_block_size=16)
    preempted = request(100, 1, 2, 3, 4, 5, 6)
    kv_manager.free -= 7
    preempted.blocks, preempted.kv_tokens = 7, 40
    kv_manager.cache_blocks(preempted, 40)
    kv_manager.release(preempted)
    assert list(kv_manager.idle) == [2, 1]
    assert (kv_manager.free, kv_manager.idle_blocks) == (10, 2)


def test_match_moves_a_prefix_to_the_end_of_the_eviction_order():
    kv_manager = KVCacheManager(8, prefix_block_size=16)
    served(kv_manager, request(32, 1, 2))
    served(kv_manager, request(32, 8, 9))
    again = request(40, 1, 2)
    kv_manager.allocate(again, 2)
    kv_manager.release(again)
    assert list(kv_manager.idle) == [9, 8, 2, 1]


def test_warm_units_are_found_and_lost_from_the_least_valuable_on():
    kv_manager = KVCacheManager(6, prefix_block_size=16)
    served(kv_manager, request(40, 1, 2))
    assert kv_manager.warm([1, 7, 8, 9, 10, 11]) == 4  # 1 is there, 11 has no room
    assert (kv_manager.free, kv_manager.idle_blocks) == (6, 6)
    assert kv_manager.get_computed_blocks(request(80, 7, 8, 9, 10, 11)) == 4
    compute(kv_manager, request(48, 20, 21, 22), 48)
    assert kv_manager.get_computed_blocks(request(80, 7, 8, 9, 10, 11)) == 3


def test_prefix_hashes_smaller_than_blocks():
    # Hashes of 24 tokens, blocks of 16: a unit is 48 tokens, 2 hashes and 3 blocks.
    kv_manager = KVCacheManager(20, prefix_block_size=24)
    assert (kv_manager.unit_tokens, kv_manager.stride, kv_manager.unit_blocks) == (48, 2, 3)
    served(kv_manager, request(110, 1, 2, 3, 4))  # 4 hashes, 7 blocks, 2 units
    assert list(kv_manager.idle) == [4, 2]
    assert (kv_manager.free, kv_manager.idle_blocks) == (20, 6)
    same = request(110, 1, 2, 3, 4)
    assert kv_manager.get_computed_blocks(same) == 2
    assert kv_manager.get_computed_blocks(request(110, 1, 2, 3, 5)) == 1
    assert kv_manager.get_computed_blocks(request(110, 1, 5, 3, 4)) == 0
    assert kv_manager.get_computed_blocks(request(48, 1, 2)) == 0
    assert kv_manager.get_computed_blocks(request(49, 1, 2)) == 1
    assert kv_manager.num_evictable_blocks(same, 2) == 6
    kv_manager.allocate(same, 2)
    assert (same.kv_tokens, same.blocks, kv_manager.free) == (96, 6, 14)
    kv_manager.release(same)
    compute(kv_manager, request(16 * 15), 16 * 15)  # 5 left: one unit of 3 stays
    assert list(kv_manager.idle) == [2]


def test_prefix_hashes_larger_than_blocks():
    # Mooncake's hashes of 512 tokens: a unit is one hash and 32 blocks.
    kv_manager = KVCacheManager(100, prefix_block_size=512)
    assert (kv_manager.unit_tokens, kv_manager.stride, kv_manager.unit_blocks) == (512, 1, 32)
    served(kv_manager, request(1100, 1, 2, 3))  # the third hash is not full
    assert list(kv_manager.idle) == [2, 1]
    assert kv_manager.idle_blocks == 64
    assert kv_manager.get_computed_blocks(request(1100, 1, 2, 3)) == 2


def test_partly_filled_unit_is_not_published():
    kv_manager = KVCacheManager(20, prefix_block_size=24)
    served(kv_manager, request(95, 1, 2, 3, 4))
    assert list(kv_manager.refs) == [2]


class Conversations(RuleBasedStateMachine):
    """Requests whose prefixes are paths in a small tree come, grow and go in any order."""

    TOTAL = 24

    def __init__(self) -> None:
        super().__init__()
        self.kv_manager = KVCacheManager(self.TOTAL, prefix_block_size=24)
        self.held: list[RequestState] = []

    @rule(path=st.lists(st.sampled_from([0, 1]), max_size=6), extra=st.integers(1, 40))
    def arrive(self, path, extra):
        hashes, node = [], 1
        for turn in path:
            node = 2 * node + turn  # a hash names the whole path up to it
            hashes.append(node)
        r = request(24 * len(path) + extra, *hashes)
        units = self.kv_manager.get_computed_blocks(r)
        need = self.kv_manager.blocks(r.prompt_tokens) - units * self.kv_manager.unit_blocks
        if need + self.kv_manager.num_evictable_blocks(r, units) <= self.kv_manager.free:
            if units:
                self.kv_manager.allocate(r, units)
            self.held.append(r)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 60))
    def grow(self, which, tokens):
        r = self.held[which % len(self.held)]
        upto = min(r.kv_tokens + tokens, r.prompt_tokens)
        if self.kv_manager.blocks(upto) - r.blocks <= self.kv_manager.free:
            compute(self.kv_manager, r, upto)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def leave(self, which):
        self.kv_manager.release(self.held.pop(which % len(self.held)))
        self.kv_manager.evict()

    @invariant()
    def blocks_are_conserved(self):
        kv_manager = self.kv_manager
        shared = {h for r in self.held for h in r.shared or ()}
        private = sum(r.blocks - len(r.shared or ()) * kv_manager.unit_blocks for r in self.held)
        assert kv_manager.free + private + len(shared) * kv_manager.unit_blocks == self.TOTAL
        assert kv_manager.free >= 0

    @invariant()
    def references_are_those_held(self):
        kv_manager = self.kv_manager
        counts = dict.fromkeys(kv_manager.refs, 0)
        for r in self.held:
            for h in r.shared or ():
                counts[h] += 1
        assert counts == kv_manager.refs
        assert set(kv_manager.idle) == {h for h, n in counts.items() if not n}

    @invariant()
    def idle_blocks_are_free(self):
        kv_manager = self.kv_manager
        assert (
            kv_manager.idle_blocks
            == len(kv_manager.idle) * kv_manager.unit_blocks
            <= kv_manager.free
        )

    @invariant()
    def no_unit_outlives_the_one_before_it(self):
        # Unit hashes lie two levels apart in the tree.
        assert all(h < 16 or h // 4 in self.kv_manager.refs for h in self.kv_manager.refs)


Conversations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConversations = Conversations.TestCase
