"""S3: static batches packed by predicted length so that the least is padded, within memory.

Source: Jin et al., S³, NeurIPS 2023, as UELLM describes it: Eq. 2-2 (padding to minimise), §2.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from ...core.counters import CLOSED_BY_MEMORY
from ...core.policy import StaticPolicy, parameter
from ...core.state import RequestState
from ...core.view import View
from .length_monitor import MISPREDICTIONS, LengthMonitor

NO_BUDGET_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Item:
    """A request to pack: predicted answer, and what it makes a batch reserve."""

    request: RequestState
    output_tokens: int
    prompt_tokens: int
    reserved_tokens: int


Batch = Sequence[Item]


@dataclass(frozen=True)
class BatchCapacity:
    """Limits of one batch: a number of requests, blocks for their padded KV, and the sum of their
    predicted tokens.
    """

    max_batch: int
    blocks: int
    block_size: int
    token_budget: int = NO_BUDGET_TOKENS

    def holds(
        self, requests: int, prompt_tokens: int, reserved_tokens: int, output_tokens: int
    ) -> bool:
        """Whether a batch with this longest prompt and reservation, and this sum of predicted
        tokens, fits; a single request always does.
        """
        if requests == 1:
            return True
        each = -(-(prompt_tokens + reserved_tokens) // self.block_size)
        return (
            requests <= self.max_batch
            and requests * each <= self.blocks
            and output_tokens <= self.token_budget
        )


@dataclass(frozen=True)
class S3(StaticPolicy):
    """Bin packing of what waits; deadlines are not looked at.

    Eq. 2-2 alone is least with batches of one. Here: the fewest batches into which the requests,
    sorted by predicted answer, can be cut, and of those cuts the one with the least padding; where
    first-fit in order of arrival pads less, its batches. `first` says which batch runs now: the
    one with the `oldest` request, or that of the `shortest` answers (both are silent about it).
    Packed are the oldest `window` requests. `token_budget`: most predicted tokens of a batch
    together, as UELLM's authors limit it (1,024); the default limits none.
    """

    uses_predicted_lengths: ClassVar[bool] = True

    max_batch: int = parameter(32, 1, 4096, log=True)
    first: str = parameter("oldest", choices=("oldest", "shortest"))
    window: int = parameter(256, 1, 100_000, log=True)
    token_budget: int = parameter(NO_BUDGET_TOKENS, 1, NO_BUDGET_TOKENS, log=True)

    def new_state(self) -> LengthMonitor:
        return LengthMonitor()

    def mechanisms(self) -> dict[str, str]:
        budget = {"closed_by_budget": "batches that token_budget closed while others waited"}
        return {
            "closed_by_size": "batches of max_batch requests while others waited",
            CLOSED_BY_MEMORY: "batches in which no other like their longest would have fitted",
            "closed_by_padding": "smaller batches, so that all together are padded least",
            **(budget if self.token_budget < NO_BUDGET_TOKENS else {}),
            **MISPREDICTIONS,
        }

    def on_finished(self, r: RequestState, view: View) -> None:
        view.policy_state.observe(r, view)

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        tokens: int = view.policy_state.reserve_tokens(r, view)
        return tokens

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        expected_tokens = view.policy_state.expected_tokens
        reserve_of = view.policy_state.reserve_of
        items = []
        for r in waiting[: self.window]:
            tokens = expected_tokens(r, view)
            items.append(Item(r, tokens, r.prompt_tokens, reserve_of(r, tokens, view)))
        room = BatchCapacity(self.max_batch, view.total_blocks, view.block_size, self.token_budget)
        batches = pack(items, room)
        if self.first == "oldest":
            oldest = items[0]
            chosen = next(batch for batch in batches if oldest in batch)
        else:
            chosen = min(batches, key=lambda batch: max(item.output_tokens for item in batch))
        if len(batches) > 1:
            view.counters.add(closed_by(chosen, room))
        return [item.request for item in chosen]


def closed_by(batch: Batch, room: BatchCapacity) -> str:
    """The counter of what keeps another request out of a batch."""
    if len(batch) >= room.max_batch:
        return "closed_by_size"
    lengths = [item.output_tokens for item in batch]
    if sum(lengths) + min(lengths) > room.token_budget:
        return "closed_by_budget"
    prompt = max(item.prompt_tokens for item in batch)
    reserved = max(item.reserved_tokens for item in batch)
    fits = room.holds(len(batch) + 1, prompt, reserved, 0)
    return "closed_by_padding" if fits else CLOSED_BY_MEMORY


def padding_tokens(batches: Sequence[Batch]) -> int:
    """Padded tokens of a batch (Eq. 2-2)."""
    return sum(
        max(item.output_tokens for item in batch) * len(batch)
        - sum(item.output_tokens for item in batch)
        for batch in batches
    )


def pack(items: Sequence[Item], room: BatchCapacity) -> list[Batch]:
    """Batches of all items (in order of arrival), each within `room`; see `S3`."""
    cut = cut_sorted(sorted(items, key=lambda item: -item.output_tokens), room)
    plain = first_fit(items, room)
    return cut if padding_tokens(cut) <= padding_tokens(plain) else plain


def first_fit(items: Sequence[Item], room: BatchCapacity) -> list[Batch]:
    """Each item into the first batch that still has room for it."""
    batches: list[list[Item]] = []
    longest: list[tuple[int, int]] = []  # prompt and reservation of each batch
    totals: list[int] = []  # predicted tokens of each batch
    not_full: list[int] = []
    for item in items:
        for index in not_full:
            prompt, reserved = longest[index]
            grown = max(prompt, item.prompt_tokens), max(reserved, item.reserved_tokens)
            total = totals[index] + item.output_tokens
            if room.holds(len(batches[index]) + 1, *grown, total):
                batches[index].append(item)
                longest[index], totals[index] = grown, total
                if len(batches[index]) == room.max_batch:
                    not_full.remove(index)
                break
        else:
            if room.max_batch > 1:
                not_full.append(len(batches))
            batches.append([item])
            longest.append((item.prompt_tokens, item.reserved_tokens))
            totals.append(item.output_tokens)
    return list(batches)


def cut_sorted(items: Sequence[Item], room: BatchCapacity) -> list[Batch]:
    """Items, longest answer first, cut into the fewest batches that fit; of those the least padded.

    What fits still fits without some of it, so the fewest batches before and behind each place are
    those of cutting as late and as early as possible. Dynamic program over the places that some
    fewest cut goes through; there are no more of them than empty seats in each batch.
    """
    n = len(items)
    first = _first_starts(items, room)
    before = [0] * (n + 1)  # fewest batches of the first items
    for end in range(1, n + 1):
        before[end] = before[first[end]] + 1
    behind = [0] * (n + 1)  # fewest batches of the others
    last = n
    for start in range(n - 1, -1, -1):
        while first[last] > start:
            last -= 1
        behind[start] = behind[last] + 1
    answers = [0, *accumulate(item.output_tokens for item in items)]
    padding = [0] * (n + 1)
    begin = [0] * (n + 1)  # where the last batch of the first items begins
    starts, ends = [0], list[int]()
    for end in range(1, n + 1):
        if before[end] + behind[end] > before[n]:
            continue
        if before[end] > before[starts[0]] + 1:
            starts, ends = ends, []
        least = -1
        for start in reversed(starts):
            if start >= first[end]:
                here = padding[start] + answers[start] + items[start].output_tokens * (end - start)
                if least < 0 or here < least:
                    least, begin[end] = here, start
        padding[end] = least - answers[end]
        ends.append(end)
    batches_found: list[Batch] = []
    end = n
    while end:
        batches_found.append(items[begin[end] : end])
        end = begin[end]
    return batches_found


def _first_starts(items: Sequence[Item], room: BatchCapacity) -> list[int]:
    """Where the longest batch begins that ends at each place and fits."""
    n = len(items)
    most_prompt = max((item.prompt_tokens for item in items), default=0)
    most_reserved = max((item.reserved_tokens for item in items), default=0)
    most_output = max((item.output_tokens for item in items), default=0)
    largest = min(n, room.max_batch)
    if room.holds(largest, most_prompt, most_reserved, largest * most_output):
        return [max(0, end - room.max_batch) for end in range(n + 1)]
    first = [0]
    for end in range(1, n + 1):
        start, prompt, reserved, output = end, 0, 0, 0
        while start > first[-1]:
            item = items[start - 1]
            prompt = max(prompt, item.prompt_tokens)
            reserved = max(reserved, item.reserved_tokens)
            output += item.output_tokens
            if not room.holds(end - start + 1, prompt, reserved, output):
                break
            start -= 1
        first.append(start)
    return first
