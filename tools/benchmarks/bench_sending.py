"""What sending costs, and what several processes send: `python tools/benchmarks/bench_sending.py`.

CPU time a request of `slo-bench run --base-url` and of `bytes_only.py`, a client that only counts
the bytes it reads, against a mock server of its own each, in turns; a request's cost is the
difference between a long and a short run. `--checkout FOLDER` adds another state of the project,
`--sessions` compares conversations of four turns, whose follow-ups hold the answers, with the same
requests and made-up answers.

With `--processes 1,2`: each number of sending processes at rates that grow until one is late twice.
`--servers N` starts several mock servers, `--chunk N` sends as many tokens at once.

`--server-cores 0 --client-cores 1` pins both sides; without, they share all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.load_generator.http.http_options import HttpOptions
from slo_bench.harness.load_generator.http.wire_requests import Bodies, WireRequests
from slo_bench.harness.load_generator.machine import started_on
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import Mock, MockConfig, serving_apart
from slo_bench.workloads.workload import Workload

PROMPT, TOKENS = 128, 64
MOCK = MockConfig(ttft_s=0.05, itl_s=0.01)
HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
ANSWER_S = MOCK.ttft_s + (TOKENS - 1) * MOCK.itl_s


@dataclass(frozen=True)
class Load:
    """Load of one run, and the folder for what a client writes."""

    url: str
    rate_rps: float
    requests: int
    folder: Path


def bytes_only(load: Load, loop: str) -> float:
    """Run the client that only counts bytes on an event loop; its CPU seconds."""
    workload = Workload(np.zeros(1), np.full(1, PROMPT), np.full(1, TOKENS))
    options = HttpOptions(model=MOCK.model)
    bodies = Bodies.write(workload, options, load.folder / "bodies")
    request_bytes = WireRequests(workload, [Endpoint.parse(load.url)], options, bodies).of(0, 0)
    (load.folder / "request").write_bytes(b"".join(request_bytes))
    port = urlsplit(load.url).port
    argv = [sys.executable, str(HERE / "bytes_only.py"), *map(str, (port, load.rate_rps))]
    return cpu_s([*argv, str(load.requests), loop], load.folder, CHECKOUT, load.folder / "request")


def slo_bench(load: Load, checkout: Path, sessions: str | None) -> float:
    """Run `slo-bench run` of a checkout; its CPU seconds."""
    lengths = {"prompt_tokens": PROMPT, "output_tokens": TOKENS}
    sweeps = [("--sweep", f"{name}=fixed({tokens})") for name, tokens in lengths.items()]
    argv = [
        *(sys.executable, "-m", "slo_bench.cli.main", "run", "--base-url", load.url),
        *("--rates", str(load.rate_rps), "--requests", str(load.requests), "--seeds", "1"),
        *(word for sweep in sweeps for word in sweep),
        *(("--sessions", sessions) if sessions else ()),
        *("--no-report", "--json", "--records", "csv", "--out", str(load.folder / "run")),
    ]
    return cpu_s(argv, load.folder, checkout)


def cpu_s(
    argv: Sequence[str], folder: Path, checkout: Path, input_file: Path | None = None
) -> float:
    """CPU seconds, user and system, of a command with its children."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    source = os.open(input_file or os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, source, 0), *((os.POSIX_SPAWN_DUP2, log, n) for n in (1, 2))]
    environ = os.environ | {"PYTHONPATH": str(checkout / ".editable")}
    child = os.posix_spawn(argv[0], argv, environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(log)
    os.close(source)
    if status:
        text = (folder / "log").read_text(errors="replace")
        raise SystemExit(f"failed: {' '.join(argv)}\n{text[-3000:]}")
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Client:
    """A client whose cost is measured; without `checkout` the one that only counts bytes."""

    name: str
    checkout: Path | None = None
    sessions: str | None = None
    loop: str = "uvloop"

    def cost_s(self, options: argparse.Namespace) -> float:
        """CPU seconds a request: the difference between a long and a short run."""
        used_s, answered = [], []
        for n in options.requests:
            with tempfile.TemporaryDirectory() as folder, mocks(options) as (server,):
                load = Load(server.url, options.rate, n, Path(folder))
                with started_on(options.client_cores):
                    if self.checkout is None:
                        used_s.append(bytes_only(load, self.loop))
                    else:
                        used_s.append(slo_bench(load, self.checkout, self.sessions))
                answered.append(sum(truth.tokens == TOKENS for truth in server.truths()))
        if answered != options.requests:
            raise SystemExit(f"{self.name}: {answered} answers to {options.requests} requests")
        return (used_s[1] - used_s[0]) / (answered[1] - answered[0])


@contextlib.contextmanager
def mocks(options: argparse.Namespace) -> Iterator[list[Mock]]:
    """Mock servers in processes of their own."""
    config = dataclasses.replace(MOCK, tokens_per_chunk=options.chunk)
    with contextlib.ExitStack() as stack, started_on(options.server_cores):
        yield [stack.enter_context(serving_apart(config)) for _ in range(options.servers)]


def costs(options: argparse.Namespace) -> None:
    """Print each turn, then medians and the ratios to the first client (least and largest)."""
    if options.sessions:
        how = "sessions(turns=fixed(4),think_s=0"
        ours = [
            Client("made-up answers", CHECKOUT, f"{how},closed=false,answer_s={ANSWER_S})"),
            Client("real answers", CHECKOUT, f"{how})"),
        ]
        clients = list(ours)
    else:
        ours = [Client("slo-bench", CHECKOUT)]
        clients = [Client("bytes only"), Client("bytes only, asyncio", loop="asyncio"), *ours]
    for folder in options.checkout:
        clients += [
            dataclasses.replace(client, name=f"{client.name}, {folder.name}", checkout=folder)
            for client in ours
        ]
    took: dict[str, list[float]] = {client.name: [] for client in clients}
    for turn in range(options.turns):
        for client in clients if turn % 2 == 0 else reversed(clients):
            took[client.name].append(client.cost_s(options))
            print(
                f"{client.name}: {took[client.name][-1] * 1e3:.3f} ms", file=sys.stderr, flush=True
            )
    print("| client | CPU a request | ratio |\n|---|---|---|")
    first, *_ = took.values()
    for name, each_s in took.items():
        ratios = [client_s / first_s for client_s, first_s in zip(each_s, first, strict=True)]
        print(
            f"| {name} | {statistics.median(each_s) * 1e3:.3f} ms | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


def senders(options: argparse.Namespace) -> None:
    """Print a line of a table for each rate and number of sending processes."""
    print(
        "| processes | req/s due | sent | answered | CPU a request | send delay p50 | p99 | max | "
        "event loop p99 | server late p99 | |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for processes in options.processes:
        rate_rps = options.rate
        while any(
            level(options, processes, rate_rps) for _ in range(2)
        ):  # others may have been busy
            rate_rps *= options.step


def level(options: argparse.Namespace, processes: int, rate_rps: float) -> bool:
    """Measure one rate and print its line; whether the client was on time."""
    rng = np.random.default_rng(0)
    n = round(rate_rps * options.seconds)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, n))
    workload = Workload(arrival_s, np.full(n, PROMPT), np.full(n, TOKENS))
    http_options = HttpOptions(model=MOCK.model, processes=processes)
    with mocks(options) as servers, started_on(options.client_cores):
        measurement = measure(
            workload, [Endpoint.parse(server.url) for server in servers], http_options
        )
        truths = [truth for server in servers for truth in server.truths()]
    took_s = np.array([truth.first_token_s - truth.received_s for truth in truths])
    due_s = MOCK.ttft_s + (min(options.chunk, TOKENS) - 1) * MOCK.itl_s
    client = measurement.client
    busy_s = float(np.nanmax(measurement.columns.ended_s))
    failed = int((measurement.columns.outcome != Outcome.FINISHED).sum())
    ms = (
        *(client.send_delay_p50_s, client.send_delay_p99_s),
        *(
            max(sender.send_delay_max_s for sender in measurement.clients),
            client.event_loop_lag_p99_s,
        ),
        float(np.nanquantile(took_s - due_s, 0.99)),
    )
    notes = [measurement.invalid_because or "valid"] + ([f"{failed} failed"] if failed else [])
    print(
        f"| {processes} | {client.offered_rps:.0f} | {client.sent_rps:.0f} | "
        f"{(n - failed) / (busy_s - ANSWER_S):.0f} | {client.cpu_s / n * 1e3:.3f} ms | "
        f"{' | '.join(f'{1e3 * latency_ms:.1f} ms' for latency_ms in ms)} | {'; '.join(notes)} |",
        flush=True,
    )
    return measurement.invalid_because is None


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200, help="req/s; the first of --processes")
    parser.add_argument("--requests", type=numbers, default=[200, 2000], help="short and long run")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--checkout", type=Path, action="append", default=[])
    parser.add_argument("--sessions", action="store_true")
    parser.add_argument("--processes", type=numbers, help="numbers of sending processes")
    parser.add_argument("--seconds", type=float, default=4, help="of a level of --processes")
    parser.add_argument("--step", type=float, default=2, help="from one rate to the next")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=1, help="tokens that a server sends at once")
    parser.add_argument("--server-cores", type=numbers, default=[])
    parser.add_argument("--client-cores", type=numbers, default=[])
    options = parser.parse_args()
    (senders if options.processes else costs)(options)


if __name__ == "__main__":
    main()
