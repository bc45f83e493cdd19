"""What `slo-bench capture` adds to latencies: `python tools/benchmarks/bench_capture.py`.

A mock server sends the first token after 20 ms and one every 5 ms. Requests of 2,000 prompt tokens
(text) and 64 streamed tokens go to it straight and through the capture in turn, from `--clients`
threads, so that both see the same machine. Printed are medians and 99th percentiles of the time to
the first token and to the last, their differences and ratios, and the capture's CPU time a request.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np

from slo_bench.harness.servers.mock import MockConfig, serving_apart

MOCK = MockConfig(ttft_s=0.02, itl_s=0.005)
WORDS, TOKENS = 2000, 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def captured(url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """The address of a capture in a process of its own, and the process's id."""
    words = [sys.executable, "-m", "slo_bench.cli.main", "capture", url, "--out"]
    with subprocess.Popen(
        [*words, str(folder / "capture.jsonl")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip().removesuffix("/v1"), process.pid
        process.terminate()


def request_s(url: str, number: int) -> tuple[float, float]:
    """Seconds to the first event and to the end of one stream."""
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname, parts.port)
    prompt = f"{number} " + "word " * WORDS
    body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": TOKENS, "stream": True})
    begin_s = perf_counter()
    wire.request("POST", "/v1/completions", body)
    answer = wire.getresponse()
    answer.readline()
    first_s = perf_counter() - begin_s
    answer.read()
    end_s = perf_counter() - begin_s
    wire.close()
    return first_s, end_s


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="each way")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {"straight": [], "captured": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving_apart(MOCK) as mock,
        captured(mock.url, Path(folder)) as (url, pid),
    ):
        urls = {"straight": mock.url, "captured": url}

        def client(first: int) -> None:
            for number in range(first, 2 * options.requests, options.clients):
                way = ("straight", "captured")[number // options.clients % 2]
                times[way].append(request_s(urls[way], number))

        for address in urls.values():
            request_s(address, -1)
        before_s = cpu_s(pid)
        threads = [threading.Thread(target=client, args=(k,)) for k in range(options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        each_s = (cpu_s(pid) - before_s) / len(times["captured"])
    for column, name in enumerate(("first token", "last token")):
        for quantile in (0.5, 0.99):
            straight, through = (
                1e3 * float(np.quantile([t[column] for t in times[way]], quantile))
                for way in ("straight", "captured")
            )
            print(
                f"{name} p{100 * quantile:g}: {straight:.2f} ms straight, {through:.2f} ms "
                f"captured, {through - straight:+.2f} ms, ratio {through / straight:.3f}"
            )
    print(f"CPU time of the capture: {1e3 * each_s:.2f} ms a request")


if __name__ == "__main__":
    main()
