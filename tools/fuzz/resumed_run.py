"""A `slo-bench run` against servers that others load, interrupted three times and resumed.

`Relay` stands before the gateway and counts the requests of the run, which cannot say what it sent
when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httptools

INTERRUPTS = (signal.SIGINT, signal.SIGKILL, signal.SIGINT)
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGKILL: -9}
_RATE_RPS, _REQUESTS = 0.5, 30  # of a cell: a minute
_CELLS_A_MINUTE = 0.55
_EARLIEST, _APART = 0.15, 0.15  # of the time: the first interrupt, and from one to the next
_PAUSE_S = 20.0  # before it is resumed where no server was up
_LATE_S = 900.0  # after the load, for the cells that are left


class Relay:
    """Passes connections on to a gateway; `results` counts the requests that were sent whole, by
    the status of a whole answer, or as `unanswered`.
    """

    def __init__(self, host: str, port: int, results: Counter[str], unanswered: str) -> None:
        self._host, self._port = host, port
        self._results, self._unanswered = results, unanswered

    async def listen(self) -> str:
        """Begin; returns the address."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unanswered = 0

        def sent() -> None:
            nonlocal unanswered
            unanswered += 1

        def answered() -> None:
            nonlocal unanswered
            if (status := answers.get_status_code()) != 100:
                unanswered -= 1
                self._results[str(status)] += 1

        requests = httptools.HttpRequestParser(SimpleNamespace(on_message_complete=sent))
        answers = httptools.HttpResponseParser(SimpleNamespace(on_message_complete=answered))
        gateway_reader, gateway_writer = await asyncio.open_connection(self._host, self._port)

        async def pump(
            source: asyncio.StreamReader,
            sink: asyncio.StreamWriter,
            parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
        ) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    parser.feed_data(data)
                    sink.write(data)

        pumps = {
            asyncio.ensure_future(pump(reader, gateway_writer, requests)),
            asyncio.ensure_future(pump(gateway_reader, writer, answers)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.1)  # for what is on its way
        gateway_writer.close()
        writer.close()
        await asyncio.wait(pumps)
        self._results[self._unanswered] += unanswered


class ResumedRun:
    """A run of so many cells that it ends within `minutes`, although some cells are begun twice."""

    def __init__(self, url: str, key_variable: str, key: str, place: Path, minutes: float) -> None:
        self._url, self._key_variable, self._place = url, key_variable, place
        self._environ = {**os.environ, key_variable: key}
        self._folder = place / "run"
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s + minutes * 60
        self._moments = [
            (self._begin_s + (_EARLIEST + _APART * k) * minutes * 60, number)
            for k, number in enumerate(INTERRUPTS)
        ]
        self.cells = max(4, round(minutes * _CELLS_A_MINUTE))
        self.interrupted: list[str] = []
        self.failures: list[int] = []  # exit codes of attempts that nobody interrupted
        self.problems: list[str] = []

    async def go(self) -> None:
        """Begin, interrupt and resume until the end."""
        with (self._place / "run.log").open("wb") as log:
            while time.monotonic() < self._end_s + _LATE_S:
                process = await asyncio.create_subprocess_exec(
                    *self._command(),
                    cwd=self._place,
                    env=self._environ,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                moment_s = self._moments[0][0] if self._moments else self._end_s + _LATE_S
                try:
                    async with asyncio.timeout(max(0.0, moment_s - time.monotonic())):
                        code = await process.wait()
                except TimeoutError:
                    await self._interrupt(process)
                    continue
                if code == 0:
                    break
                self.failures.append(code)
                await asyncio.sleep(_PAUSE_S)
        if self._moments:
            self.problems.append(f"run ended before {len(self._moments)} of its interrupts")
        self._check()

    async def _interrupt(self, process: asyncio.subprocess.Process) -> None:
        number = self._moments.pop(0)[1] if self._moments else signal.SIGKILL
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        code = await process.wait()
        cells = len(self._rows())
        self.interrupted.append(f"{number.name} with {cells} of {self.cells} cells: {code}")
        if code != _EXIT_CODES[number]:
            self.problems.append(f"run: exit code {code} after {number.name}")

    def _command(self) -> list[str]:
        words = [sys.executable, "-P", "-m", "slo_bench.cli.entry", "run", "--out", "run"]
        if (self._folder / "experiment.toml").is_file():
            return [*words, "--resume", "--no-report"]
        words += ["--base-url", self._url, "--api-key-env", self._key_variable]
        words += ["--workload", "synthetic", "--prompt-tokens", "16", "--output-tokens", "8"]
        words += ["--rates", str(_RATE_RPS), "--requests", str(_REQUESTS)]
        # Servers start beside it on the same cores: what counts here are requests, not times.
        words += ["--send-delay-limit", "60", "--records", "csv", "--no-report"]
        return [*words, "--seeds", str(self.cells)]

    def _rows(self) -> list[dict[str, str]]:
        table = self._folder / "cells.csv"
        if not table.is_file():
            return []
        with table.open(newline="") as file:
            return list(csv.DictReader(file))

    def _check(self) -> None:
        rows = self._rows()
        if len(rows) != self.cells or len({row["cell"] for row in rows}) != self.cells:
            self.problems.append(f"run: {len(rows)} rows for {self.cells} cells")
        self.outcomes: Counter[str] = Counter()
        for row in rows:
            with gzip.open(self._folder / "requests" / f"{row['cell']}.csv.gz", "rt") as file:
                requests = list(csv.DictReader(file))
            self.outcomes.update(request["outcome"] for request in requests)
            if [request["id"] for request in requests] != [str(n) for n in range(_REQUESTS)]:
                self.problems.append(f"run: {row['cell']} has {len(requests)} requests")
