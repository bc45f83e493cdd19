"""Hours of `slo-bench serve` with clients that vanish and servers that die and return.

    python tools/fuzz/serve_long.py --minutes 120 --samples samples.json
    python tools/fuzz/serve_long.py --vllm --run --rate 1.5 --disturb-every 120 --minutes 120

Three mock servers stand behind the gateway, or with `--vllm` two vLLM servers; each is started
again when it has died, which kill -9 brings about at random moments (sometimes of all at once).
Others are stopped (SIGSTOP) and go on later, or get the processor for a tenth of the time for a
while; one mock is silent to some requests and one breaks some answers off. With `--run`,
`slo-bench run` measures them meanwhile (`resumed_run.py`). Clients stay, vanish before or within
their answer, read slowly, keep their connection, send two requests at once, half a request, a body
that is too large, no key, or nothing; some shut their side once they have sent all.

At the end each request that was offered must have been counted by the gateway once: with the status
of a whole answer, as lost, as cancelled, or as refused before it was read whole. No request may
have been at two servers, or twice at one. Descriptors must be as many as before the first client,
and the memory of the last quarter that of the second (the first warms up).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httptools
from resumed_run import Relay, ResumedRun

from slo_bench.harness.servers.launch.environments import environment
from slo_bench.harness.servers.launch.random_model import make_model

KEY = "a-key"
KEY_VARIABLE = "SERVE_LONG_KEY"
SERVERS, VLLM_SERVERS = 3, 2
MOST_CONNECTIONS = 40
REQUEST_TIMEOUT_S, IDLE_TIMEOUT_S, FIRST_BYTE_S = 3.0, 8.0, 4.0
FAULTS = (["silent", "31"], ["reset", "29"], [])  # and how many requests have none
PATIENCE_S = 60.0
START_S = 900.0
VANISHED, CUT, INCOMPLETE = "vanished", "cut off", "not sent whole"
MEMORY_MARGIN = 1.05
EXPECTED = re.compile(
    r"^unix:\S+ is (down: .*|up again)$|^starting |^logs: |^\d+ running, |^http://"
    r"|^vllm-\S+ \(\S+\) (at unix:|is starting )"
)

# Stands where vLLM would: a server at the same socket, started again when it dies.
_PROGRAM = """\
#!{python}
import contextlib, os, signal, subprocess, sys, time
socket = sys.argv[sys.argv.index("--uds") + 1]
place = os.path.join({folder!r}, str(os.getpid()))
number = len(os.listdir({folder!r}))
open(place, "x").close()
while True:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket)
    server = subprocess.Popen(
        {command}, env={{**os.environ, **{variables!r}}}, start_new_session=True
    )
    with open(place, "w") as told:
        told.write(str(server.pid))
    server.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    time.sleep(1)
"""
_MOCK = "[sys.executable, '-P', '-c', {server!r}, socket, {received!r}, *{faults}[number]]"
_VLLM = "[{program!r}, *sys.argv[1:], '--enable-log-requests']"
_RECEIVED = re.compile(r"Received request cmpl-(\d+)-")  # in the log of vLLM
# It writes down the number of each request before it looks at it.
_SERVER = """\
import asyncio, os, sys
from slo_bench.harness.servers.http.http_server import serve
from slo_bench.harness.servers.mock.mock_answers import MockHandler
from slo_bench.harness.servers.mock.mock_config import InjectedFault, MockConfig
from slo_bench.harness.servers.mock.service import Service

socket, received, *fault = sys.argv[1:]
faults = dict(fault=InjectedFault(fault[0]), fault_every=int(fault[1])) if fault else {}
file = os.open(received, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

async def main():
    config = MockConfig(ttft_s=0.05, itl_s=0.02, **faults)
    handler = MockHandler(Service(config, asyncio.get_running_loop()), lambda: None)

    async def answer(request, reply):
        for name, value in request.headers:
            if name.lower() == b"x-request-id":
                os.write(file, value + b"\\n")
        await handler.answer(request, reply)

    await serve(answer, unix_socket=socket, ready=lambda url, stop: None)

asyncio.run(main())
"""


@dataclass
class Sample:
    """The state of the gateway at one time."""

    minutes: float
    offered: int
    rss_mib: float
    descriptors: int
    threads: int
    disturbances: dict[str, int]
    gateway: dict[str, int]
    clients: dict[str, int]


class Load:
    """Clients of one gateway, and what they saw: each request offered has one result."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self._rng = rng
        self.results: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._number = 0
        self._plain: dict[Callable[[], Awaitable[None]], int] = {
            self.stays: 8,
            self.shuts_its_side: 2,
            self.keeps_its_connection: 4,
            self.reads_slowly: 1,
            self.vanishes_within: 5,
            self.vanishes_at_once: 3,
            self.sends_two: 2,
            self.has_no_key: 1,
            self.is_too_large: 1,
            self.sends_half: 1,
            self.sends_half_and_goes: 1,
            self.says_nothing: 1,
        }

    def next(self) -> Awaitable[None]:
        """A client of a drawn kind."""
        kinds = list(self._plain)
        kind = self._rng.choices(kinds, list(self._plain.values()))[0]
        self.kinds[kind.__name__] += 1
        return kind()

    def request(self, *, key: bool = True, extra: int = 0, path: str = "/v1/completions") -> bytes:
        """The bytes of a request for some tokens, or of a GET."""
        auth = f"authorization: Bearer {KEY}\r\n" if key else ""
        if path != "/v1/completions":
            return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{auth}\r\n".encode()
        self._number += 1
        auth += f"x-request-id: {self._number}\r\n"
        body = json.dumps(
            {
                "model": "mock",
                "prompt": "a b c" + " d" * (extra // 2),
                "max_tokens": self._rng.randint(2, 60),
                "stream": self._rng.random() < 0.8,
            }
        )
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{auth}"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return (head + body).encode()

    async def stays(self) -> None:
        await self._whole([self.request()])

    async def shuts_its_side(self) -> None:
        """It sends no more, and reads its answer."""
        wire = await Wire.open(self.host, self.port)
        wire.send(self.request())
        wire.send_no_more()
        self.results[await wire.answer()] += 1
        wire.close()

    async def keeps_its_connection(self) -> None:
        await self._whole([self.request() for _ in range(self._rng.randint(2, 4))])

    async def reads_slowly(self) -> None:
        await self._whole([self.request()], pause_s=0.5)

    async def has_no_key(self) -> None:
        await self._whole([self.request(key=False)])

    async def is_too_large(self) -> None:
        await self._whole([self.request(extra=3 << 19)])

    async def sends_half(self) -> None:
        await self._whole([self.request()[:-5]])

    async def sends_two(self) -> None:
        """Both before the first answer; the second is not served if the first is cut off."""
        wire = await Wire.open(self.host, self.port)
        wire.send(self.request() + self.request())
        for left in (2, 1):
            result = await wire.answer()
            if result == CUT:
                self.results[CUT] += left
                break
            self.results[result] += 1
        wire.close()

    async def vanishes_within(self) -> None:
        wire = await Wire.open(self.host, self.port)
        wire.send(self.request())
        await wire.some()
        await asyncio.sleep(self._rng.uniform(0, 0.4))
        wire.close(reset=self._rng.random() < 0.5)
        self.results[VANISHED] += 1

    async def vanishes_at_once(self) -> None:
        wire = await Wire.open(self.host, self.port)
        wire.send(self.request())
        await asyncio.sleep(self._rng.choice([0, 0.001, 0.03]))
        wire.close()  # a RST would discard the request before it is read
        self.results[VANISHED] += 1

    async def sends_half_and_goes(self) -> None:
        await self._unasked(self.request()[:-5], REQUEST_TIMEOUT_S / 2)

    async def says_nothing(self) -> None:
        await self._unasked(b"", IDLE_TIMEOUT_S * 2)

    async def _unasked(self, begin: bytes, wait_s: float) -> None:
        """A client that has offered no request, unless it is refused at once."""
        wire = await Wire.open(self.host, self.port)
        wire.send(begin)
        try:
            async with asyncio.timeout(wait_s):
                result = await wire.answer()
            if result == "503" or (result == CUT and begin):
                self.results[result] += 1
            else:
                self.results[INCOMPLETE] += 1
        except TimeoutError:  # it may have been refused just now
            wire.send_no_more()
            result = await wire.answer()
            self.results[INCOMPLETE if result == CUT else result] += 1
        wire.close()

    async def crowd(self) -> None:
        """More connections than the gateway takes, at the same time."""
        self.kinds["crowd"] += 1
        wires = [await Wire.open(self.host, self.port) for _ in range(MOST_CONNECTIONS + 10)]
        for wire in wires:
            wire.send(self.request(path="/v1/models"))
        for wire in wires:
            self.results[await wire.answer()] += 1
        for wire in wires:
            wire.close()
        await asyncio.sleep(0.5)

    async def _whole(self, requests: list[bytes], pause_s: float = 0.0) -> None:
        """Requests one after the other on one connection, until it is lost."""
        wire = await Wire.open(self.host, self.port)
        for request in requests:
            wire.send(request)
            result = await wire.answer(pause_s)
            self.results[result] += 1
            if not wire.stays:
                break
        wire.close()

    async def counters(self) -> dict[str, int] | None:
        """The gateway's counts; None if it did not take this request."""
        wire = await Wire.open(self.host, self.port)
        wire.send(self.request(path="/metrics"))
        result = await wire.answer()
        self.results[result] += 1
        wire.close()
        if result != "200":
            return None
        pattern = r'^slo_bench_gateway_(requests\w*|connections)(?:\{\w+="(\w+)"\})? (\d+)$'
        matches = re.findall(pattern, wire.body.decode(), re.MULTILINE)
        return {f"{name} {label}".strip(): int(count) for name, label, count in matches}


class Wire:
    """One connection of a client; httptools reads the answers, which come in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._answers: list[tuple[str, bytes]] = []
        self._pieces: list[bytes] = []
        self._status = ""
        self.stays = True
        self.body = b""

    @classmethod
    async def open(cls, host: str, port: int) -> Wire:
        return cls(*await asyncio.open_connection(host, port))

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._writer.write(data)

    async def some(self) -> None:
        with contextlib.suppress(OSError):
            await self._reader.read(400)

    async def answer(self, pause_s: float = 0.0) -> str:
        """Read an answer; its status, or `CUT` without its end."""
        try:
            while not self._answers:
                async with asyncio.timeout(PATIENCE_S):
                    data = await self._reader.read(200 if pause_s else 65536)
                if not data:
                    raise ConnectionError
                self._parser.feed_data(data)
                await asyncio.sleep(pause_s)
        except TimeoutError:
            raise
        except OSError:
            self.stays = False
            return CUT
        status, self.body = self._answers.pop(0)
        return status

    def on_headers_complete(self) -> None:
        self._status = str(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._status == "100":
            return
        self.stays = self._parser.should_keep_alive()
        self._answers.append((self._status, b"".join(self._pieces)))
        self._pieces = []

    def send_no_more(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def close(self, *, reset: bool = False) -> None:
        if reset:  # RST in place of FIN
            raw_socket = self._writer.get_extra_info("socket")
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()


def prepare(home: Path, pids: Path, received: Path, vllm: Path | None) -> None:
    """An environment whose vLLM is the mock, or starts the program `vllm` again and again."""
    path = home / "environments" / "vllm-0.32.0-cpu"
    (path / "bin").mkdir(parents=True)
    pids.mkdir()
    marker = {"backend": "vllm", "version": "0.32.0", "device": "cpu"}
    (path / "slo-bench.json").write_text(json.dumps(marker))
    program = path / "bin" / "vllm"
    variables = {}
    if vllm is None:
        command = _MOCK.format(server=_SERVER, received=str(received), faults=FAULTS)
        variables["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    else:
        command = _VLLM.format(program=str(vllm))
    program.write_text(
        _PROGRAM.format(
            python=sys.executable, folder=str(pids), command=command, variables=variables
        )
    )
    program.chmod(0o755)
    (path / "bin" / "python").symlink_to(sys.executable)


def start(place: Path, vllm: Path | None) -> tuple[subprocess.Popen[str], str]:
    """`slo-bench serve` with limits and a key; its process and address."""
    home, pids = place / "home", place / "pids"
    prepare(home, pids, place / "received", vllm)
    if vllm is None:
        (place / "tiny").mkdir()
        (place / "tiny" / "config.json").write_text("{}")
    else:
        make_model(place / "tiny")
    words = ["serve", "vllm", "--backend", "vllm", "--model", "tiny", "--router", "least-loaded"]
    words += ["--served-name", "mock", "--startup-timeout", str(START_S), "--instances"]
    words += [str(SERVERS if vllm is None else VLLM_SERVERS), "--max-body-mib", "1"]
    words += ["--api-key-env", KEY_VARIABLE]
    words += ["--max-connections", str(MOST_CONNECTIONS), "--request-timeout"]
    words += [str(REQUEST_TIMEOUT_S), "--idle-timeout", str(IDLE_TIMEOUT_S)]
    words += ["--first-byte-timeout", str(FIRST_BYTE_S), "--log", str(place / "server.log")]
    with (place / "said").open("w") as stderr_file:
        served = subprocess.Popen(
            [sys.executable, "-P", "-m", "slo_bench.cli.entry", *words],
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
            cwd=place,
            env={**os.environ, "SLO_BENCH_HOME": str(home), KEY_VARIABLE: KEY},
            start_new_session=True,
        )
    assert served.stdout is not None
    return served, served.stdout.readline().strip()


class Disturbances:
    """Servers that are killed, stopped for a while and slowed, and how often."""

    def __init__(self, pids: Path, rng: random.Random) -> None:
        self._pids, self._rng = pids, rng
        self.counts: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    def next(self) -> None:
        """Kill, stop or slow one server, two or all."""
        rng = self._rng
        pid_files = sorted(self._pids.iterdir())
        counts = range(1, len(pid_files) + 1)
        chosen = rng.sample(pid_files, rng.choices(counts, [8, 1, 1][: len(counts)])[0])
        how = rng.choices([self._kill, self._stop, self._slow], [3, 2, 1])[0]
        for path in chosen:
            with contextlib.suppress(ValueError):
                task = asyncio.ensure_future(how(rng.choice(processes(int(path.read_text())))))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
                self.counts[how.__name__.removeprefix("_")] += 1

    async def _kill(self, pid: int) -> None:
        _signal(pid, signal.SIGKILL)

    async def _stop(self, pid: int) -> None:
        _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([1, 5, 25]))
        _signal(pid, signal.SIGCONT)

    async def _slow(self, pid: int) -> None:
        for _ in range(50):
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            _signal(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)


def processes(server: int) -> list[int]:
    """A server, and the process with the engine of a vLLM server."""
    engines = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        engines = [n for n in children if Path(f"/proc/{n}/comm").read_text().startswith("VLLM")]
    return [server, *map(int, engines)]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def looked_at(pid: int) -> tuple[float, int, int]:
    """Resident memory in MiB, open descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss, threads = (
        int(re.findall(rf"^{n}:\s+(\d+)", status, re.M)[0]) for n in ("VmRSS", "Threads")
    )
    return rss / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads


async def disturb(
    served: subprocess.Popen[str], url: str, place: Path, options: argparse.Namespace
) -> tuple[list[Sample], Load, ResumedRun | None]:
    """Load for so many minutes, a sample now and then; the last one when all clients are gone."""
    rng = random.Random(options.seed)
    load = Load(url, rng)
    samples: list[Sample] = []
    running: set[asyncio.Future[None]] = set()
    disturbances = Disturbances(place / "pids", rng)
    begin_s = time.monotonic()

    async def sample() -> None:
        counters = await load.counters()
        if counters is None:
            return
        now = (time.monotonic() - begin_s) / 60
        rss, descriptors, threads = looked_at(served.pid)
        offered = load.results.total() - load.results[INCOMPLETE]
        samples.append(
            Sample(
                round(now, 2), offered, round(rss, 2), descriptors, threads,
                dict(disturbances.counts), counters, dict(load.results),
            )
        )  # fmt: skip
        if options.samples:
            with options.samples.open("a") as kept:
                kept.write(json.dumps(asdict(samples[-1])) + "\n")
                kept.flush()
                os.fsync(kept.fileno())

    def ended(task: asyncio.Future[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            load.results[f"error {type(error).__name__}"] += 1

    def begin(client: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(client)
        running.add(task)
        task.add_done_callback(ended)
        return task

    await sample()
    resumed, run_ended = None, None
    if options.run:
        relay = Relay(load.host, load.port, load.results, VANISHED)
        resumed = ResumedRun(await relay.listen(), KEY_VARIABLE, KEY, place, options.minutes)
        run_ended = asyncio.ensure_future(resumed.go())
    next_kill_s = next_sample_s = begin_s + 10
    next_crowd_s = begin_s + 20
    end_s = begin_s + options.minutes * 60
    while (now_s := time.monotonic()) < end_s and served.poll() is None:
        begin(load.next())
        if now_s > next_kill_s:
            disturbances.next()
            next_kill_s = now_s + rng.uniform(0.25, 1.75) * options.disturb_every
        if now_s > next_crowd_s:
            await asyncio.wait([begin(load.crowd())])  # meanwhile no others: some would be refused
            next_crowd_s = now_s + 60
        if now_s > next_sample_s:
            await sample()
            next_sample_s = now_s + options.every
        await asyncio.sleep(rng.expovariate(options.rate))
    if disturbances.tasks:
        await asyncio.wait(disturbances.tasks)
    if running:
        await asyncio.wait(running, timeout=2 * PATIENCE_S)
    if run_ended is not None:
        await run_ended
    for path in (place / "pids").iterdir():  # their idle connections go with them
        os.kill(int(path.read_text()), signal.SIGKILL)
    await asyncio.sleep(6)
    await sample()
    return samples, load, resumed


def problems_of(
    samples: list[Sample], stderr: str, code: int, left: list[str], received_twice: list[str]
) -> list[str]:
    """What must not be."""
    first, last = samples[0], samples[-1]
    gateway, clients = last.gateway, last.clients
    problems = []
    received = gateway["requests_received_total"]
    ended = {k.split()[1]: n for k, n in gateway.items() if k.startswith("requests_total ")}
    refused = {k.split()[1]: n for k, n in gateway.items() if "_refused_" in k}
    if received != sum(ended.values()) + 1:  # the request for the counters is in progress
        problems.append(f"{received} requests received, {sum(ended.values()) + 1} ended")
    if last.offered != received + sum(refused.values()):
        problems.append(f"{last.offered} offered, {received} received and {refused} refused")
    lost_clients = clients.get(VANISHED, 0) + clients.get(CUT, 0)
    for status in sorted(
        {*ended, *refused, *clients} - {"cancelled", "lost", VANISHED, CUT, INCOMPLETE}
    ):
        counted = ended.get(status, 0) + refused.get(status, 0) + (status == "200")
        client_count = clients.get(status, 0)
        if not client_count <= counted <= client_count + lost_clients:
            problems.append(
                f"{status}: {client_count} seen by clients, {counted} counted by the gateway"
            )
    if ended.get("cancelled", 0) > lost_clients:
        problems.append(
            f"{ended['cancelled']} cancelled, but {lost_clients} vanished or were cut off"
        )
    if last.descriptors > first.descriptors + SERVERS:  # a connection for the health of each
        problems.append(f"descriptors: {first.descriptors} at first, {last.descriptors} at last")
    if gateway["connections"] != 1:
        problems.append(f"{gateway['connections'] - 1} connections are left")
    quarter = len(samples) // 4
    if quarter:
        early = statistics.median(s.rss_mib for s in samples[quarter : 2 * quarter])
        late = statistics.median(s.rss_mib for s in samples[-quarter:])
        if late > early * MEMORY_MARGIN:
            problems.append(
                f"memory: {early:.1f} MiB in the second quarter, {late:.1f} in the last"
            )
    odd = [line for line in stderr.splitlines() if not EXPECTED.match(line)]
    if odd:
        problems.append(f"{len(odd)} unexpected lines on standard error, the first: {odd[0][:200]}")
    if code != 143:
        problems.append(f"exit code {code} after SIGTERM")
    if received_twice:
        problems.append(f"requests that servers received twice: {received_twice}")
    if left:
        problems.append(f"processes are left: {left}")
    return problems


def table(samples: list[Sample], rows: int = 13) -> list[str]:
    """Some of the samples, evenly over the time."""
    count = min(rows, len(samples))
    chosen = [samples[round(k * (len(samples) - 1) / max(1, count - 1))] for k in range(count)]
    lines = [
        "| min | offered | 200 | cancelled | lost | 502 to 504 | refused | killed, stopped, slowed "
        "| RSS, MiB | descriptors |",
        "|" + "---:|" * 10,
    ]
    for sample in chosen:
        counters = sample.gateway
        ended = {k.split()[1]: n for k, n in counters.items() if k.startswith("requests_total ")}
        refused = sum(n for k, n in counters.items() if "_refused_" in k)
        disturbed = ", ".join(str(sample.disturbances.get(n, 0)) for n in ("kill", "stop", "slow"))
        failed = sum(ended.get(code, 0) for code in ("502", "503", "504"))
        lines.append(
            f"| {sample.minutes:.1f} | {sample.offered} | {ended.get('200', 0)} | "
            f"{ended.get('cancelled', 0)} | {ended.get('lost', 0)} | {failed} | {refused} | "
            f"{disturbed} | {sample.rss_mib:.1f} | {sample.descriptors} |"
        )
    return lines


def still_there(place: Path) -> list[str]:
    """Command lines of processes that were started in this folder and have not ended."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == place:
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                command_lines.append(words.decode("utf-8", "replace"))
    return command_lines


def received_numbers(place: Path) -> Counter[str]:
    """Numbers of the requests that servers received, and how often."""
    numbers: Counter[str] = Counter()
    if (place / "received").is_file():
        numbers.update((place / "received").read_text().split())
    for path in place.glob("server-*.log"):
        numbers.update(_RECEIVED.findall(path.read_text("utf-8", "replace")))
    return numbers


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--rate", type=float, default=4, help="clients per second")
    parser.add_argument("--every", type=float, default=15, help="seconds between samples")
    parser.add_argument(
        "--disturb-every", type=float, default=20, help="seconds between kills, stops and slowings"
    )
    parser.add_argument("--vllm", action="store_true", help="two installed vLLM servers")
    parser.add_argument("--run", action="store_true", help="slo-bench run measures them meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="file for one JSON line per sample")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and stop `serve`
    # What a shell starts in the background ignores Ctrl-C, and so would the run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.samples:
        options.samples.write_text("")
    vllm = environment("vllm").programs / "vllm" if options.vllm else None
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        served, url = start(place, vllm)
        try:
            if not url:
                print((place / "said").read_text())
                return 2
            samples, load, resumed = asyncio.run(disturb(served, url, place, options))
            served.terminate()
            code = served.wait(PATIENCE_S)
            left = still_there(place)
        finally:
            served.kill()
        stderr = (place / "said").read_text()
        numbers = received_numbers(place)
    print("\n".join(table(samples)))
    print(f"clients by kind: {dict(load.kinds)}")
    print(f"clients saw: {dict(sorted(load.results.items()))}")
    print(f"the gateway counted: {samples[-1].gateway}")
    print(f"servers received {numbers.total()} requests, {len(numbers)} of them different")
    twice = [number for number, count in numbers.items() if count > 1]
    if not numbers:
        twice.append("not known: no request stands in a log")
    problems = problems_of(samples, stderr, code, left, twice)
    if resumed is not None:
        print(f"run: {'; '.join(resumed.interrupted)}; {dict(resumed.outcomes)}")
        print(f"run: exit codes without an interrupt: {resumed.failures}")
        problems += resumed.problems
    print(f"{len(problems)} problems")
    for problem in problems:
        print(f"    {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
