"""How much load the near future brings, by the last seconds."""

from __future__ import annotations

import math
from collections import deque


class LoadForecaster:
    """Arrivals of the near future, at the mean rate of the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque()  # time, texts, blocks
        self._texts = self._blocks = 0

    def saw(self, now_s: float, blocks: int, texts: int = 1) -> None:
        """Record a request that needs that many blocks."""
        self._seen.append((now_s, texts, blocks))
        self._texts += texts
        self._blocks += blocks

    def blocks_within(self, now_s: float, horizon_s: float) -> float:
        """Blocks that the arrivals of the next `horizon_s` seconds will need together."""
        arrivals = self._seen
        while arrivals and arrivals[0][0] < now_s - self._window_s:
            _, texts, blocks = arrivals.popleft()
            self._texts -= texts
            self._blocks -= blocks
        over_s = min(self._window_s, now_s)
        return self._blocks * horizon_s / over_s if over_s > 0 else 0.0

    @property
    def any(self) -> bool:
        """Whether a request has come lately."""
        return bool(self._seen)

    def blocks_per_text(self) -> float:
        """Of the requests in the window."""
        return self._blocks / self._texts if self._texts else 0.0


class DecayingForecaster(LoadForecaster):
    """Arrivals of the near future, at a rate in which an arrival weighs less the longer ago it was:
    exponentially, with the time constant `window_s`. It follows bursts sooner than the mean of a
    window and forgets none abruptly.
    """

    def __init__(self, window_s: float) -> None:
        super().__init__(window_s)
        self._weighed_blocks = self._weighed_texts = self._at_s = 0.0

    def saw(self, now_s: float, blocks: int, texts: int = 1) -> None:
        self._decay(now_s)
        self._weighed_blocks += blocks
        self._weighed_texts += texts

    def blocks_within(self, now_s: float, horizon_s: float) -> float:
        self._decay(now_s)
        # Since the start at 0 the weights add up to less than the time constant.
        weight_s = -self._window_s * math.expm1(-now_s / self._window_s)
        return self._weighed_blocks * horizon_s / weight_s if weight_s > 0 else 0.0

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            share = math.exp((self._at_s - now_s) / self._window_s)
            self._weighed_blocks *= share
            self._weighed_texts *= share
            self._at_s = now_s

    @property
    def any(self) -> bool:
        return self._weighed_blocks > 0

    def blocks_per_text(self) -> float:
        return self._weighed_blocks / self._weighed_texts if self._weighed_texts else 0.0


FORECASTERS = {"window": LoadForecaster, "decay": DecayingForecaster}
