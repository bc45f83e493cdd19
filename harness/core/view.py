"""What a policy may read of an instance. Every engine provides these properties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .counters import Counters
from .decisions import NextQueue
from .state import RequestState


class Predictions(Protocol):
    """Predicted times and output lengths; the simulator keeps the true ones in another object."""

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one iteration; `chunks` holds (tokens in KV already, tokens to prefill)."""

    def swap_s(self, blocks: int) -> float:
        """Seconds to move `blocks` KV blocks between GPU and host memory, one way."""

    def output_tokens(self, r: RequestState) -> int:
        """Expected output length in tokens."""

    def output_tokens_p90(self, r: RequestState) -> int:
        """90 % quantile of the output length in tokens; the expected length if nothing more is
        known.
        """


class View(Protocol):
    """Read-only state of one instance. Lengths are methods, because a decode step updates no
    request.
    """

    @property
    def now_s(self) -> float:
        """Current time, in seconds from the start of the run."""

    @property
    def predict(self) -> Predictions:
        """Predicted iteration times and output lengths."""

    @property
    def policy_state(self) -> Any:
        """The object that the policy's `new_state()` returned; the engine keeps it."""

    @property
    def counters(self) -> Counters:
        """Counters of the policy's `mechanisms()` on this instance."""

    @property
    def block_size(self) -> int:
        """Number of tokens in one KV block."""

    @property
    def total_blocks(self) -> int:
        """Total KV blocks of the instance."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be allocated, including cached blocks that no request uses."""

    @property
    def host_free_blocks(self) -> int:
        """Free blocks of host memory for swapping."""

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for prefill."""

    @property
    def n_swapped(self) -> int:
        """Number of requests whose KV is in host memory or at their former instance."""

    @property
    def n_prefilling(self) -> int:
        """Number of requests in the batch with an incomplete prefill."""

    @property
    def remaining_prefill_tokens(self) -> int:
        """Prompt tokens that the prefilling requests still lack."""

    @property
    def n_decoding(self) -> int:
        """Number of requests in the batch that decode."""

    @property
    def n_running(self) -> int:
        """Number of requests in the batch."""

    @property
    def decode_kv_tokens(self) -> int:
        """Sum of KV lengths of the decoding requests."""

    @property
    def max_future_kv_tokens(self) -> int:
        """Most tokens that the requests in the batch may still add to the KV cache."""

    def waiting(self) -> Iterable[RequestState]:
        """Requests that wait for prefill, in no particular order."""

    def running(self) -> Iterable[RequestState]:
        """Requests in the batch, in no particular order."""

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Requests of a queue that fit now, in queue order (for `next_queue`)."""

    def kv_tokens(self, r: RequestState) -> int:
        """Tokens of `r` in the KV cache."""

    def emitted_tokens(self, r: RequestState) -> int:
        """Output tokens of `r` that are out."""

    def held_blocks(self, r: RequestState) -> int:
        """KV blocks that `r` holds."""

    def cached_tokens(self, r: RequestState) -> int:
        """Leading tokens of `r` that the prefix cache holds now."""
