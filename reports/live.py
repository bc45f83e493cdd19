"""A folder's report at a local address, written anew as cells finish.

The page at `/` holds the report in a frame, asks `/state` every two seconds and loads the frame
again when the version has changed. Its place on the page is kept. Above the frame it shows what the
run does now and the phases that are over, such as the start of a server, before a cell is finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import escape

from ..harness.results.run_folder import CAPACITY_FILE, CELLS, PLANNED, TUNED
from ..harness.servers.http import http_server
from ..harness.servers.http.allowed_hosts import AllowedHosts
from ..harness.servers.http.prometheus import CONTENT_TYPE, Sample, exposition, labels
from ..workloads.errors import SloBenchError
from ..workloads.parsing import parse_json
from .pages.document import asset
from .pages.run_page import write_report
from .pages.tuning import rewrite_tuning

_WATCHED = (CELLS, CAPACITY_FILE, TUNED)
_LABELS = ("cell", "system", "workload", "model", "gpu", "rate_rps", "seed")
CELL_METRICS = (
    *("requests", "attainment", "goodput_rps", "throughput_rps", "ttft_p50_s", "ttft_p99_s"),
    *("tpot_p50_s", "tpot_p99_s"),
)
_KINDS = {
    "slo_bench_cells_finished": "gauge",
    **{f"slo_bench_cell_{column}": "gauge" for column in CELL_METRICS},
}
_TIME = re.compile(r" \(\d+ s\)$")
_HTML = "text/html; charset=utf-8"


@dataclass
class LiveStatus:
    """What a run does: its phases, and the cells that run now, each in a line."""

    running: Sequence[str] = ()
    _begin_s: float = field(default_factory=time.monotonic)
    _phases: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "preparing")])

    def begin(self, phase: str) -> None:
        """The run has come to this phase, or is still in it; the one before it is over.

        A time in brackets at its end is left out: the status has its own.
        """
        phase = _TIME.sub("", phase)
        if phase != self._phases[-1][1]:
            self._phases.append((time.monotonic() - self._begin_s, phase))

    def plain(self) -> dict[str, Any]:
        """Seconds since the begin, phases with begin and end (the last: None), running cells."""
        ends_s = [*(round(begin_s, 1) for begin_s, _ in self._phases[1:]), None]
        phases = [
            {"phase": phase, "begin_s": round(begin_s, 1), "end_s": end_s}
            for (begin_s, phase), end_s in zip(self._phases, ends_s, strict=False)
        ]
        passed_s = round(time.monotonic() - self._begin_s, 1)
        return {"passed_s": passed_s, "phases": phases, "running": list(self.running)}


@dataclass
class LiveReport:
    """The report of a folder in which cells are being finished."""

    folder: Path
    status: LiveStatus | None = None
    _version: str = ""
    _page: bytes = b""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def version(self) -> str:
        """Changes whenever a result has been added to the folder."""
        files = [(self.folder / name) for name in _WATCHED]
        return " ".join(str(file.stat().st_mtime_ns) for file in files if file.is_file())

    def text(self) -> str:
        """How far the run is, and why finished cells are invalid."""
        rows = self._rows()
        done = len(rows)
        if not done:
            return f"{self.folder}: no cell is finished yet"
        planned = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            environment = (self.folder / "environment.json").read_text(encoding="utf-8")
            planned = parse_json(environment).get(PLANNED)
        total = f" of {planned:,}" if isinstance(planned, int) else ""
        invalid = [row for row in rows if row.get("valid") == "False"]
        reason = invalid[0].get("invalid_because") if invalid else None
        left_out = f", {len(invalid):,} of them invalid" if invalid else ""
        because = f": {reason}" if reason else ""
        return f"{self.folder}: {done:,}{total} cells finished{left_out}{because}"

    def metrics(self) -> str:
        """The finished cells as metrics of Prometheus: those of `cells.csv` by cell."""
        rows = self._rows()
        samples: list[Sample] = [("slo_bench_cells_finished", "", len(rows))]
        for row in rows:
            cell_labels = labels(**{name: row[name] for name in _LABELS if row.get(name)})
            for column in CELL_METRICS:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    samples.append((f"slo_bench_cell_{column}", cell_labels, float(row[column])))
        return exposition(_KINDS, samples)

    def _rows(self) -> list[dict[str, str]]:
        """Rows of the finished cells in cells.csv."""
        file = self.folder / CELLS
        if not file.is_file():
            return []
        with file.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))

    async def page(self) -> bytes:
        """The report of what is there, or why there is none."""
        async with self._lock:  # one at a time, however many look
            version = self.version()
            if version != self._version or not self._page:
                self._page = await asyncio.to_thread(self._written)
                self._version = version
            return self._page

    def _written(self) -> bytes:
        with tempfile.TemporaryDirectory() as there:
            try:
                return write_folder(self.folder, Path(there) / "report.html").read_bytes()
            except SloBenchError as error:
                message = str(error) if (self.folder / CELLS).is_file() else "Waiting for results."
                return f"<!doctype html><p>{escape(message)}</p>".encode()

    async def answer(self, request: http_server.HttpRequest, reply: http_server.Reply) -> None:
        """Answer `/`, `/report`, `/state` and `/metrics`."""
        if request.method != "GET":
            http_server.refuse(reply, 405, "only GET is answered")
        elif request.path == "/":
            http_server.respond(reply, asset("live.html").encode(), _HTML)
        elif request.path == "/report":
            http_server.respond(reply, await self.page(), _HTML)
        elif request.path == "/metrics":
            http_server.respond(reply, self.metrics().encode(), CONTENT_TYPE)
        elif request.path == "/state":
            status = {} if self.status is None else self.status.plain()
            http_server.respond_json(
                reply, {"version": self.version(), "text": self.text(), **status}
            )
        else:
            http_server.refuse(reply, 404, f"there is no {request.path}; / is the report")


@contextlib.contextmanager
def live_report(
    folder: Path,
    status: LiveStatus | None = None,
    *,
    port: int = 0,
    names: tuple[str, ...] = (),
) -> Iterator[str]:
    """Serve a folder's report on this machine and yield its address, until the block ends. It has
    the `names` besides those of this machine.

    `status` is shown above the report.

    Raises:
        SloBenchError: the port is taken.
    """

    async def run(ready: http_server.Ready) -> None:
        clients = http_server.Clients(hosts=AllowedHosts("127.0.0.1", names))
        handler = LiveReport(folder, status).answer
        await http_server.serve(handler, port=port, clients=clients, ready=ready)

    with http_server.in_thread("live report", run) as served:
        yield served.url


def write_folder(folder: Path, out: Path) -> Path:
    """Write the report of a run folder, or of a folder of `slo-bench tune`, and return `out`.

    Raises:
        SloBenchError: the folder is incomplete or malformed, or `out` cannot be written.
    """
    if (folder / TUNED).is_file():
        rewrite_tuning(folder, out)
        return out
    return write_report([folder], out)
