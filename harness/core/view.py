"""What a policy may look at. Every engine supplies these fields, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .decisions import NextQueue
from .state import RequestState


class Predictions(Protocol):
    """What a policy may believe about the future; the simulator's truth is another object."""

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Time of one iteration; `chunks` holds (tokens in KV already, tokens to prefill)."""
        ...

    def swap_s(self, blocks: int) -> float:
        """Time to move so many KV blocks to host memory or back, one way."""
        ...

    def output_tokens(self, r: RequestState) -> int:
        """Expected length of the answer."""
        ...

    def output_tokens_p90(self, r: RequestState) -> int:
        """What nine in ten such answers do not exceed; as expected, where no more is known."""
        ...


class View(Protocol):
    """Read-only state of one instance. Lengths are functions: a decode step touches no request."""

    @property
    def now_s(self) -> float:
        """The clock."""
        ...

    @property
    def predict(self) -> Predictions:
        """Predicted times and lengths."""
        ...

    @property
    def policy_state(self) -> Any:
        """What the policy's `new_state()` returned; the engine keeps it."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        ...

    @property
    def total_blocks(self) -> int:
        """KV blocks of the instance."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken (cached but unused ones included)."""
        ...

    @property
    def host_free_blocks(self) -> int:
        """Free blocks of host memory for swapping."""
        ...

    @property
    def n_waiting(self) -> int:
        """Requests that wait for prefill."""
        ...

    @property
    def n_swapped(self) -> int:
        """Requests that wait with their KV elsewhere."""
        ...

    @property
    def n_prefilling(self) -> int:
        """Requests in the batch whose prefill is not complete."""
        ...

    @property
    def remaining_prefill_tokens(self) -> int:
        """Tokens that they still lack."""
        ...

    @property
    def n_decoding(self) -> int:
        """Requests in the batch that decode."""
        ...

    @property
    def n_running(self) -> int:
        """All requests in the batch."""
        ...

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""
        ...

    @property
    def max_future_kv_tokens(self) -> int:
        """Most tokens that the requests in the batch may still add to the KV cache."""
        ...

    def waiting(self) -> Iterable[RequestState]:
        """Requests that wait for prefill, in no particular order."""
        ...

    def running(self) -> Iterable[RequestState]:
        """Requests in the batch."""
        ...

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Those of a group, in their order, for whom there is room now (for `next_queue`)."""
        ...

    def kv_tokens(self, r: RequestState) -> int:
        """Tokens of `r` in the KV cache."""
        ...

    def emitted_tokens(self, r: RequestState) -> int:
        """Tokens given back for `r`."""
        ...

    def held_blocks(self, r: RequestState) -> int:
        """KV blocks that hold `r`."""
        ...

    def cached_tokens(self, r: RequestState) -> int:
        """Leading tokens of `r` that the prefix cache holds now."""
        ...
