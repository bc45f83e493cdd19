"""Embedding requests go to embedders, all others to language models."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.state import RequestState
from ..engines.instance import Instance
from .routers import Router, load


class ByKind:
    """A router for each kind of instance: embedders get what they embed, the fewest first."""

    watches = True

    def __init__(
        self, router: Router, models: Sequence[Instance], embedders: Sequence[Instance]
    ) -> None:
        self._router = router
        self._models = models
        self._embedders = embedders

    def dispatch(self, r: RequestState, instances: Sequence[Instance]) -> Instance:
        """The instance that gets `r`."""
        if not r.texts:
            return self._router.dispatch(r, self._models)
        return min(self._embedders, key=lambda i: (load(i), i.index))
