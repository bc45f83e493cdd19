"""The policy interface for a language model and an embedder that share a device and its memory.

Shared memory is counted in KV blocks: a batch of texts holds as many blocks as its activations
need, for the length of one pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .counters import Counters
from .decisions import Admission
from .policy import Policy, parameter
from .state import RequestState

PASSES_CUT = "passes_cut"


class EmbedView(Protocol):
    """What a policy may read of an embedder. Its requests have `num_inputs`."""

    @property
    def now_s(self) -> float:
        """The embedder's clock; during a pass the moment at which it ends."""

    @property
    def policy_state(self) -> Any:
        """What the policy's `new_state()` returned, for both models."""

    @property
    def counters(self) -> Counters:
        """Counters of the policy's `mechanisms()`, for both models."""

    @property
    def total_blocks(self) -> int:
        """KV blocks that both models share."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that neither model holds."""

    @property
    def held_blocks(self) -> int:
        """Blocks that the pass in progress holds; 0 between passes."""

    def waiting(self, now_s: float) -> Sequence[RequestState]:
        """Requests that have arrived by then and have not begun, in order of arrival."""

    def next_waiting(self, now_s: float) -> RequestState | None:
        """The first of `waiting`; None if there is none."""

    def running(self) -> Sequence[RequestState]:
        """Requests of the pass in progress."""

    def oldest_llm_arrival_s(self) -> float:
        """When the first of the language model's waiting requests arrived; infinite if none."""

    @property
    def llm_running(self) -> int:
        """Requests in the language model's batch."""

    def blocks(self, batch: Iterable[RequestState]) -> int:
        """Blocks that one pass over these requests takes."""

    def pass_s(self, batch: Iterable[RequestState]) -> float:
        """Predicted time of one pass over these requests."""


@dataclass
class Beside:
    """State of a collocating policy on one instance; the engine sets `embedder`."""

    embedder: EmbedView | None = None


@dataclass(frozen=True)
class Collocated(Policy):
    """Continuous batching with an embedder on the same device. The embedder takes any free memory;
    the two models are not coordinated.

    `merges`: if the embedder is the language model itself, texts are prefilled in its batches.
    """

    merges: ClassVar[bool] = False

    # of one pass; a larger request goes alone
    batch_texts: int = parameter(128, 1, 65536, log=True)

    def new_state(self) -> Any:
        """Called once for each instance, before the first request. It reads the parameters alone.

        Returns:
            A `Beside` or a subclass of it; the engine sets `Beside.embedder`.

        Example::

            def new_state(self) -> State:
                return State()  # class State(Beside), with what the policy learns
        """
        return Beside()

    def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
        """Called once when the embedding request `r` arrives. It may read all of `r` and
        `embedder`, and `embedder.policy_state`.

        Returns:
            `Admission.ADMIT`, or `Admission.REJECT`, which ends the request unserved.

        Example::

            def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
                fits = embedder.blocks([r]) <= embedder.total_blocks // 2
                return Admission.ADMIT if fits else Admission.REJECT
        """
        return Admission.ADMIT

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        """Called when the embedder is idle, and again whenever the clock has advanced. It may read
        all of `embedder`; the batch must fit `embedder.free_blocks`.

        Returns:
            The requests of the next pass, from `embedder.waiting`; empty: no pass now.

        Example::

            def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
                return self.first_come(embedder, embedder.free_blocks // 2)
        """
        return self.first_come(embedder, embedder.free_blocks)

    def count_cut(self, batch: Sequence[RequestState], embedder: EmbedView) -> None:
        """Count the pass as cut if more requests would have fitted its number of texts."""
        if len(batch) < len(self._by_texts(embedder.waiting(embedder.now_s))):
            embedder.counters.add(PASSES_CUT)

    def first_come(self, embedder: EmbedView, room_blocks: int) -> list[RequestState]:
        """The earliest arrivals, up to `batch_texts` texts and `room_blocks` blocks."""
        batch = self._by_texts(embedder.waiting(embedder.now_s))
        if not batch or embedder.blocks(batch) <= room_blocks:
            return batch
        n_fitting = bisect_right(
            range(len(batch)), room_blocks, key=lambda last: embedder.blocks(batch[: last + 1])
        )
        return batch[:n_fitting]

    def _by_texts(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """The earliest arrivals, up to `batch_texts` texts; at least one request."""
        texts = 0
        for n, r in enumerate(waiting):
            texts += r.num_inputs
            if texts > self.batch_texts and n:
                return list(waiting[:n])
        return list(waiting)
