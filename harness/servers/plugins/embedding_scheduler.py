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
from ...core.counters import Counters
from ...core.decisions import Admission
from ...core.predictions import LearnedPredictions
from ...core.state import Phase, RequestState
from ...core.wire import REJECTED, priority_from_wire, slo_from_wire, waited_s
from .contract import EMBED_PASSES, EmbedderBeside, StepLog
from .guarded import PolicyErrors

_LOOK_EVERY_S = 0.005  # while requests wait for memory
_MOST_BYTES = 1 << 16

Message = Mapping[str, Any]


class Host(Protocol):
    """The language model's server for the scheduler; read and changed under `lock` alone."""

    lock: AbstractContextManager[Any]
    policy_state: Any
    counters: Counters

    @property
    def total_kv_blocks(self) -> int:
        """KV blocks of the server."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""

    @property
    def n_running(self) -> int:
        """Requests in the batch."""

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
    """The queue of an embedder, and the conversation with the gateway that holds its texts."""

    def __init__(
        self,
        host: Host,
        policy: Collocated,
        spec: EmbedderBeside,
        errors: PolicyErrors,
        *,
        clock: Callable[[], float] = time.time,
        log: StepLog | None = None,
    ) -> None:
        self.host = host
        self.clock = clock
        self.waiting: dict[int, RequestState] = {}  # in order of arrival
        self.running: list[RequestState] = []
        self.held_blocks = 0
        self.ends_s = 0.0  # of the pass in progress, as predicted
        self._policy = policy
        self._errors = errors
        self._spec = spec
        self._log = log
        self._learned = LearnedPredictions()
        self._passes = dict.fromkeys(EMBED_PASSES, 0)
        self._view = _View(self)
        if isinstance(host.policy_state, Beside):
            host.policy_state.embedder = self._view

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
                self.waiting.clear()
                if self.running:
                    self._end(None)

    def _converse(self, gateway: socket.socket) -> None:
        said = b""
        while True:
            gateway.settimeout(_LOOK_EVERY_S if self.waiting and not self.running else None)
            lines: list[bytes] = []
            with contextlib.suppress(TimeoutError):
                piece = gateway.recv(_MOST_BYTES)
                if not piece:
                    return
                *lines, said = (said + piece).split(b"\n")
            answers = self.step(map(json.loads, lines))
            if answers:
                gateway.settimeout(None)
                gateway.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in answers))

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
            self.waiting.pop(message["leave"], None)
        elif self.running:
            self._end(message["end"])
        self.host.embedder_changed(self._passes)

    # ---------------------------------------------------------------- requests and passes

    def _arrive(self, message: Message) -> str:
        """Ask the policy about a request; returns the reason if it is rejected, else nothing."""
        values, number = message["values"], message["arrive"]
        arrival_s = self.clock() - waited_s(values)
        r = RequestState(
            number, arrival_s, message["prompt_tokens"], 0, 0, slo_from_wire(values, arrival_s)
        )
        r.seq = number
        r.num_inputs = message["num_inputs"]
        r.priority = priority_from_wire(values)
        if (needed := self._view.blocks((r,))) > self.host.total_kv_blocks:
            return (
                f"{REJECTED}: a pass over it takes {needed} KV blocks, and there are "
                f"{self.host.total_kv_blocks}"
            )
        admission = self._asked("embed_admit", Collocated.embed_admit, r, self._view)
        if admission is Admission.REJECT:
            return f"{REJECTED} by the policy"
        self.waiting[number] = r
        return ""

    def _begin(self) -> list[int]:
        """Begin the pass that the policy chooses, if any; returns its requests."""
        if self.running or not self.waiting:
            return []
        batch = list(self._asked("embed_batch", Collocated.embed_batch, self._view))
        if not batch:
            return []
        blocks = self._view.blocks(batch)
        numbers = [r.id for r in batch]
        if len(set(numbers)) < len(batch) or not self.waiting.keys() >= set(numbers):
            raise SloBenchError(
                f"{type(self._policy).__name__}.embed_batch chose a request twice, or one that is "
                "not here"
            )
        if blocks > self.host.free_blocks():
            raise SloBenchError(
                f"{type(self._policy).__name__}.embed_batch chose a pass of {blocks} blocks, but "
                f"{self.host.free_blocks()} are free"
            )
        now_s = self.clock()
        self.host.take_blocks(blocks)
        self.held_blocks, self.running = blocks, batch
        self.ends_s = now_s + self._view.pass_s(batch)
        for r in batch:
            del self.waiting[r.id]
            r.first_scheduled_s, r.phase = now_s, Phase.PREFILL
        for name, n in zip(
            EMBED_PASSES, (1, len(batch), sum(r.num_inputs for r in batch), blocks), strict=True
        ):
            self._passes[name] += n
        self.host.embedder_changed(self._passes)
        return numbers

    def _end(self, duration_s: float | None) -> None:
        """The pass has ended: its memory is free."""
        tokens = sum(r.prompt_tokens for r in self.running)
        if duration_s is not None:
            self._learned.learn(0, 0, ((0, tokens),), duration_s)
        if self._log is not None:
            self._log.write(
                "pass",
                time_s=self.clock(),
                duration_s=duration_s,
                requests=[r.id for r in self.running],
                texts=sum(r.num_inputs for r in self.running),
                tokens=tokens,
                blocks=self.held_blocks,
            )
        self.host.return_blocks()
        for r in self.running:
            r.finish_s, r.phase = self.clock(), Phase.DONE
        self.held_blocks, self.running = 0, []
        self.host.embedder_changed(self._passes)

    def blocks_of(self, tokens: int) -> int:
        """KV blocks with the memory of a pass over so many tokens."""
        return -(-tokens * self._spec.activation_bytes_per_token // self.host.block_bytes)

    def predicted_s(self, tokens: int) -> float:
        """Seconds of such a pass, learned from earlier ones; 0 before."""
        return self._learned.step_s(0, 0, ((0, tokens),))

    def _asked(self, name: str, otherwise: Callable[..., Any], *about: Any) -> Any:
        """The answer of a hook; where it raises, that of a policy without coordination."""
        try:
            return getattr(self._policy, name)(*about)
        except SloBenchError:
            raise
        except Exception as error:
            self._errors.note(type(self._policy).__name__, name, error, None)
            return otherwise(self._policy, *about)


class _View:
    """Implements `core.collocated_policy.EmbedView` over a scheduler."""

    def __init__(self, scheduler: EmbeddingScheduler) -> None:
        self._scheduler = scheduler

    @property
    def now_s(self) -> float:
        now_s = self._scheduler.clock()
        return max(now_s, self._scheduler.ends_s) if self._scheduler.running else now_s

    @property
    def policy_state(self) -> Any:
        return self._scheduler.host.policy_state

    @property
    def counters(self) -> Counters:
        return self._scheduler.host.counters

    @property
    def total_blocks(self) -> int:
        return self._scheduler.host.total_kv_blocks

    @property
    def free_blocks(self) -> int:
        return self._scheduler.host.free_blocks()

    @property
    def held_blocks(self) -> int:
        return self._scheduler.held_blocks

    @property
    def llm_running(self) -> int:
        return self._scheduler.host.n_running

    def waiting(self, now_s: float) -> Sequence[RequestState]:
        return list(self._scheduler.waiting.values())

    def running(self) -> Sequence[RequestState]:
        return list(self._scheduler.running)

    def oldest_llm_arrival_s(self) -> float:
        return self._scheduler.host.oldest_waiting_arrival_s()

    def blocks(self, batch: Iterable[RequestState]) -> int:
        return self._scheduler.blocks_of(sum(r.prompt_tokens for r in batch))

    def pass_s(self, batch: Iterable[RequestState]) -> float:
        return self._scheduler.predicted_s(sum(r.prompt_tokens for r in batch))
