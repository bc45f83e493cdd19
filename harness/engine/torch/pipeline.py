"""Transfer of KV layer by layer, in parallel to the computation.

While layer i is computed, layer i+1 is loaded from a store and layer i-1 is written to it
(BanaServe, §4.3.3, Eq. 4-10 to 4-14): a thread loads all layers in their order, another stores the
computed layers. On CUDA both use the stream of the computation, in order with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .threads import unpin
from .tiers import UnitShape


@dataclass(frozen=True)
class Traffic:
    """What one iteration loads before a layer is computed, and stores afterwards: files of units,
    each with the blocks that it fills, or that fill it.
    """

    shape: UnitShape
    loads: Sequence[tuple[str, list[int]]] = ()
    stores: Sequence[tuple[str, list[int]]] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)


@dataclass
class TransferTotals:
    """Sums over iterations. `waited_s`: seconds for which the computation waited for loads and
    stores; the rest of `load_s` and `store_s` was hidden.
    """

    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_bytes: int = 0
    store_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class Pipeline:
    """Carries the traffic of an iteration for the layers in one process; without any, nothing of
    this waits.

    Args:
        kv_of: the KV of a layer here, [2, blocks, its KV heads, block tokens, head_dim]; where it
            has not all heads, they are the first, or with `last` the last.
        layers: which are here now, in their order.
    """

    kv_of: Callable[[int], Tensor]
    layers: Callable[[], Iterable[int]]
    last: bool = False
    carried: TransferTotals = field(default_factory=TransferTotals)

    def __post_init__(self) -> None:
        self._loader = ThreadPoolExecutor(1, "loads KV", unpin)
        self._storer = ThreadPoolExecutor(1, "stores KV", unpin)
        self._read: list[tuple[Tensor, Tensor]] = []
        self._written: list[tuple[Tensor, Tensor]] = []
        self._loaded: dict[int, Future[None]] = {}
        self._stored: list[Future[None]] = []

    def begin(self, traffic: Traffic) -> None:
        """All layers are computed next, in their order; loading begins."""
        shape = traffic.shape
        self._read = [(shape.mapped(path), torch.tensor(ids)) for path, ids in traffic.loads]
        self._written = [
            (shape.mapped(path, new=True), torch.tensor(ids)) for path, ids in traffic.stores
        ]
        if self._read:
            self._loaded = {n: self._loader.submit(self._load, n) for n in self.layers()}

    def ready(self, layer: int) -> None:
        """Return when the layer's KV is there."""
        if layer in self._loaded:
            self._wait(self._loaded.pop(layer))

    def computed(self, layer: int) -> None:
        """The layer's new KV may be stored."""
        if self._written:
            self._stored.append(self._storer.submit(self._store, layer))

    def drain(self) -> None:
        """Return when all is stored: the blocks may be overwritten."""
        stored, self._stored = self._stored, []
        loaded, self._loaded = self._loaded, {}
        for future in (*loaded.values(), *stored):
            self._wait(future)
        self._read, self._written = [], []

    def _wait(self, future: Future[None]) -> None:
        begin_s = time.perf_counter()
        future.result()
        self.carried.waited_s += time.perf_counter() - begin_s

    def _load(self, layer: int) -> None:
        begin_s, kv = time.perf_counter(), self.kv_of(layer)
        with torch.inference_mode():
            for unit, blocks in self._read:
                part = unit[layer][:, :, self._part(unit, kv)]
                kv.index_copy_(1, blocks.to(kv.device), part.to(kv.device))
                self.carried.loaded_bytes += part.nbytes
        self.carried.load_s += time.perf_counter() - begin_s

    def _store(self, layer: int) -> None:
        begin_s, kv = time.perf_counter(), self.kv_of(layer)
        with torch.inference_mode():
            for unit, blocks in self._written:
                part = unit[layer][:, :, self._part(unit, kv)]
                part.copy_(kv.index_select(1, blocks.to(kv.device)))
                self.carried.stored_bytes += part.nbytes
        self.carried.store_s += time.perf_counter() - begin_s

    def _part(self, unit: Tensor, kv: Tensor) -> slice:
        """The heads of a unit that are here."""
        here, all_heads = kv.shape[2], unit.shape[3]
        return slice(all_heads - here, all_heads) if self.last else slice(0, here)
