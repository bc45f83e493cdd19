"""Slots for low-rank adapters on one instance, as vLLM's `--max-loras`.

The requests of a batch have at most as many adapters as there are slots. A request whose adapter
has no slot then waits, and later ones that fit go before it. An adapter keeps its slot until
another needs it; the one that was used longest ago leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..state import RequestState

NO_ADAPTER = -1


class AdapterSlots:
    """`adapter_of` has the adapter of each request by its id, or `NO_ADAPTER`.

    Loading one takes `load_s` seconds before the next iteration.
    """

    __slots__ = ("_active", "_adapter_of", "_load_s", "_loaded", "_slots", "loads")

    def __init__(self, adapter_of: Sequence[int], slots: int, load_s: float) -> None:
        self._adapter_of = adapter_of
        self._slots = slots
        self._load_s = load_s
        self._loaded: OrderedDict[int, None] = OrderedDict()  # used longest ago first
        self._active: set[int] = set()
        self.loads = 0

    def begin(self, batch: Iterable[RequestState]) -> None:
        """The batch before requests enter."""
        self._active = {self._adapter_of[r.id] for r in batch} - {NO_ADAPTER}

    def admits(self, r: RequestState) -> bool:
        """Whether the batch may take `r`."""
        adapter = self._adapter_of[r.id]
        return adapter == NO_ADAPTER or adapter in self._active or len(self._active) < self._slots

    def enter(self, r: RequestState) -> float:
        """`r` enters the batch. Returns the seconds that loading its adapter takes."""
        adapter = self._adapter_of[r.id]
        if adapter == NO_ADAPTER:
            return 0.0
        self._active.add(adapter)
        was_loaded = adapter in self._loaded
        self._loaded[adapter] = None
        self._loaded.move_to_end(adapter)
        if was_loaded:
            return 0.0
        self.loads += 1
        if len(self._loaded) > self._slots:
            del self._loaded[
                next(candidate for candidate in self._loaded if candidate not in self._active)
            ]
        return self._load_s
