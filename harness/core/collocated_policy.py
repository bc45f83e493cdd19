"""What a policy decides where a language model and an embedder share a device and its memory.

The memory that both compete for is counted in KV blocks: a batch of texts takes the blocks that its
activations are worth, for the length of one pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .decisions import Admission
from .policy import Policy, parameter
from .state import RequestState


class EmbedView(Protocol):
    """Read-only state of an embedder. Its requests have `num_inputs`."""

    @property
    def now_s(self) -> float:
        """The embedder's clock; during a pass the moment at which it ends."""
        ...

    @property
    def policy_state(self) -> Any:
        """What the policy's `new_state()` returned, for both models."""
        ...

    @property
    def total_blocks(self) -> int:
        """Blocks that both models share."""
        ...

    @property
    def free_blocks(self) -> int:
        """Blocks that neither model holds."""
        ...

    @property
    def held_blocks(self) -> int:
        """Blocks that the pass in progress holds; 0 between passes."""
        ...

    def waiting(self, now_s: float) -> Sequence[RequestState]:
        """Requests that have arrived by then and have not begun, in order of arrival."""
        ...

    def running(self) -> Sequence[RequestState]:
        """Requests of the pass in progress."""
        ...

    def oldest_llm_arrival_s(self) -> float:
        """When the first of the language model's waiting requests arrived; infinite if none."""
        ...

    @property
    def llm_running(self) -> int:
        """Requests in the language model's batch."""
        ...

    def blocks(self, batch: Iterable[RequestState]) -> int:
        """Blocks that one pass over these requests takes."""
        ...

    def pass_s(self, batch: Iterable[RequestState]) -> float:
        """Predicted time of one pass over these requests."""
        ...


@dataclass
class Beside:
    """What a collocating policy learns on one instance; the engine fills the embedder in."""

    embedder: EmbedView | None = None


@dataclass(frozen=True)
class Collocated(Policy):
    """Continuous batching beside an embedder, which takes whatever memory is free: no coordination.

    `merges`: if the embedder is the language model itself, texts are prefilled in its batches.
    """

    merges: ClassVar[bool] = False

    # of one pass; a larger request goes alone
    batch_texts: int = parameter(128, 1, 65536, log=True)

    def new_state(self) -> Any:
        """A `Beside` or one of its subclasses."""
        return Beside()

    def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
        """On arrival of an embedding request."""
        return Admission.ADMIT

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        """The next pass, from the requests that wait; empty: not now.

        Asked when the embedder has nothing to do, and again whenever time went on. What it names
        must fit the free blocks.
        """
        return self.first_come(embedder, embedder.free_blocks)

    def first_come(self, embedder: EmbedView, room_blocks: int) -> list[RequestState]:
        """The requests that came first, as many as `batch_texts` and the room hold."""
        batch = self._by_texts(embedder.waiting(embedder.now_s))
        if not batch or embedder.blocks(batch) <= room_blocks:
            return batch
        most = bisect_right(
            range(len(batch)), room_blocks, key=lambda last: embedder.blocks(batch[: last + 1])
        )
        return batch[:most]

    def _by_texts(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Who came first, as many as `batch_texts` hold."""
        texts = 0
        for n, r in enumerate(waiting):
            texts += r.num_inputs
            if texts > self.batch_texts and n:
                return list(waiting[:n])
        return list(waiting)
