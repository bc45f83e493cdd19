"""Passes of an embedding server, decided on by the policy inside the language model's server.

The gateway holds the texts of embedding requests and says here what arrives, leaves and ends. The
policy answers with rejections and with the requests of the next pass, whose memory is taken out of
the server's KV blocks until the pass has ended. Lines of JSON over a Unix socket:

    to the scheduler    {"arrive": N, "num_inputs": …, "prompt_tokens": …, "values": {…}}
                        {"leave": N}         the client has gone; a begun pass goes on
                        {"end": SECONDS}     the pass has ended and took so long; null: failed
    from the scheduler  {"begin": [N, …]}    the requests of the next pass
                        {"reject": N, "because": …}

One gateway is served at a time. When it is gone, its requests are forgotten.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ....workloads.errors import SloBenchError
from ...core.collocated_policy import Beside, Collocated
from ...core.decisions import Admission
from ...core.predictions import LearnedPredictions
from ...core.state import Phase, RequestState
from ...core.wire import REJECTED, priority_from_wire, slo_from_wire, waited_s
from .contract import EMBED_PASSES, EmbedderBeside
from .hosted import HostedPolicy

_LOOK_EVERY_S = 0.005  # while requests wait for memory
_MOST_BYTES = 1 << 16

Message = Mapping[str, Any]


class Host(Protocol):
    """The language model's server for the scheduler; read and changed under `lock` alone."""

    lock: AbstractContextManager[Any]

    @property
    def total_kv_blocks(self) -> int:
        """KV blocks of the server."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""

    @property
    def n_running(self) -> int:
        """Number of requests in the batch."""

    def free_blocks(self) -> int:
        """KV blocks that nothing holds."""

    def oldest_waiting_arrival_s(self) -> float:
        """Arrival of the first waiting request; infinite if none waits."""

    def take_blocks(self, blocks: int) -> None:
        """Take KV blocks for a pass."""

    def return_blocks(self) -> None:
        """Give the blocks of the pass back."""

    def embedder_changed(self, passes: Mapping[str, int]) -> None:
        """Something arrived, began or ended here; `passes` are the counts of `EMBED_PASSES`."""


class EmbeddingScheduler:
    """The queue of an embedder, and the conversation with the gateway that holds its texts.

    Implements `core.collocated_policy.EmbedView` for the policy.
    """

    def __init__(
        self,
        host: Host,
        policy: Collocated,
        spec: EmbedderBeside,
        hosted: HostedPolicy,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`policy` is that of `hosted`."""
        self.host = host
        self.policy_state: Any = hosted.state
        self.counters = hosted.counters
        self.held_blocks = 0
        self._policy = policy
        self._hosted = hosted
        self._spec = spec
        self._clock = clock
        self._waiting: dict[int, RequestState] = {}  # in order of arrival
        self._running: list[RequestState] = []
        self._ends_s = 0.0  # of the pass in progress, as predicted
        self._learned = LearnedPredictions()
        self._passes = dict.fromkeys(EMBED_PASSES, 0)
        if isinstance(self.policy_state, Beside):
            self.policy_state.embedder = self

    # ---------------------------------------------------------------- read by the policy

    @property
    def now_s(self) -> float:
        now_s = self._clock()
        return max(now_s, self._ends_s) if self._running else now_s

    @property
    def total_blocks(self) -> int:
        return self.host.total_kv_blocks

    @property
    def free_blocks(self) -> int:
        return self.host.free_blocks()

    @property
    def llm_running(self) -> int:
        return self.host.n_running

    def waiting(self, now_s: float) -> Sequence[RequestState]:
        return list(self._waiting.values())

    def next_waiting(self, now_s: float) -> RequestState | None:
        return next(iter(self._waiting.values()), None)

    def running(self) -> Sequence[RequestState]:
        return list(self._running)

    def oldest_llm_arrival_s(self) -> float:
        return self.host.oldest_waiting_arrival_s()

    def blocks(self, batch: Iterable[RequestState]) -> int:
        tokens = sum(r.prompt_tokens for r in batch)
        return -(-tokens * self._spec.activation_bytes_per_token // self.host.block_bytes)

    def pass_s(self, batch: Iterable[RequestState]) -> float:
        """Seconds of a pass, learned from earlier ones; 0 before."""
        return self._learned.step_s(0, 0, ((0, sum(r.prompt_tokens for r in batch)),))

    # ---------------------------------------------------------------- the conversation

    def listen(self) -> None:
        """Listen from now on, in a thread.

        Raises:
            OSError: the socket cannot be bound.
        """
        path = Path(self._spec.socket)
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(1)
        threading.Thread(
            target=self._serve, args=(listening,), name="embedding scheduler", daemon=True
        ).start()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            gateway, _ = listening.accept()
            with gateway, contextlib.suppress(OSError):
                self._converse(gateway)
            with self.host.lock:
                self._waiting.clear()
                if self._running:
                    self._end(None)

    def _converse(self, gateway: socket.socket) -> None:
        received = b""
        while True:
            gateway.settimeout(_LOOK_EVERY_S if self._waiting and not self._running else None)
            lines: list[bytes] = []
            with contextlib.suppress(TimeoutError):
                piece = gateway.recv(_MOST_BYTES)
                if not piece:
                    return
                *lines, received = (received + piece).split(b"\n")
            answers = self.step(map(json.loads, lines))
            if answers:
                gateway.settimeout(None)
                gateway.sendall(b"".join(json.dumps(answer).encode() + b"\n" for answer in answers))

    def step(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Take the gateway's messages, let the policy decide, and return the answers."""
        with self.host.lock:
            answers = [answer for message in messages for answer in self._hear(message)]
            begun = self._begin()
            if begun:
                answers.append({"begin": begun})
            return answers

    def _hear(self, message: Message) -> Iterator[dict[str, Any]]:
        if "arrive" in message:
            because = self._arrive(message)
            if because:
                yield {"reject": message["arrive"], "because": because}
        elif "leave" in message:
            self._waiting.pop(message["leave"], None)
        elif self._running:
            self._end(message["end"])
        self.host.embedder_changed(self._passes)

    # ---------------------------------------------------------------- requests and passes

    def _arrive(self, message: Message) -> str:
        """Ask the policy about a request; returns the reason if it is rejected, else nothing."""
        values, number = message["values"], message["arrive"]
        arrival_s = self._clock() - waited_s(values)
        r = RequestState(
            number, arrival_s, message["prompt_tokens"], 0, 0, slo_from_wire(values, arrival_s)
        )
        r.seq = number
        r.num_inputs = message["num_inputs"]
        r.priority = priority_from_wire(values)
        if (needed := self.blocks((r,))) > self.host.total_kv_blocks:
            return (
                f"{REJECTED}: a pass over it takes {needed} KV blocks, and there are "
                f"{self.host.total_kv_blocks}"
            )
        admission = self._asked("embed_admit", Collocated.embed_admit, r, self)
        if admission is Admission.REJECT:
            return f"{REJECTED} by the policy"
        self._waiting[number] = r
        return ""

    def _begin(self) -> list[int]:
        """Begin the pass that the policy chooses, if any; returns its requests."""
        if self._running or not self._waiting:
            return []
        batch = list(self._asked("embed_batch", Collocated.embed_batch, self))
        if not batch:
            return []
        blocks = self.blocks(batch)
        numbers = [r.id for r in batch]
        if len(set(numbers)) < len(batch) or not self._waiting.keys() >= set(numbers):
            raise SloBenchError(
                f"{type(self._policy).__name__}.embed_batch chose a request twice, or one that is "
                "not here"
            )
        if blocks > self.host.free_blocks():
            raise SloBenchError(
                f"{type(self._policy).__name__}.embed_batch chose a pass of {blocks} blocks, but "
                f"{self.host.free_blocks()} are free"
            )
        now_s = self._clock()
        self.host.take_blocks(blocks)
        self.held_blocks, self._running = blocks, batch
        self._ends_s = now_s + self.pass_s(batch)
        for r in batch:
            del self._waiting[r.id]
            r.first_scheduled_s, r.phase = now_s, Phase.PREFILL
        for name, n in zip(
            EMBED_PASSES, (1, len(batch), sum(r.num_inputs for r in batch), blocks), strict=True
        ):
            self._passes[name] += n
        self.host.embedder_changed(self._passes)
        return numbers

    def _end(self, duration_s: float | None) -> None:
        """The pass has ended: its memory is free."""
        tokens = sum(r.prompt_tokens for r in self._running)
        if duration_s is not None:
            self._learned.learn(0, 0, ((0, tokens),), duration_s)
        self._hosted.log.write(
            "pass",
            time_s=self._clock(),
            duration_s=duration_s,
            requests=[r.id for r in self._running],
            texts=sum(r.num_inputs for r in self._running),
            tokens=tokens,
            blocks=self.held_blocks,
        )
        self.host.return_blocks()
        for r in self._running:
            r.finish_s, r.phase = self._clock(), Phase.DONE
        self.held_blocks, self._running = 0, []
        self.host.embedder_changed(self._passes)

    def _asked(self, name: str, otherwise: Callable[..., Any], *about: Any) -> Any:
        """The answer of a hook; where it raises, that of a policy without coordination."""
        try:
            return getattr(self._policy, name)(*about)
        except SloBenchError:
            raise
        except Exception as error:
            self._hosted.errors.note(type(self._policy).__name__, name, error, None)
            return otherwise(self._policy, *about)
