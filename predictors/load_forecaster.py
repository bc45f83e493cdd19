"""How much load the near future brings, by the last seconds."""

from __future__ import annotations

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
        seen = self._seen
        while seen and seen[0][0] < now_s - self._window_s:
            _, texts, blocks = seen.popleft()
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
