"""A decoder over several processes: layers and KV heads move between them in mid-generation.

A layer moves with its weights and its KV; the activations then go to where it is and come back
(layer migration of BanaServe, Eqs. 4-1 to 4-3). KV heads move without weights: a helper keeps their
KV and computes their attention from the queries, keys and values of each step (attention migration,
Eqs. 4-4 and 4-5; heads need no common softmax). Every row is computed by the same operations in the
same order wherever that happens, so that tokens stay the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import wire
from .batch import Batch, Decodes
from .cache import KvCache
from .decoder import Decoder, store
from .errors import ModelError, WorkerError
from .pipeline import Carrier, Pipeline, Traffic

_HERE = 0


@dataclass(frozen=True)
class Move:
    """What moved, and how long that took from its order to its being in place."""

    what: str  # `layers` or `heads`
    layers: tuple[int, ...]
    source: int
    target: int
    moved_bytes: int
    seconds: float


class Workers:
    """So many worker processes on this machine, for as long as the block lasts.

    Raises:
        WorkerError: they did not start in time.
    """

    def __init__(self, count: int, timeout_s: float = 60.0) -> None:
        self.count = count
        self._timeout_s = timeout_s
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        self._folder = tempfile.TemporaryDirectory(prefix="slo-bench-workers-")
        store_file = Path(self._folder.name) / "store"
        path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
        size = self.count + 1
        try:
            for rank in range(1, size):
                argv = [str(store_file), str(rank), str(size), str(self._timeout_s)]
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.worker", *argv],
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,
                )
                self.processes.append(process)
            wire.join(store_file, _HERE, size, self._timeout_s)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is None and problem == (None, None, None):
                try:
                    wire.send(rank, None)
                except WorkerError:
                    break
        wire.leave()
        self._stop()

    def _stop(self) -> None:
        for process in self.processes:
            try:
                process.wait(5.0 if process.poll() is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def ask(self, rank: int, what: str, *arguments: Any) -> Any:
        """Call a method of `worker.Worker` there.

        Raises:
            WorkerError: it has ended, or does not answer.
        """
        self.tell(rank, (what, arguments))
        try:
            return wire.receive(rank)
        except WorkerError:
            self._check(rank)
            raise

    def tell(self, rank: int, message: Any) -> int:
        """Send without waiting for an answer; the bytes sent."""
        self._check(rank)
        return wire.send(rank, message)

    def _check(self, rank: int) -> None:
        code = self.processes[rank - 1].poll()
        if code is not None:
            raise WorkerError(f"worker {rank} has ended with exit code {code}; its KV is lost")


class _SpreadCarrier:
    """Carries the traffic of an iteration here and at the workers."""

    def __init__(self, here: Pipeline, workers: Workers, busy: Callable[[], Sequence[int]]) -> None:
        self._here = here
        self._workers = workers
        self._busy = busy
        self._told: Sequence[int] = ()
        self.ready = here.ready
        self.computed = here.computed

    def begin(self, traffic: Traffic) -> None:
        """See `Carrier`."""
        self._told = self._busy()
        for rank in self._told:
            self._workers.ask(rank, "prefetch", traffic)
        self._here.begin(traffic)

    def drain(self) -> None:
        """See `Carrier`."""
        self._here.drain()
        for rank in self._told:
            self._workers.ask(rank, "drain")


class Spread(Decoder):
    """A decoder whose layers, or their KV heads, may be elsewhere. `cache` is its own part."""

    def __init__(self, decoder: Decoder, cache: KvCache, workers: Workers) -> None:
        super().__init__(decoder.config, decoder.weights)
        self._cache = cache
        self._workers = workers
        self._at = [_HERE] * decoder.config.layers
        self._helped: dict[int, tuple[int, int]] = {}  # by layer: helper, its KV heads
        self.moves: list[Move] = []
        for rank in range(1, workers.count + 1):
            workers.ask(rank, "begin", decoder.config)

    def carrier(self, cache: list[Tensor]) -> Carrier:
        """See `Decoder`: each worker carries what lives there."""
        here = Pipeline(cache.__getitem__, lambda: [n for n, at in enumerate(self._at) if not at])
        return _SpreadCarrier(here, self._workers, self._busy)

    def _busy(self) -> list[int]:
        """Workers where anything of this model lives."""
        helpers = {helper for helper, _ in self._helped.values()}
        return sorted(({*self._at} | helpers) - {_HERE})

    def logits(self, batch: Batch, cache: list[Tensor], carrier: Carrier) -> Tensor:
        """See `Decoder`."""
        x, turn = self.embedded(batch), self.turn(batch)
        for rank, group in groupby(range(self.config.layers), self._at.__getitem__):
            numbers = list(group)
            if rank != _HERE:
                x = self._workers.ask(rank, "run", numbers, x, batch)
                continue
            for n in numbers:
                layer = self.weights.layers[n]
                carrier.ready(n)
                if n in self._helped:
                    queries, keys, values = self.projected(x, layer, turn)
                    seen = self._attended(n, queries, keys, values, cache[n], batch)
                    x = self.rest(x, seen, layer)
                else:
                    x = self.layer(x, layer, cache[n], batch, turn)
                carrier.computed(n)
        return self.head(x, batch)

    def _attended(
        self, n: int, queries: Tensor, keys: Tensor, values: Tensor, kv: Tensor, batch: Batch
    ) -> Tensor:
        helper, theirs = self._helped[n]
        mine = self.config.kv_heads - theirs
        cut = mine * self.config.group
        away = (n, queries[:, cut:], keys[:, mine:], values[:, mine:], self._of(batch, theirs))
        self._workers.tell(helper, ("attend", away))
        own = self._of(batch, mine)
        store(kv, keys[:, :mine], values[:, :mine], own)
        here = self.attention(queries[:, :cut], keys[:, :mine], values[:, :mine], kv, own)
        return torch.cat([here, wire.receive(helper)], 1)

    def _of(self, batch: Batch, heads: int) -> Batch:
        """The same batch where only so many KV heads of it are."""
        every, size = self.config.kv_heads, self._cache.block_tokens
        slots = batch.slots.view(-1, every)[:, 0]
        block, place = slots // (every * size), slots % size
        rows = block.unsqueeze(1) * heads + torch.arange(heads, device=slots.device)
        decodes = batch.decodes
        if decodes is not None:
            mask = decodes.mask.view(-1, every, 1, size)[:, :heads].reshape(-1, 1, size)
            fields = {**vars(decodes), "mask": mask}
            decodes = Decodes(**fields)
        told = {**vars(batch), "slots": (rows * size + place.unsqueeze(1)).ravel()}
        return Batch(**{**told, "decodes": decodes})

    # ---------------------------------------------------------------- moving

    def move_layers(self, layers: Sequence[int], target: int) -> Move:
        """Weights and KV of these layers go to worker `target` (0: here), between two steps.

        Raises:
            ModelError: one is where it shall go, or has heads elsewhere.
            WorkerError: a worker is gone.
        """
        sources = {self._at[n] for n in layers}
        if len(sources) != 1 or target in sources or any(n in self._helped for n in layers):
            raise ModelError(
                f"layers {list(layers)} cannot move to {target}: they must be together elsewhere, "
                "with all their heads"
            )
        source, begin_s, moved = sources.pop(), time.perf_counter(), 0
        for n in layers:
            if source == _HERE:
                layer, kv = self.weights.layers[n], self._cache.layers[n]
            else:
                layer, kv = self._workers.ask(source, "give_layer", n)
            if target == _HERE:
                self._put(n, layer, kv)
                moved += kv.nbytes + layer.weight_bytes
            else:
                moved += self._workers.tell(target, ("take_layer", (n, layer, kv)))
                wire.receive(target)
                self._put(n, layer, kv[:, :0].clone())
            self._at[n] = target
        return self._moved("layers", tuple(layers), source, target, moved, begin_s)

    def _put(self, n: int, layer: Any, kv: Tensor) -> None:
        self.weights.layers[n] = layer
        self._cache.layers[n] = kv

    def move_heads(self, n: int, heads: int, helper: int) -> Move:
        """The last `heads` KV heads of layer `n`, which is here, go to worker `helper`.

        Raises:
            ModelError: the layer is elsewhere, is helped already, or has no more heads than that.
            WorkerError: the worker is gone.
        """
        mine = self.config.kv_heads - heads
        if self._at[n] != _HERE or n in self._helped or heads < 1 or mine < 1:
            raise ModelError(f"{heads} KV heads of layer {n} cannot move to worker {helper}")
        begin_s, kv = time.perf_counter(), self._cache.layers[n]
        moved = self._workers.tell(helper, ("take_heads", (n, kv[:, :, mine:].clone())))
        wire.receive(helper)
        self._cache.layers[n] = kv[:, :, :mine].clone()
        self._helped[n] = (helper, heads)
        return self._moved("heads", (n,), _HERE, helper, moved, begin_s)

    def return_heads(self, n: int) -> Move:
        """The heads of layer `n` that a helper has come back.

        Raises:
            WorkerError: the worker is gone.
        """
        helper, _ = self._helped[n]
        begin_s = time.perf_counter()
        kv = self._workers.ask(helper, "give_heads", n)
        self._cache.layers[n] = torch.cat([self._cache.layers[n], kv], 2)
        del self._helped[n]
        return self._moved("heads", (n,), helper, _HERE, kv.nbytes, begin_s)

    def _moved(
        self,
        what: str,
        layers: tuple[int, ...],
        source: int,
        target: int,
        moved_bytes: int,
        begin_s: float,
    ) -> Move:
        seconds = time.perf_counter() - begin_s
        self.moves.append(Move(what, layers, source, target, moved_bytes, seconds))
        return self.moves[-1]
