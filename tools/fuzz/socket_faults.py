"""A fault at every socket call of the load generator's client and of the gateway, one at a time.

    python tools/fuzz/socket_faults.py --side client
    python tools/fuzz/socket_faults.py --side gateway --moments 100

As curl's torture tests fail every call that can fail. A preloaded library (`socket_faults.c`, needs
a C compiler) counts the calls of a process on Internet sockets: read, write, connect, accept4,
socket, setsockopt. Each is let fail once with each of the errors that it may have, write or read a
single byte, or find the end of the stream.

Each attempt is a process forked from one that has imported everything. Every request must be
answered or failed by name, and without need none: an error that only says "again", or a short write
or read, changes nothing, and any other fault costs the request that it strikes and no more. Nothing
may hang, the next request must be served, and as many descriptors be open as before. At the gateway
every request that it received must be counted once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.gateway import GatewayPlan, serving
from slo_bench.harness.servers.mock import MockConfig, serving_apart
from slo_bench.workloads.workload import Workload

SHORT, END = -1, -2
_KINDS = ("", "read", "write", "connect", "accept", "socket", "setsockopt")
FAULTS: dict[str, tuple[int, ...]] = {
    "read": (errno.EAGAIN, errno.EINTR, SHORT, errno.ECONNRESET, errno.ENOMEM, END),
    "write": (errno.EAGAIN, errno.EINTR, SHORT, errno.ECONNRESET, errno.EPIPE, errno.ENOBUFS),
    "connect": (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH),
    "accept": (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EMFILE, errno.ENFILE),
    "socket": (errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
    "setsockopt": (errno.ENOBUFS, errno.EINVAL),
}
_HARMLESS = {errno.EAGAIN, errno.EINTR, SHORT}
_SOURCE = Path(__file__).with_suffix(".c")
_HANG_S = 30
_REQUESTS = 6
_TOKENS = 4
_MOCK = MockConfig(ttft_s=0.004, itl_s=0.002)
_UP_S = 10.0


def costs(kinds: list[str], number: int, action: int) -> int:
    """Most requests that the fault may cost."""
    if number > len(kinds):
        return 0
    if kinds[number - 1] == "accept" and action in (errno.EMFILE, errno.ENFILE):
        return 3  # libuv accepts and closes all that connect at that moment
    return int(action not in _HARMLESS or kinds[number - 1] in ("connect", "socket", "setsockopt"))


def name_of(action: int) -> str:
    return {SHORT: "one byte", END: "end of stream"}.get(action) or errno.errorcode[action]


def shim() -> Any:
    """The preloaded library, or None."""
    here = ctypes.CDLL(None)
    return here if hasattr(here, "faults_arm") else None


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a fork with the end of a pipe to write to; the child and our end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    code = 1
    try:
        os.close(ours)
        work(theirs)
        code = 0
    except BaseException:
        os.write(theirs, (json.dumps({"error": traceback.format_exc()}) + "\n").encode())
    finally:
        os._exit(code)


class ChildLines:
    """Lines of JSON from a child, for so long."""

    def __init__(self, child: int, pipe: int) -> None:
        self.child, self._pipe = child, pipe
        self._left = b""

    def next(self) -> dict[str, Any]:
        until_s = time.monotonic() + _HANG_S
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._pipe], [], [], max(0, until_s - time.monotonic()))
            data = os.read(self._pipe, 65536) if ready else b""
            if not ready:
                return {"error": f"nothing within {_HANG_S} s: it hangs"}
            if not data:
                return {"error": "it ended without a word"}
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        report: dict[str, Any] = json.loads(line)
        return report

    def end(self) -> None:
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


def kinds_seen(library: Any) -> list[str]:
    return [_KINDS[library.faults_kind(k)] for k in range(1, library.faults_seen() + 1)]


# -------------------------------------------------------------------------------- the client


def _workload(requests: int) -> Workload:
    some = np.full(requests, _TOKENS)
    return Workload(np.arange(requests) * 0.01, some, some, concurrency=min(2, requests))


def client(url: str, number: int, action: int) -> tuple[dict[str, Any], str | None]:
    """Send a few requests with a fault at a call; what was told, and what must not be."""

    def work(pipe: int) -> None:
        library = shim()
        workload = _workload(_REQUESTS)
        options = HttpOptions(
            send_delay_limit_s=60.0,
            rate_limit_share=1.0,
            processes=1,
            time_limit_s=10.0,
            stall_limit_s=3.0,
        )
        measure(_workload(1), [Endpoint.parse(url)], options)  # uvloop keeps some descriptors
        before = descriptors()
        library.faults_arm(number, action)
        measurement = measure(workload, [Endpoint.parse(url)], options)
        library.faults_disarm()
        summary = {
            "kinds": kinds_seen(library),
            "outcomes": measurement.result.records.outcome.tolist(),
            "tokens": measurement.columns.output_tokens.tolist(),
            "details": {str(row): text for row, text in measurement.details.items()},
            "faults": {fault.value: n for fault, n in measurement.faults().items()},
            "descriptors": descriptors() - before,
        }
        os.write(pipe, (json.dumps(summary) + "\n").encode())

    lines = ChildLines(*forked(work))
    try:
        report = lines.next()
    finally:
        lines.end()
    if "error" in report:
        return report, report["error"][-600:]
    bad = [row for row, outcome in enumerate(report["outcomes"]) if outcome != Outcome.FINISHED]
    unnamed = [row for row in bad if str(row) not in report["details"]]
    if report["descriptors"]:
        return report, f"{report['descriptors']} descriptors are left"
    if unnamed:
        return report, f"requests {unnamed} failed without a reason"
    if len(bad) > costs(report["kinds"], number, action):
        return report, f"{len(bad)} requests failed: {report['details']}"
    whole = [n for row, n in enumerate(report["tokens"]) if row not in bad]
    if any(n != _TOKENS for n in whole):
        return report, f"tokens of finished requests: {whole}"
    return report, None


# -------------------------------------------------------------------------------- the gateway


def _request(*, stream: bool, close: bool = False) -> bytes:
    body = json.dumps({"prompt": "a b", "max_tokens": _TOKENS, "stream": stream})
    ending = "connection: close\r\n" if close else ""
    head = "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n"
    return f"{head}{ending}content-length: {len(body)}\r\n\r\n{body}".encode()


def _answer(wire: socket.socket) -> str:
    """Read one answer: its status, `cut` without its end, or `hang`."""
    data = b""
    try:
        while not _whole(data):
            received = wire.recv(65536)
            if not received:
                return "cut"
            data += received
    except TimeoutError:
        return "hang"
    except OSError:
        return "cut"
    return data.split()[1].decode()


def _whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    length = re.search(rb"content-length: (\d+)", head)
    return body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length[1])


def _clients(address: tuple[str, int]) -> Counter[str]:
    """What some clients of the gateway get, one after the other."""
    results: Counter[str] = Counter()

    def connected() -> socket.socket:
        return socket.create_connection(address, timeout=_HANG_S / 3)

    with connected() as wire:  # stays, for three requests
        for _ in range(3):
            wire.sendall(_request(stream=True))
            results[status := _answer(wire)] += 1
            if status in ("cut", "hang"):
                break
    for close in (True, False):
        with connected() as wire:
            wire.sendall(_request(stream=False, close=close))
            results[_answer(wire)] += 1
    with connected() as wire:  # leaves in the middle
        wire.sendall(_request(stream=True))
        with contextlib.suppress(OSError):
            wire.recv(10)
        results["left"] += 1
    return results


def _counters(address: tuple[str, int]) -> dict[str, int]:
    with socket.create_connection(address, timeout=_HANG_S / 3) as wire:
        wire.sendall(b"GET /metrics HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        text = b"".join(iter(lambda: wire.recv(65536), b"")).decode()
    pattern = r'^slo_bench_gateway_(requests\w*)(?:\{\w+="(\w+)"\})? (\d+)$'
    return {f"{name} {label}".strip(): int(n) for name, label, n in re.findall(pattern, text, re.M)}


def gateway(urls: list[str], number: int, action: int) -> tuple[dict[str, Any], str | None]:
    """Requests through a gateway with a fault at a call; what was told, and what must not be."""
    hears, says = os.pipe()

    def work(pipe: int) -> None:
        library = shim()
        os.close(says)
        with serving(GatewayPlan([Endpoint.parse(url) for url in urls])):
            pass  # uvloop keeps some descriptors for good
        before = descriptors()
        with serving(GatewayPlan([Endpoint.parse(url) for url in urls])) as url:
            library.faults_arm(number, action)
            os.write(pipe, (json.dumps({"url": url}) + "\n").encode())
            os.read(hears, 1)  # the clients have got what they get
            kinds = kinds_seen(library)
            library.faults_disarm()
            os.write(pipe, (json.dumps({"kinds": kinds}) + "\n").encode())
            os.read(hears, 1)
        summary = {"descriptors": descriptors() - before}
        os.write(pipe, (json.dumps(summary) + "\n").encode())

    child, pipe = forked(work)
    os.close(hears)
    lines = ChildLines(child, pipe)
    try:
        report = lines.next()
        if "error" in report:
            return report, report["error"]
        parts = urlsplit(report["url"])
        assert parts.hostname is not None
        assert parts.port is not None
        address = (parts.hostname, parts.port)
        results = _clients(address)
        os.write(says, b".")
        report = {**lines.next(), "got": dict(results)}
        problem = report.get("error") or _problem(
            address, results, costs(report["kinds"], number, action)
        )
        os.write(says, b".")
        report |= lines.next()
        problem = problem or report.get("error")
        if not problem and report["descriptors"]:
            problem = f"{report['descriptors']} descriptors are left"
        return report, problem
    finally:
        os.close(says)
        lines.end()


def _problem(address: tuple[str, int], results: Counter[str], max_failures: int) -> str | None:
    if results["hang"]:
        return f"a client waits for ever: {dict(results)}"
    others = sum(n for result, n in results.items() if result not in ("200", "left"))
    if others > max_failures:
        return f"more requests failed than were struck: {dict(results)}"
    until_s = time.monotonic() + _UP_S
    while time.monotonic() < until_s:  # a server that was lost is looked at once a second
        with socket.create_connection(address, timeout=_HANG_S / 3) as wire:
            wire.sendall(_request(stream=True))
            if _answer(wire) == "200":
                break
        time.sleep(0.1)
    else:
        return "no request is served any more"
    time.sleep(0.02)
    counts = _counters(address)
    ended = sum(n for name, n in counts.items() if name.startswith("requests_total "))
    if counts["requests_received_total"] != ended + 1:
        return f"not all requests are counted: {counts}"
    return None


# -------------------------------------------------------------------------------- the campaign


def campaign(side: str, moments: int | None, seed: int) -> list[str]:
    """Strike each call, or some of them; print the counts; what must not be."""
    problems: list[str] = []
    counts: Counter[tuple[str, str]] = Counter()
    harmed = 0
    with contextlib.ExitStack() as stack:
        mocks = [stack.enter_context(serving_apart(_MOCK)) for _ in range(2)]
        urls = [mock.url for mock in mocks]

        def attempt(number: int, action: int) -> tuple[dict[str, Any], str | None]:
            return (
                client(urls[0], number, action)
                if side == "client"
                else gateway(urls, number, action)
            )

        report, problem = attempt(sys.maxsize, 0)
        if problem:
            print(f"without a fault: {problem}")
            return [problem]
        calls = report["kinds"]
        plan = [(k, action) for k, kind in enumerate(calls, 1) for action in FAULTS[kind]]
        if moments is not None and moments < len(plan):
            plan = sorted(random.Random(seed).sample(plan, moments))
        for number, action in plan:
            report, problem = attempt(number, action)
            kinds = report.get("kinds", calls)
            kind = kinds[number - 1] if number <= len(kinds) else "not reached"
            counts[kind, name_of(action)] += 1
            results = report.get("got") or Counter(report.get("outcomes", ()))
            harmed += any(result not in ("200", "left", Outcome.FINISHED) for result in results)
            if problem:
                problems.append(f"call {number} ({kind}), {name_of(action)}: {problem}")
                print(problems[-1], flush=True)
    for (kind, fault), count in sorted(counts.items()):
        print(f"    {kind}, {fault}: {count}")
    print(
        f"{side}: {len(plan)} faults at {len(calls)} calls ({dict(Counter(calls))}); a request "
        f"failed in {harmed}; problems: {len(problems)}"
    )
    return problems


def main() -> int:
    """Run the campaign that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--side", choices=("client", "gateway"), default="client")
    parser.add_argument("--moments", type=int, help="faults to try, drawn evenly; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if shim() is None:
        with tempfile.TemporaryDirectory() as temporary:
            library = Path(temporary) / "socket_faults.so"
            words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
            subprocess.run(words, check=True)
            environ = {**os.environ, "LD_PRELOAD": str(library)}
            return subprocess.run([sys.executable, *sys.argv], env=environ, check=False).returncode
    return 1 if campaign(options.side, options.moments, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
