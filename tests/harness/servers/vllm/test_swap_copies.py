"""Swapped blocks come back byte for byte, whenever the copies run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from slo_bench.harness.servers.vllm.plugin.swap_copies import (  # noqa: E402
    HostLane,
    SwapCopies,
    stretches,
)

pytestmark = pytest.mark.torch

BLOCKS = 40


class LateTicket:
    def __init__(self, lane, copy):
        self._lane, self._copy = lane, copy
        self.ran = False

    def run(self):
        if not self.ran:
            self.ran = True
            self._copy()

    def done(self):
        return self.ran

    def finish(self):
        self.run()
        return 0.5


class LateLane:
    """Copies run when they are waited for, in any order."""

    def __init__(self):
        self.tickets = []

    def submit(self, copy):
        self.tickets.append(LateTicket(self, copy))
        return self.tickets[-1]


def kv_layers():
    """Layers of several types and shapes, with every element different."""
    draw = torch.Generator().manual_seed(0)
    keys_and_values = torch.randn(2, BLOCKS, 4, 6, generator=draw)
    return [
        torch.randn(BLOCKS, 3, generator=draw).to(torch.bfloat16),  # smaller elements first
        torch.randint(0, 255, (BLOCKS, 5), generator=draw, dtype=torch.uint8),
        torch.randn(BLOCKS, 2, 3, 5, generator=draw),
        torch.randn(BLOCKS, 4, 3, generator=draw).transpose(1, 2),  # not contiguous
        *keys_and_values.unbind(0),
    ]


def content(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def rows(layers, block_ids):
    return [layer[block_ids].clone() for layer in layers]


def same(layers, block_ids, expected):
    return all(
        content(layer[block_ids]) == content(before)
        for layer, before in zip(layers, expected, strict=True)
    )


def overwrite(layers):
    for layer in layers:
        layer.fill_(7)


@pytest.mark.parametrize("staged_blocks", [1, 3, 100])
def test_swapped_blocks_are_restored_byte_for_byte(staged_blocks):
    layers = kv_layers()
    copies = SwapCopies(layers, 10, staged_blocks=staged_blocks)
    before = rows(layers, [5, 9, 1, 2, 3, 39, 0])
    held = copies.out([5, 9, 1, 2, 3, 39, 0])
    overwrite(layers)
    copies.back(held, [20, 4, 21, 22, 8, 5, 6])
    assert same(layers, [20, 4, 21, 22, 8, 5, 6], before)
    assert copies.block_bytes == sum(layer[0].nbytes for layer in layers)


def test_blocks_still_in_the_prefix_cache_are_not_copied_back():
    layers = kv_layers()
    copies = SwapCopies(layers, 10)
    before = rows(layers, [2, 3])
    held = copies.out([0, 1, 2, 3])
    overwrite(layers)
    copies.back(held, [30, 31], first=2)
    assert same(layers, [30, 31], before)
    assert all((layer[:30] == 7).all() for layer in layers)


def test_overlapping_swaps_keep_their_blocks_apart():
    layers = kv_layers()
    copies = SwapCopies(layers, 12, staged_blocks=2)
    before = {ids: rows(layers, list(ids)) for ids in ((0, 1, 2), (3, 4, 5, 6), (7, 8))}
    held = {ids: copies.out(ids) for ids in before}
    overwrite(layers)
    copies.back(held[3, 4, 5, 6], [10, 11, 12, 13])
    later = rows(layers, [10, 11])
    again = copies.out([10, 11])  # into the slots that have just become free
    overwrite(layers)
    for ids, place in (((7, 8), [1, 0]), ((0, 1, 2), [20, 25, 30])):
        copies.back(held[ids], place)
        assert same(layers, place, before[ids])
    copies.back(again, [38, 39])
    assert same(layers, [38, 39], later)


def test_copies_that_end_out_of_order_lose_no_blocks():
    layers, lane = kv_layers(), LateLane()
    copies = SwapCopies(layers, 6, lane)
    first, second = rows(layers, [0, 1, 2]), rows(layers, [3, 4, 5])
    held = [copies.out([0, 1, 2]), copies.out([3, 4, 5])]
    for ticket in reversed(lane.tickets):
        ticket.run()
    overwrite(layers)
    copies.back(held[1], [10, 11, 12])
    third = rows(layers, [20, 21])
    held.append(copies.out([20, 21]))  # no slot is free before a copy has ended
    assert [ticket.ran for ticket in lane.tickets] == [True, True, True, False]
    copies.back(held[0], [13, 14, 15])
    back = lane.tickets[-1]
    copies.back(held[2], [16, 17])  # runs its own way out first
    lane.tickets[-1].run()
    back.run()
    assert same(layers, [10, 11, 12], second)
    assert same(layers, [13, 14, 15], first)
    assert same(layers, [16, 17], third)


def test_dropped_blocks_make_room_and_a_full_host_memory_is_an_error():
    copies = SwapCopies(kv_layers(), 4)
    held = copies.out([0, 1, 2])
    with pytest.raises(RuntimeError, match="2 blocks are to be swapped out, but 1 of 4"):
        copies.out([3, 4])
    copies.drop(held)
    assert copies.out([3, 4, 5, 6]).slots == [0, 1, 2, 3]


def test_closing_ends_the_copies_under_way():
    layers, lane = kv_layers(), LateLane()
    copies = SwapCopies(layers, 4, lane)
    before = rows(layers, [0, 1])
    copies.back(copies.out([0, 1]), [8, 9])
    copies.close()
    copies.close()
    assert all(ticket.ran for ticket in lane.tickets)
    assert same(layers, [8, 9], before)


def test_rows_with_consecutive_slots_are_one_copy():
    staged = torch.arange(6)
    pieces = [(slot, part.tolist()) for slot, part in stretches([3, 4, 5, 9, 1, 2], staged)]
    assert pieces == [(3, [0, 1, 2]), (9, [3]), (1, [4, 5])]
    assert list(stretches([], staged)) == []


def test_host_lane_times_its_copies():
    ticket = HostLane().submit(lambda: None)
    assert ticket.done()
    assert ticket.finish() >= 0
