"""What a client costs and how truly it measures: `python tools/benchmarks/bench_clients.py`.

Every client sends the same load (Poisson arrivals, 128 prompt and 64 output tokens) to a mock
server of its own that stamps what really happens. CPU time and memory are what the operating
system says of the whole command, children included; the cost of a request is the difference
between a long and a short run, so that start-up does not count. Other clients are measured where
their programs are given: `--guidellm PATH --aiperf PATH --vllm PATH`; `--tokenizer NAME`, of
one in the Hugging Face cache or a folder, is for those that cannot do without.

With `--server URL --model NAME` the clients send to that server instead, one after the other, at
each of `--rates`: what each prints itself stands beside what `slo-bench compare` makes of its file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from slo_bench.harness.servers.mock import MockConfig, serving_apart
from slo_bench.reports.compare.comparing import read_results
from slo_bench.reports.compare.results import RequestResults, read_requests

PROMPT, TOKENS = 128, 64
MOCK = MockConfig(ttft_s=0.05, itl_s=0.01)


@dataclass(frozen=True)
class Load:
    """What every client is asked to send, and where."""

    url: str
    rate_rps: float
    requests: int
    folder: Path
    tokenizer: str
    model: str = MOCK.model
    tokens: int = TOKENS


@dataclass(frozen=True)
class Cost:
    """What a command took; `ttft_error_s` is its median TTFT less the true one."""

    cpu_s: float
    peak_bytes: int
    first_request_s: float
    answered: int
    ttft_error_s: float


@dataclass(frozen=True)
class Client:
    """How one is started, and the median TTFT in seconds that it reports."""

    argv: Callable[[str, Load], Sequence[str]]
    ttft_s: Callable[[Path], float]


def _ours(program: str, load: Load) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "slo_bench.cli.main", "run", "--base-url", load.url),
        *("--rates", str(load.rate_rps), "--requests", str(load.requests), "--seeds", "1"),
        *(
            "--sweep",
            f"prompt_tokens=fixed({PROMPT})",
            "--sweep",
            f"output_tokens=fixed({load.tokens})",
        ),
        *("--no-report", "--json", "--records", "csv", "--out", str(load.folder / "run")),
        *(("--tokenizer", load.tokenizer) if Path(load.tokenizer).is_dir() else ()),
    )


def _our_ttft_s(folder: Path) -> float:
    (row,) = csv.DictReader((folder / "run" / "cells.csv").read_text().splitlines())
    return float(row["ttft_p50_s"])


def _vllm(program: str, load: Load) -> Sequence[str]:
    return (
        *(program, "bench", "serve", "--backend", "openai", "--base-url", load.url),
        *("--model", load.model, "--tokenizer", load.tokenizer, "--dataset-name", "random"),
        *(
            "--random-input-len",
            str(PROMPT),
            "--random-output-len",
            str(load.tokens),
            "--ignore-eos",
        ),
        *("--num-prompts", str(load.requests), "--request-rate", str(load.rate_rps)),
        *(
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(load.folder),
            "--result-filename",
            "vllm.json",
        ),
        "--disable-tqdm",
    )


def _vllm_ttft_s(folder: Path) -> float:
    return float(json.loads((folder / "vllm.json").read_text())["median_ttft_ms"]) / 1e3


def _guidellm(program: str, load: Load) -> Sequence[str]:
    target = f"kind=openai_http,target={load.url},model={load.model}"
    return (
        *(program, "run", "--backend", f"{target},request_format=/v1/completions"),
        *("--profile", f"kind=poisson,rate={load.rate_rps:g}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={load.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={load.tokens}"),
        *("--output", f"kind=json,path={load.folder / 'guidellm.json'}", "--disable-console"),
    )


def _guidellm_ttft_s(folder: Path) -> float:
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    return float(benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"]) / 1e3


def _aiperf(program: str, load: Load) -> Sequence[str]:
    return (
        *(program, "profile", "-m", load.model, "--url", load.url, "--streaming"),
        *("--endpoint-type", "completions", "--tokenizer", load.tokenizer, "--ui", "none"),
        *("--request-rate", str(load.rate_rps), "--arrival-pattern", "poisson"),
        *("--request-count", str(load.requests), "--isl", str(PROMPT), "--osl", str(load.tokens)),
        *("--extra-inputs", "ignore_eos:true"),
        *("--output-artifact-dir", str(load.folder / "aiperf")),
    )


def _aiperf_ttft_s(folder: Path) -> float:
    export = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return float(export["time_to_first_token"]["p50"]) / 1e3


CLIENTS = {
    "slo-bench": Client(_ours, _our_ttft_s),
    "vllm": Client(_vllm, _vllm_ttft_s),
    "guidellm": Client(_guidellm, _guidellm_ttft_s),
    "aiperf": Client(_aiperf, _aiperf_ttft_s),
}


def sent(client: Client, program: str, load: Load) -> tuple[float, Any]:
    """Run a client in a process of its own: when it began, and what it used."""
    log = os.open(load.folder / "log", os.O_CREAT | os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    argv = client.argv(program, load)
    begin_s = perf_counter()
    child = os.posix_spawnp(argv[0], argv, environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(log)
    if status:
        text = (load.folder / "log").read_text(errors="replace")
        raise SystemExit(f"failed: {' '.join(argv)}\n{text[-3000:]}")
    return begin_s, usage


def run(client: Client, program: str, load: Load, truths: Callable[[], Sequence[object]]) -> Cost:
    """What a client costs, and by how much its TTFT is off."""
    begin_s, usage = sent(client, program, load)
    # Clients that send one or two requests to see whether the server answers: those count little.
    streamed = [t for t in truths() if t.tokens == TOKENS]
    true_ttft_s = statistics.median(t.first_token_s - t.received_s for t in streamed)
    return Cost(
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        first_request_s=min(t.received_s for t in streamed) - begin_s,
        answered=len(streamed),
        ttft_error_s=client.ttft_s(load.folder) - true_ttft_s,
    )


def _read(name: str, folder: Path) -> tuple[RequestResults, str]:
    """The requests of a client's file, and whether it says that they are a result."""
    if name == "slo-bench":
        (row,) = csv.DictReader((folder / "run" / "cells.csv").read_text().splitlines())
        return read_requests(folder / "run", row["cell"]), row["invalid_because"] or "valid"
    files = {
        "vllm": folder / "vllm.json",
        "guidellm": folder / "guidellm.json",
        "aiperf": folder / "aiperf" / "profile_export.jsonl",
    }
    (cell,) = read_results(files[name]).cells
    return cell.read(), "not judged"


def _own(name: str, folder: Path) -> tuple[float, float]:
    """Medians of TTFT and of what a client calls time per output token, as printed, in ms."""
    if name == "slo-bench":
        (row,) = csv.DictReader((folder / "run" / "cells.csv").read_text().splitlines())
        return 1e3 * float(row["ttft_p50_s"] or "nan"), 1e3 * float(row["tpot_p50_s"] or "nan")
    if name == "vllm":
        report = json.loads((folder / "vllm.json").read_text())
        return report["median_ttft_ms"], report["median_tpot_ms"]
    if name == "guidellm":
        (report,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
        medians = [report["metrics"][f"{m}_ms"]["successful"]["median"] for m in _GUIDELLM]
        return medians[0], medians[1]
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return report["time_to_first_token"]["p50"], report["inter_token_latency"]["p50"]


_GUIDELLM = ("time_to_first_token", "time_per_output_token")


def on_server(options: argparse.Namespace, programs: Mapping[str, str]) -> None:
    """Print a line of a table for each rate and client."""
    print(
        "| req/s | client | TTFT p50, as it prints it | TTFT p50 from sending | "
        "TPOT p50, as it prints it | TPOT p50 without the first token | E2E p50 from sending | |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rate_rps in map(float, options.rates.split(",")):
        for name, program in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                load = Load(
                    options.server,
                    rate_rps,
                    int(options.requests.split(",")[0]),
                    Path(folder),
                    options.tokenizer,
                    options.model,
                    options.output_tokens,
                )
                sent(CLIENTS[name], program, load)
                results, summary = _read(name, Path(folder))
                if not results.finished.all():
                    raise SystemExit(f"{name}: {int((~results.finished).sum())} requests failed")
                ttft_ms, tpot_ms = _own(name, Path(folder))
            latency_s = results.sample("sent", None).latency_s
            ms = {name: 1e3 * float(np.nanmedian(values)) for name, values in latency_s.items()}
            print(
                f"| {rate_rps:g} | {name} | {ttft_ms:.1f} ms | {ms['ttft']:.1f} ms | "
                f"{tpot_ms:.2f} ms | {ms['tpot']:.2f} ms | {ms['e2e']:.0f} ms | "
                f"{summary} |",
                flush=True,
            )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--requests", default="200,800", help="of the short and the long run")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--server", help="URL of a server to send to in place of a mock")
    parser.add_argument("--model", default=MOCK.model, help="of that server")
    parser.add_argument("--rates", default="1,2,4", help="req/s, with --server")
    parser.add_argument("--output-tokens", type=int, default=TOKENS, help="with --server")
    for name in CLIENTS:
        if name != "slo-bench":
            parser.add_argument(f"--{name}", help="its program")
    options = parser.parse_args()
    programs = {"slo-bench": sys.executable}
    programs |= {name: getattr(options, name) for name in CLIENTS if getattr(options, name, None)}
    if options.server:
        on_server(options, programs)
        return
    print(
        f"{'client':10} {'CPU ms/request':>14} {'µs/token':>9} {'CPU s at start':>14} "
        f"{'peak MB':>8} {'first request s':>15} {'TTFT error ms':>13}"
    )
    for name, program in programs.items():
        costs = []
        for requests in map(int, options.requests.split(",")):
            with tempfile.TemporaryDirectory() as folder, serving_apart(MOCK) as server:
                load = Load(server.url, options.rate, requests, Path(folder), options.tokenizer)
                costs.append(run(CLIENTS[name], program, load, server.truths))
        short, long = costs
        each_s = (long.cpu_s - short.cpu_s) / (long.answered - short.answered)
        print(
            f"{name:10} {each_s * 1e3:14.2f} {each_s / TOKENS * 1e6:9.1f} "
            f"{short.cpu_s - each_s * short.answered:14.1f} {long.peak_bytes / 1e6:8.0f} "
            f"{short.first_request_s:15.2f} {long.ttft_error_s * 1e3:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
