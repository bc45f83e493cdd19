"""A small, seeded, plausible run folder: a queue of slots in front of a decoder that slows down."""

from __future__ import annotations

import functools
import gzip
import heapq
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

SLOTS = {"vllm": 40, "sarathi": 46, "orca": 22, "fastertransformer": 12}
ENVIRONMENT = {
    "slo_bench": "0.2.0",
    "python": "3.11.7",
    "platform": "Linux x86_64",
    "command": "slo-bench run",
    "created": "2026-01-02T03:04:05+00:00",
    "step_time": {
        "llama-3.1-8b on a100-80g tp1": {"fitted": True, "provenance": "fitted to a profile"}
    },
}
TOML = '[experiment]\nsystems = ["vllm", "orca"]\nslo = "ttft=1,tpot=0.15"\n'

MakeRun = Callable[..., Path]


def _serve(system: str, rate: float, seed: int, n: int, slow: float) -> pd.DataFrame:
    rng = np.random.default_rng([seed, int(rate * 100), n])
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    tokens = np.maximum(1, rng.lognormal(5, 0.8, n)).astype(int)
    prompt = np.maximum(1, rng.lognormal(5.5, 1, n)).astype(int)
    free = [0.0] * SLOTS.get(system, 30)
    rows = []
    for i in range(n):
        start = max(arrival[i], heapq.heappop(free))
        if start - arrival[i] > 20:
            heapq.heappush(free, start - 1e-6)
            rows.append((np.nan, np.nan, np.nan, "dropped", 0))
            continue
        first = start + 0.03 + prompt[i] * 1e-4 * slow
        finish = first + (tokens[i] - 1) * 0.03 * slow * rng.uniform(0.8, 1.3) * (1 + rate / 20)
        heapq.heappush(free, finish)
        rows.append((start, first, finish, "finished", tokens[i]))
    served = pd.DataFrame(
        rows, columns=["first_scheduled_s", "first_token_s", "finish_s", "outcome", "output_tokens"]
    )
    frame = pd.DataFrame(
        {
            "id": range(n),
            "arrival_s": arrival,
            "prompt_tokens": prompt,
            "expected_output_tokens": tokens,
            "class": np.where(rng.random(n) < 0.5, "chat", "code"),
            "ttft_slo_s": 1.0,
            "tpot_slo_s": 0.06,
            "e2e_slo_s": np.nan,
            "deadline_s": np.nan,
        }
    ).join(served)
    ttft = frame["first_token_s"] - frame["arrival_s"]
    tpot = (frame["finish_s"] - frame["first_token_s"]) / (frame["output_tokens"] - 1).replace(
        0, np.nan
    )
    done = frame["outcome"] == "finished"
    frame["slo_met"] = (done & (ttft <= 1.0) & ~(tpot > 0.06)).astype(int)
    return frame


@functools.cache
def _cell(
    system: str, rate: float, seed: int, requests: int, slow: float
) -> tuple[bytes, bytes, dict[str, object]]:
    """The packed requests and timeline of a cell, and its figures; runs share equal cells."""
    served = _serve(system, rate, seed, requests, slow)
    packed = (
        gzip.compress(table.to_csv(index=False).encode(), compresslevel=1, mtime=0)
        for table in (served, _timeline(served))
    )
    return (*packed, _row(served))  # type: ignore[return-value]


def _row(requests: pd.DataFrame) -> dict[str, object]:
    ttft = requests["first_token_s"] - requests["arrival_s"]
    gaps = (requests["output_tokens"] - 1).where(requests["output_tokens"] > 1)
    tpot = (requests["finish_s"] - requests["first_token_s"]) / gaps
    e2e = requests["finish_s"] - requests["arrival_s"]
    first, last = requests["arrival_s"].min(), requests["arrival_s"].max()
    span = float(requests["finish_s"].max() - first)
    met, done = requests["slo_met"] == 1, requests["outcome"] == "finished"
    row = {"requests": len(requests), "attainment": met.mean()}
    row["goodput_rps"] = met.sum() / (last - first if last > first else span)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        for p in (50, 90, 99):
            row[f"{name}_p{p}_s"] = values.quantile(p / 100)
        row[f"{name}_mean_s"] = values.mean()
    row |= {
        "arrival_window_s": last - first,
        "drain_s": span - (last - first),
        "makespan_s": span,
        "throughput_rps": done.sum() / span,
        "output_tokens_per_s": requests["output_tokens"].sum() / span,
        "preemptions_swap": 0,
        "preemptions_recompute": 3,
        "kv_cache_usage_peak": 0.91,
        "valid": True,
        "step_time": "fitted",
        "cost_usd_per_hour": 1.8,
        "finished": done.sum(),
        "dropped": (requests["outcome"] == "dropped").sum(),
    }
    shares = {f"attainment_{c}": (of["slo_met"] == 1).mean() for c, of in requests.groupby("class")}
    if len(shares) > 1:
        row |= {**shares, "attainment_spread": max(shares.values()) - min(shares.values())}
    return row


@pytest.fixture
def make_run(make_runs: Callable[[Path], MakeRun], tmp_path: Path) -> MakeRun:
    """A factory of run folders under the test's own folder."""
    return make_runs(tmp_path)


@pytest.fixture(scope="session")
def make_runs() -> Callable[[Path], MakeRun]:
    """A function from a folder to a factory of run folders under it."""
    return lambda parent: functools.partial(_make_run, parent)


def _make_run(
    parent: Path,
    name: str = "run",
    *,
    systems: Sequence[str] = ("vllm", "orca"),
    rates: Sequence[float] = (1.0, 3.0, 5.0),
    seeds: int = 2,
    requests: int = 120,
    backend: str = "simulated",
    model: str = "llama-3.1-8b",
    axes: Mapping[str, Sequence[str]] | None = None,
    toml: str = TOML,
    environment: Mapping[str, object] = ENVIRONMENT,
    **changes: object,
) -> Path:
    """`axes` gives sweep axes; `changes` overwrite columns of every row of cells.csv."""
    folder = parent / name
    for sub in ("requests", "timelines"):
        (folder / sub).mkdir(parents=True)
    (folder / "experiment.toml").write_text(toml)
    (folder / "environment.json").write_text(json.dumps(environment))
    points = [{}]
    for axis, values in (axes or {}).items():
        points = [{**point, axis: value} for point in points for value in values]
    rows = []
    for system in systems:
        for place, point in enumerate(points):
            for rate in rates:
                for seed in range(seeds):
                    stem = f"{len(rows):03d}"
                    served, timeline, figures = _cell(system, rate, seed, requests, 1 + 0.3 * place)
                    (folder / f"requests/{stem}.csv.gz").write_bytes(served)
                    (folder / f"timelines/{stem}.csv.gz").write_bytes(timeline)
                    lead = {
                        "cell": stem,
                        "system": system,
                        "backend": backend,
                        "workload": "sharegpt",
                        "model": model,
                        "gpu": "a100-80g",
                        "gpus": 1,
                        "rate_rps": rate,
                        "replay_speed": np.nan,
                        "seed": seed,
                        **point,
                    }
                    rows.append(lead | figures | changes)
    pd.DataFrame(rows).to_csv(folder / "cells.csv", index=False)
    return folder


def _timeline(requests: pd.DataFrame) -> pd.DataFrame:
    time = np.linspace(0, float(requests["finish_s"].max()), 300)
    arrived = np.searchsorted(np.sort(requests["arrival_s"]), time)
    started = np.searchsorted(np.sort(requests["first_scheduled_s"].dropna()), time)
    done = np.searchsorted(np.sort(requests["finish_s"].dropna()), time)
    running = started - done
    lost = np.cumsum(requests["outcome"].eq("dropped"))
    waiting = arrived - started - np.where(arrived > 0, lost.to_numpy()[arrived - 1], 0)
    return pd.DataFrame(
        {
            "time_s": time,
            "waiting": np.maximum(waiting, 0),
            "running": running,
            "kv_cache_usage": running / 50,
        }
    )


@pytest.fixture(scope="session")
def headless() -> ModuleType:
    """`headless.py` beside this file; tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("headless", Path(__file__).parent / "headless.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["headless"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(headless: ModuleType) -> Iterator[Any]:
    """One Chromium (`headless.Browser`) for all tests of a file."""
    program = headless.find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    found = headless.Browser(program)
    yield found
    found.close()
