#!/usr/bin/env python3
"""Run everything that only a CUDA device can confirm, and say pass, fail or skip by line.

Usage: scripts/gpu_check.py OUT [--only NAME,...] [--model DIR] [--list]

OUT gets a folder for each check (log, run folder, profile) and `summary.json`; a check that has
passed there is not run again. Without --model, models with random weights are made in OUT. Exits
with 0 if nothing failed, with 1 otherwise. docs/gpu-checklist.md says what each check confirms.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = (sys.executable, "-m", "slo_bench.cli.main")
PATIENCE_S = 3600.0
TESTS = "tests/harness/engine/torch/"

Row = Mapping[str, str]
Verify = Callable[[Path], str | None]  # the problem with what is in a check's folder


@dataclass(frozen=True)
class Check:
    """One line of the checklist.

    `commands` are run in order, in the check's own folder; `{models}` is the folder of the models.
    With `asks`, the last one is a server that is asked for an answer of each of these models.
    `needs` are names of `REQUIREMENTS`. `verify` reads what the commands wrote.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    commands: tuple[str, ...]
    verify: Verify = lambda folder: None
    asks: tuple[str, ...] = ()


def cells(folder: Path) -> list[Row]:
    """Rows of the run folder `run`."""
    with (folder / "run" / "cells.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def valid(folder: Path) -> str | None:
    """All cells are valid, and their requests were answered."""
    rows = cells(folder)
    for row in rows:
        if row["valid"] != "True":
            return f"{row['cell']} is invalid: {row.get('invalid_because', '')}"
        if not int(row["finished"]):
            return f"{row['cell']} finished no request"
    return None if rows else "no cell was measured"


def positive(*columns: str) -> Verify:
    """As `valid`; and each column is above 0 in some cell."""

    def verify(folder: Path) -> str | None:
        if problem := valid(folder):
            return problem
        rows = cells(folder)
        for column in columns:
            if not any(float(row.get(column) or 0) > 0 for row in rows):
                return f"{column} is above 0 in no cell"
        return None

    return verify


def wrote(name: str) -> Verify:
    """A file is there and not empty."""

    def verify(folder: Path) -> str | None:
        path = folder / name
        return None if path.is_file() and path.stat().st_size else f"{name} was not written"

    return verify


TWO_MODELS = "slo-bench serve prism --backend vllm --model {models}/small --model {models}/other"
LOAD = "--requests 60 --seeds 1 --no-report --out run"
# Room for four whole requests, of which many come at once.
SWAPS = (
    "--workload synthetic --prompt-tokens 64 --output-tokens 512 --num-gpu-blocks 160 --rates 50"
)


def _run(backend: str, options: str) -> str:
    """The command of a run on a backend with the small model."""
    return f"slo-bench run --backend {backend} --model {{models}}/small {options} {LOAD}"


CHECKS = (
    Check(
        "engine",
        "torch engine in float32: tokens of transformers, preemption, swaps, prefixes, store",
        ("cuda", "pytest"),
        (
            f"pytest {TESTS}test_paged_model.py {TESTS}test_paged_engine.py "
            f"{TESTS}test_paged_store.py -q",
        ),
    ),
    Check(
        "torch-profile",
        "torch engine: step times and copies of KV blocks in both directions",
        ("cuda",),
        ("slo-bench profile run --model {models}/small --device cuda:0 --out gpu.toml",),
        wrote("gpu.toml"),
    ),
    Check(
        "torch-swap",
        "torch engine swaps to pinned memory; simulation beside it",
        ("cuda",),
        (_run("torch", f"--gpu cuda:0 --system vllm-swap {SWAPS} --validate"),),
        positive("preemptions_swap"),
    ),
    Check(
        "torch-chunks",
        "torch engine computes long prompts in chunks; simulation beside it",
        ("cuda",),
        (
            _run(
                "torch",
                "--gpu cuda:0 --system sarathi --workload synthetic --prompt-tokens 3000 "
                "--output-tokens 32 --rates 2,4 --validate",
            ),
        ),
        valid,
    ),
    Check(
        "torch-store",
        "torch engine loads prefixes from a KV store beside the computation",
        ("cuda",),
        (
            _run(
                "torch",
                "--gpu cuda:0 --system vllm --workload sharegpt --sessions 'sessions(turns=4, "
                "think_s=1)' --num-gpu-blocks 400 --kv-store kv=4 --rates 2",
            ),
        ),
        positive("kv_store_loaded_bytes"),
    ),
    Check(
        "vllm",
        "vLLM with CUDA graphs, unpatched and with a policy; energy by NVML",
        ("cuda", "vllm"),
        (_run("vllm", "--system vllm --system edf --rates 4,32"),),
        positive("gpu_energy_j", "gpu_memory_peak_bytes"),
    ),
    Check(
        "vllm-swap",
        "a policy's swaps in vLLM: executed as decided",
        ("cuda", "vllm"),
        (_run("vllm", f"--system vllm-swap {SWAPS}"),),
        positive("preemptions_swap", "decisions_victim"),
    ),
    Check(
        "swap-speed",
        "the copies of a swap in vLLM beside the link to pinned memory",
        ("cuda",),
        ("python scripts/swap_speed.py --device cuda:0 --at-least 0.7",),
    ),
    Check(
        "vllm-profile",
        "step times of vLLM from its step log, and a simulation with them",
        ("cuda", "vllm"),
        (
            "slo-bench profile run --backend vllm --model {models}/small --out vllm.toml",
            _run("vllm", "--rates 4,16 --validate"),
        ),
        wrote("vllm.toml"),
    ),
    Check(
        "sglang",
        "a policy in SGLang on CUDA",
        ("cuda", "sglang"),
        (_run("sglang", "--system edf --rates 4,32"),),
        valid,
    ),
    Check(
        "nixl",
        "prefill and decode on two GPUs, KV by NIXL",
        ("two-gpus", "vllm", "nixl"),
        (_run("vllm", "--system distserve --kv-transfer nixl --rates 2"),),
        valid,
    ),
    Check(
        "two-instances",
        "two vLLM servers, each on its own GPU, behind a router",
        ("two-gpus", "vllm"),
        (_run("vllm", "--system vllm --instances 2 --rates 8"),),
        positive("gpu_energy_j"),
    ),
    Check(
        "sleep",
        "Prism: two models take turns on one GPU; the idle one sleeps",
        ("cuda", "vllm"),
        (f"{TWO_MODELS} --max-active-models 1",),
        asks=("small", "other", "small"),
    ),
    Check(
        "kvcached",
        "Prism: two models share KV memory by kvcached",
        ("cuda", "vllm", "kvcached"),
        (f"{TWO_MODELS} --max-active-models 2 --kvcached",),
        asks=("small", "other"),
    ),
)


def _gpus() -> int:
    from slo_bench.harness.servers.launch.gpus import visible_gpus

    return len(visible_gpus())


def _torch_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _server(backend: str, module: str | None = None) -> bool:
    """Whether a server is installed for CUDA, with that module."""
    from slo_bench.harness.servers.launch.environments import environment
    from slo_bench.workloads.errors import SloBenchError

    try:
        server_environment = environment(backend)
    except SloBenchError:
        return False
    if server_environment.device != "cuda":
        return False
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module or 'json'!r}) is None)"
    return not subprocess.run([server_environment.python, "-c", code], check=False).returncode


# What a check may need: how it is found out, and what to do if it is missing.
REQUIREMENTS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "cuda": (_torch_cuda, "torch with CUDA and a device: pip install 'slo-bench[torch]'"),
    "two-gpus": (lambda: _gpus() >= 2, "two GPUs"),
    "pytest": (lambda: importlib.util.find_spec("pytest") is not None, "pip install pytest"),
    "vllm": (lambda: _server("vllm"), "slo-bench backends install vllm"),
    "sglang": (lambda: _server("sglang"), "slo-bench backends install sglang"),
    "nixl": (lambda: _server("vllm", "nixl"), "slo-bench backends install vllm --with nixl"),
    "kvcached": (
        lambda: _server("vllm", "kvcached"),
        "slo-bench backends install vllm --with kvcached",
    ),
}


def words_of(command: str, models: Path) -> list[str]:
    """A command line with paths and programs filled in."""
    words = shlex.split(command.format(models=models))
    program = {
        "slo-bench": CLI,
        "pytest": (sys.executable, "-m", "pytest"),
        "python": (sys.executable,),
    }[words[0]]
    ours = ("tests/", "scripts/")
    rest = [str(ROOT / word) if word.startswith(ours) else word for word in words[1:]]
    return [*program, *rest]


def run(check: Check, folder: Path, models: Path) -> str | None:
    """Run a check in its folder; return the problem, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "SLO_BENCH_TEST_DEVICE": "cuda:0"}
    with (folder / "log").open("w", encoding="utf-8") as log:
        for command in check.commands:
            words = words_of(command, models)
            log.write(f"$ {' '.join(words)}\n")
            log.flush()
            if check.asks and command is check.commands[-1]:
                if problem := _ask(words, check.asks, folder, environ, log.fileno()):
                    return problem
                continue
            where: dict[str, Any] = {"cwd": folder, "env": environ, "stdout": log, "stderr": log}
            try:
                subprocess.run(words, **where, check=True, timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                return f"did not end within {PATIENCE_S:g} s: {command}"
            except subprocess.CalledProcessError as error:
                return f"exit code {error.returncode}: {command}"
    try:
        return check.verify(folder)
    except (OSError, KeyError, ValueError) as error:
        return f"what it wrote cannot be read: {error}"


def _ask(
    words: Sequence[str],
    models: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    log: int,
) -> str | None:
    """Start a server, ask each model for an answer, and stop it."""
    address = folder / "address"
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(address.open("w"))
        server = subprocess.Popen(words, cwd=folder, env=environ, stdout=out, stderr=log)
        stack.callback(_stop, server)
        until_s = time.monotonic() + PATIENCE_S
        while not (url := address.read_text("utf-8").strip()):
            if server.poll() is not None:
                return f"the server ended with {server.returncode}"
            if time.monotonic() > until_s:
                return "the server printed no address"
            time.sleep(1)
        for model in models:
            body = {"model": model, "prompt": "one or two words", "max_tokens": 8}
            heads = {"content-type": "application/json"}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{url}/v1/completions", data, heads)
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    if not json.load(answer)["choices"][0]["text"]:
                        return f"{model} gave an empty answer"
            except OSError as error:
                return f"{model} gave no answer: {error}"
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_models(folder: Path, small_model: Path | None) -> Path:
    """The folder with the models `small` and `other`."""
    for seed, (name, size) in enumerate((("small", "1b"), ("other", "500m"))):
        path = folder / name
        if small_model is not None and name == "small" and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.symlink_to(small_model.resolve(), target_is_directory=True)
        if not path.exists():
            words = ["model", "make", str(path), "--size", size, "--seed", str(seed)]
            subprocess.run([*CLI, *words], check=True, stdout=subprocess.DEVNULL)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="names of checks, separated by commas")
    parser.add_argument("--model", type=Path, help="folder of a model in place of a random one")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [check.name for check in CHECKS]
    if strangers := set(names) - {check.name for check in CHECKS}:
        parser.error(f"no check {min(strangers)}; there are {', '.join(c.name for c in CHECKS)}")
    chosen = [check for check in CHECKS if check.name in names]
    if options.list:
        for check in chosen:
            print(f"{check.name:14} {check.title} (needs {', '.join(check.needs)})")
        return 0
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary_file = out / "summary.json"
    results = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    there = {need: REQUIREMENTS[need][0]() for check in chosen for need in check.needs}
    for check in chosen:
        if results.get(check.name, {}).get("result") != "pass":
            results[check.name] = _result(check, there, out, options.model)
            summary_file.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        outcome = results[check.name]
        print(f"{outcome['result']:4} {check.name:14} {outcome['why'] or check.title}", flush=True)
    return int(any(results[check.name]["result"] == "fail" for check in chosen))


def _result(
    check: Check, there: Mapping[str, bool], out: Path, model: Path | None
) -> dict[str, str]:
    missing = [REQUIREMENTS[need][1] for need in check.needs if not there[need]]
    if missing:
        return {"result": "skip", "why": f"needs {'; '.join(missing)}"}
    begin_s = time.monotonic()
    problem = run(check, out / check.name, make_models(out / "models", model))
    result = "fail" if problem else "pass"
    return {"result": result, "why": problem or "", "took_s": f"{time.monotonic() - begin_s:.0f}"}


if __name__ == "__main__":
    sys.exit(main())
