"""What a client costs, and what it prints: `python tools/benchmarks/bench_clients.py`.

Every client sends the same load (Poisson arrivals, 128 prompt and 64 output tokens) to a mock
server of its own that stamps what really happens, at each of `--rates`. Sent is the rate by the
server's clock; beside what a client prints stands what the server did. CPU time and memory are what
the operating system says of the whole command, children included; the cost of a request is the
difference between a long and a short run (`--seconds`), so that start-up does not count.
`bytes_only.py` is a client that only counts the bytes it reads. Other clients are measured where
their programs are given: `--aiperf PATH --evalscope PATH --guidellm PATH --inference-perf PATH
--vllm PATH`. Their tokenizer, written for the occasion, has the mock's words.

With `--server URL --model NAME --tokenizer NAME` the clients send to that server instead, one after
the other: what each prints itself stands beside what `slo-bench compare` makes of its file.
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

import bench_sending
import numpy as np

from slo_bench.harness.servers.launch.random_model import make_model, model_fields
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
    cache: Path | None = None  # of the Hugging Face hub, which has the tokenizer as TOKENIZER


@dataclass(frozen=True)
class Printed:
    """What a client prints, in milliseconds."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float  # or what it calls so


@dataclass(frozen=True)
class Cost:
    """What a command took, the rate at which it sent, and what it and the server say."""

    cpu_s: float
    peak_bytes: int
    first_request_s: float
    answered: int
    sent_rps: float
    printed: Printed
    true: Printed


@dataclass(frozen=True)
class Client:
    """How one is started, and what it prints, from the files in the folder of a load."""

    argv: Callable[[str, Load], Sequence[str]]
    printed: Callable[[Path], Printed]


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
        *(
            ("--tokenizer", load.tokenizer)
            if load.cache is None and Path(load.tokenizer).is_dir()
            else ()
        ),
    )


def _our_figures(folder: Path) -> Printed:
    (row,) = csv.DictReader((folder / "run" / "cells.csv").read_text().splitlines())
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")
    return Printed(*(1e3 * float(row[name] or "nan") for name in names))


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


def _vllm_figures(folder: Path) -> Printed:
    report = json.loads((folder / "vllm.json").read_text())
    return Printed(*(report[f"{name}_ms"] for name in ("median_ttft", "p99_ttft", "median_tpot")))


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


def _guidellm_figures(folder: Path) -> Printed:
    (report,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    ttft, tpot = (
        report["metrics"][f"{name}_ms"]["successful"]
        for name in ("time_to_first_token", "time_per_output_token")
    )
    return Printed(ttft["median"], ttft["percentiles"]["p99"], tpot["median"])


def _aiperf(program: str, load: Load) -> Sequence[str]:
    return (
        *(program, "profile", "-m", load.model, "--url", load.url, "--streaming"),
        *("--endpoint-type", "completions", "--tokenizer", load.tokenizer, "--ui", "none"),
        *("--request-rate", str(load.rate_rps), "--arrival-pattern", "poisson"),
        *("--request-count", str(load.requests), "--isl", str(PROMPT), "--osl", str(load.tokens)),
        *("--extra-inputs", "ignore_eos:true"),
        *("--output-artifact-dir", str(load.folder / "aiperf")),
    )


def _aiperf_figures(folder: Path) -> Printed:
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    ttft = report["time_to_first_token"]
    return Printed(ttft["p50"], ttft["p99"], report["inter_token_latency"]["p50"])


def _evalscope(program: str, load: Load) -> Sequence[str]:
    length, tokens = str(PROMPT), str(load.tokens)
    return (
        *(program, "perf", "--api", "openai", "--url", f"{load.url}/v1/completions"),
        *("--model", load.model, "--tokenizer-path", load.tokenizer, "--dataset", "random"),
        *("--min-prompt-length", length, "--max-prompt-length", length, "--prefix-length", "0"),
        *("--min-tokens", tokens, "--max-tokens", tokens, "--extra-args", '{"ignore_eos": true}'),
        *("--open-loop", "--rate", str(load.rate_rps), "--number", str(load.requests), "--stream"),
        *("--no-apply-chat-template", "--no-test-connection", "--no-timestamp"),
        *("--outputs-dir", str(load.folder / "evalscope"), "--name", "run"),
    )


def _evalscope_figures(folder: Path) -> Printed:
    (path,) = (folder / "evalscope").glob("run/*/benchmark_percentile.json")
    rows = {row["Percentiles"]: row for row in json.loads(path.read_text())}
    p50 = rows["50%"]
    return Printed(p50["TTFT (ms)"], rows["99%"]["TTFT (ms)"], p50["TPOT (ms)"])


def _inference_perf(program: str, load: Load) -> Sequence[str]:
    lengths = {
        f"{name}_distribution": {
            **{"type": "fixed", "min": tokens, "max": tokens, "mean": tokens, "std_dev": 0},
            "total_count": load.requests,
        }
        for name, tokens in (("input", PROMPT), ("output", load.tokens))
    }
    stage = {"rate": load.rate_rps, "duration": max(1, round(load.requests / load.rate_rps))}
    server = {"type": "vllm", "model_name": load.model, "base_url": load.url, "ignore_eos": True}
    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", **lengths},
        "load": {"type": "poisson", "stages": [stage], "num_workers": 1},
        "server": server,
        "tokenizer": {"pretrained_model_name_or_path": load.tokenizer},
        "storage": {"local_storage": {"path": str(load.folder / "inference-perf")}},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True}},
    }
    path = load.folder / "inference-perf.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return program, "-c", str(path)


def _inference_perf_figures(folder: Path) -> Printed:
    path = folder / "inference-perf" / "stage_0_lifecycle_metrics.json"
    latency = json.loads(path.read_text())["successes"]["latency"]
    ttft, tpot = latency["time_to_first_token"], latency["time_per_output_token"]
    return Printed(*(1e3 * value for value in (ttft["median"], ttft["p99"], tpot["median"])))


CLIENTS = {
    "slo-bench": Client(_ours, _our_figures),
    "aiperf": Client(_aiperf, _aiperf_figures),
    "evalscope": Client(_evalscope, _evalscope_figures),
    "guidellm": Client(_guidellm, _guidellm_figures),
    "inference-perf": Client(_inference_perf, _inference_perf_figures),
    "vllm": Client(_vllm, _vllm_figures),
}


def sent(client: Client, program: str, load: Load) -> tuple[float, Any]:
    """Run a client in a process of its own: when it began, and what it used."""
    log = os.open(load.folder / "log", os.O_CREAT | os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if load.cache is not None:
        environ["HF_HUB_CACHE"] = str(load.cache)
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
    """What a client costs, and what it and the server say of the same requests."""
    begin_s, usage = sent(client, program, load)
    # Clients that send one or two requests to see whether the server answers: those count little.
    streamed = [t for t in truths() if t.tokens == TOKENS]
    received_s = sorted(t.received_s for t in streamed)
    ttft_ms = [1e3 * (t.first_token_s - t.received_s) for t in streamed]
    tpot_ms = [1e3 * (t.last_token_s - t.first_token_s) / (t.tokens - 1) for t in streamed]
    return Cost(
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        first_request_s=received_s[0] - begin_s,
        answered=len(streamed),
        sent_rps=(len(received_s) - 1) / (received_s[-1] - received_s[0]),
        printed=client.printed(load.folder),
        true=Printed(
            statistics.median(ttft_ms),
            float(np.quantile(ttft_ms, 0.99)),
            statistics.median(tpot_ms),
        ),
    )


_FILES = {
    "vllm": "vllm.json",
    "guidellm": "guidellm.json",
    "aiperf": "aiperf/profile_export.jsonl",
}


def _read(name: str, folder: Path) -> tuple[RequestResults, str]:
    """The requests of a client's file, and whether it says that they are a result."""
    if name not in _FILES and name != "slo-bench":
        raise SystemExit(f"slo-bench compare reads no files of {name}")
    if name == "slo-bench":
        (row,) = csv.DictReader((folder / "run" / "cells.csv").read_text().splitlines())
        return read_requests(folder / "run", row["cell"]), row["invalid_because"] or "valid"
    (cell,) = read_results(folder / _FILES[name]).cells
    return cell.read(), "not judged"


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
                    options.requests,
                    Path(folder),
                    options.tokenizer or "gpt2",
                    options.model,
                    options.output_tokens,
                )
                sent(CLIENTS[name], program, load)
                results, summary = _read(name, Path(folder))
                if not results.finished.all():
                    raise SystemExit(f"{name}: {int((~results.finished).sum())} requests failed")
                printed = CLIENTS[name].printed(Path(folder))
            latency_s = results.sample("sent", None).latency_s
            ms = {name: 1e3 * float(np.nanmedian(values)) for name, values in latency_s.items()}
            print(
                f"| {rate_rps:g} | {name} | {printed.ttft_p50_ms:.1f} ms | {ms['ttft']:.1f} ms | "
                f"{printed.tpot_p50_ms:.2f} ms | {ms['tpot']:.2f} ms | {ms['e2e']:.0f} ms | "
                f"{summary} |",
                flush=True,
            )


TOKENIZER = "slo-bench/mock"


def tokenizer_in(cache: Path) -> Path:
    """Write a small model's tokenizer that has the mock's word, as the hub's cache has it; its
    folder.
    """
    repository = cache / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = make_model(repository / "snapshots" / ("0" * 40), model_fields(parameters=1_000_000))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    path = snapshot / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary, space = tokenizer["model"]["vocab"], "\u0120"  # a byte-level tokenizer's
    vocabulary[f"{space}tok"] = len(vocabulary)
    tokenizer["model"]["merges"].append([f"{space}to", "k"])
    path.write_text(json.dumps(tokenizer), "utf-8")
    return snapshot


def beside_each_other(options: argparse.Namespace, programs: Mapping[str, str]) -> None:
    """Print a line of a table for each rate and client."""
    print(
        "| req/s | client | sent | TTFT p50 printed (true) | TTFT p99 printed (true) | "
        "TPOT p50 printed (true) | CPU a request | of bytes only | CPU to start | "
        "largest process | first request after |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for rate_rps in map(float, options.rates.split(",")):
        numbers = [round(rate_rps * float(text)) for text in options.seconds.split(",")]
        least_s = bytes_only_s(rate_rps, numbers)
        print(f"| {rate_rps:g} | bytes only | | | | | {1e3 * least_s:.2f} ms | 1.00 | | | |")
        for name, program in programs.items():
            costs = []
            for requests in numbers:
                with tempfile.TemporaryDirectory() as text, serving_apart(MOCK) as server:
                    folder, cache = Path(text), Path(text) / "hub"
                    tokenizer = options.tokenizer or str(tokenizer_in(cache))
                    if name == "aiperf":  # which takes no folder offline
                        tokenizer = options.tokenizer or TOKENIZER
                    load = Load(server.url, rate_rps, requests, folder, tokenizer, cache=cache)
                    costs.append(run(CLIENTS[name], program, load, server.truths))
            short, long = costs
            each_s = (long.cpu_s - short.cpu_s) / (long.answered - short.answered)
            pairs = [
                f"{getattr(long.printed, figure):.1f} ({getattr(long.true, figure):.1f}) ms"
                for figure in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
            ]
            print(
                f"| {rate_rps:g} | {name} | {long.sent_rps:.1f} | {' | '.join(pairs)} | "
                f"{each_s * 1e3:.2f} ms | {each_s / least_s:.2f} | "
                f"{short.cpu_s - each_s * short.answered:.1f} s | {long.peak_bytes / 1e6:.0f} MB | "
                f"{short.first_request_s:.1f} s |",
                flush=True,
            )


def bytes_only_s(rate_rps: float, numbers: Sequence[int]) -> float:
    """CPU seconds a request of the client that only counts bytes."""
    used_s = []
    for requests in numbers:
        with tempfile.TemporaryDirectory() as folder, serving_apart(MOCK) as server:
            load = bench_sending.Load(server.url, rate_rps, requests, Path(folder))
            used_s.append(bench_sending.bytes_only(load, "uvloop"))
    return (used_s[1] - used_s[0]) / (numbers[1] - numbers[0])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="20,100,300", help="req/s")
    parser.add_argument("--seconds", default="5,25", help="of arrivals, short and long run")
    parser.add_argument("--requests", type=int, default=200, help="of each run, with --server")
    parser.add_argument("--tokenizer", help="in the Hugging Face cache, or a folder")
    parser.add_argument("--server", help="URL of a server to send to in place of a mock")
    parser.add_argument("--model", default=MOCK.model, help="of that server")
    parser.add_argument("--output-tokens", type=int, default=TOKENS, help="with --server")
    for name in CLIENTS:
        if name != "slo-bench":
            parser.add_argument(f"--{name}", help="its program")
    options = parser.parse_args()
    chosen = {name: getattr(options, name.replace("-", "_"), None) for name in CLIENTS}
    programs = {name: program for name, program in chosen.items() if program}
    (on_server if options.server else beside_each_other)(
        options, {"slo-bench": sys.executable, **programs}
    )


if __name__ == "__main__":
    main()
