"""What servers do while they are served: a line from their metrics, now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from ...harness.load_generator.metrics_source import MetricsSource
from ...harness.load_generator.observed import Window
from ...harness.load_generator.server_metrics import MetricsSnapshot
from ...harness.servers.server_kinds import metrics_by_server
from ...reports.figures.figure import percent_text, rate_text, seconds_text
from ...workloads.errors import SloBenchError
from .progress import DESCRIPTION, LINE_EVERY_S, display

READ_EVERY_S = 5.0  # reading takes a server some milliseconds
_LIMIT_S = 1.0  # for an answer: who reads also looks whether servers still run


class ServingStatus:
    """Reads the metrics of servers one after the other; one that has none is left out."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._sources: dict[str, MetricsSource] = {}
        self._urls = urls
        self._before: dict[str, MetricsSnapshot] = {}

    def line(self, now_s: float) -> str | None:
        """What the servers hold, and what has happened since the last reading; "" where they are
        idle, None where nothing is known.
        """
        snapshots = {
            url: snapshot for url in self._urls if (snapshot := self._read(url, now_s)) is not None
        }
        before, self._before = self._before, snapshots
        if not snapshots:
            return None
        held = [
            sum(snapshot.figures.get(name, 0.0) for snapshot in snapshots.values())
            for name in ("running", "waiting")
        ]
        windows = [
            Window(before[url], snapshot) for url, snapshot in snapshots.items() if url in before
        ]
        arrivals = sum(window.arrivals for window in windows)
        tokens = sum(window.grown("output_tokens") for window in windows)
        if not any((arrivals, tokens, *held)):
            return ""
        parts = [f"{held[0]:.0f} running, {held[1]:.0f} waiting"]
        usages = [
            snapshot.kv_usage for snapshot in snapshots.values() if snapshot.kv_usage is not None
        ]
        if usages:
            parts.append(f"KV {percent_text(sum(usages) / len(usages))}")
        if windows:
            span_s = max(window.span_s for window in windows)
            parts.append(f"{rate_text(arrivals / span_s)} req/s")
            parts.append(f"{rate_text(tokens / span_s)} tokens/s")
        ttft = [window.counts("ttft") for window in windows]
        if (first_tokens := sum(histogram.count for histogram in ttft)) > 0:
            parts.append(
                f"TTFT {seconds_text(sum(histogram.total for histogram in ttft) / first_tokens)}"
            )
        return ", ".join(parts)

    def _read(self, url: str, now_s: float) -> MetricsSnapshot | None:
        try:
            if url not in self._sources:
                self._sources[url] = MetricsSource(url, {}, metrics_by_server(), limit_s=_LIMIT_S)
            source = self._sources[url]
            return None if source.is_prometheus else source.read(now_s)
        except SloBenchError:  # it starts, has ended, or has no metrics
            return None


@contextlib.contextmanager
def serving_display(urls: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Yields a function to be called again and again, which shows what the servers do.

    On a terminal the last line changes; elsewhere a line is printed every `LINE_EVERY_S` seconds in
    which there were requests.
    """
    on_terminal = sys.stderr.isatty()
    every_s = READ_EVERY_S if on_terminal else LINE_EVERY_S
    status, read_s = ServingStatus(urls), time.monotonic()
    with display("Spinner", "TimeElapsed", DESCRIPTION) as change:
        change(description="served" if on_terminal else "")

        def look() -> None:
            nonlocal read_s
            if time.monotonic() - read_s < every_s:
                return
            read_s = time.monotonic()
            line = status.line(read_s)
            idle = "the servers tell no metrics" if line is None else "no request now"
            change(description=line or (idle if on_terminal else ""))

        yield look
