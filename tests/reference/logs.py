"""Logs and a small profile that tests of replays share; where the recorded logs are."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.results.engine_logs import EngineSettings, RealLog
from slo_bench.predictors.operators.front_end import FrontEnd
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.profiles.formulas import profiled_step_time
from slo_bench.predictors.profiles.profile_format import Profile, table_of
from slo_bench.predictors.profiles.step_time_table import Host
from slo_bench.predictors.specs import gpu, model
from slo_bench.workloads.workload import Workload

SHARED = Path(os.environ.get("SLO_BENCH_SHARED", Path(__file__).parents[3] / "shared" / "data"))
LOGS = SHARED / "profiles" / "llmservingsim"
needs_data = pytest.mark.skipif(
    not LOGS.is_dir(), reason=f"no {LOGS}; SLO_BENCH_SHARED names the folder above profiles"
)

LAYERS = 32


def small_profile() -> Profile:
    kvs, sequences = (16, 1024, 4096), (1, 8, 64)
    decode = [(0, 0, n, kv, LAYERS, 10 + 0.004 * n * kv) for n in sequences for kv in kvs]
    prefill = [(c, x, 0, 0, LAYERS, 20 + 0.1 * c) for c in (16, 2048) for x in (0, 4096)]
    mixed = [
        (c, x, n, kv, LAYERS, 30 + 0.1 * c + 0.007 * n * kv)
        for c in (16, 2048)
        for x in (0, 4096)
        for n in sequences
        for kv in kvs
    ]
    linear = [("all", tokens, LAYERS, 300 + 0.9 * tokens) for tokens in (1, 64, 512, 2048)]
    return Profile(
        "llama-3.1-8b",
        "rtx-4090",
        multiprocessors=128,
        tables={
            "linear": table_of("linear", linear),
            "attention": table_of("attention", [*decode, *prefill, *mixed]),
        },
    )


PROFILE = small_profile()


def simulated_log(
    num_gpu_blocks: int,
    caching: bool,
    seed: int = 1,
    profile: Profile = PROFILE,
    front_end: FrontEnd | None = None,
    together: int = 1,
    gap_s: float = 0.1,
    longest_prompt: int = 900,
) -> tuple[RealLog, int]:
    """What the simulator does itself, as a log, and how often it preempted.

    With a front end it is the log of a client. So many requests arrive `together`, on average
    `gap_s` a request after those before.
    """
    rng = np.random.default_rng(seed)
    n = 80
    gaps_s = rng.exponential(gap_s * together, n) * (np.arange(n) % together == 0)
    workload = Workload(
        np.cumsum(gaps_s), rng.integers(50, longest_prompt, n), rng.integers(20, 500, n)
    )
    if caching:
        blocks = (workload.prompt_tokens + workload.output_tokens) // 16
        workload = dataclasses.replace(
            workload,
            prefix_blocks=[tuple(range(r << 32, (r << 32) + b)) for r, b in enumerate(blocks)],
        )
    settings = EngineSettings(
        model="meta-llama/Llama-3.1-8B",
        tp=1,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        num_gpu_blocks=num_gpu_blocks,
        block_size=16,
        prefix_caching=caching,
        async_scheduling=True,
    )
    placement = Placement(
        model("llama-3.1-8b"), gpu("rtx-4090"), fixed_num_gpu_blocks=num_gpu_blocks - 1
    )
    system = SYSTEMS["vllm"].with_parameters(
        max_num_seqs=32, max_num_batched_tokens=1024, async_scheduling=True
    )
    host = Host(launch_s=0.004, graph_tokens=64)
    step_time = profiled_step_time(profile, host).model
    records = simulate(workload, system, placement, step_time, front_end=front_end).records
    arrival_s = workload.arrival_s - workload.arrival_s[0]
    log = RealLog(
        "made up",
        arrival_s,
        arrival_s,
        workload.prompt_tokens,
        workload.output_tokens,
        records.first_token_s - workload.arrival_s[0],
        records.finish_s - workload.arrival_s[0],
        settings,
        np.arange(len(workload)),
        of_client=front_end is not None,
    )
    return log, int(records.preemptions_recompute.sum())


def log_file(folder: Path) -> Path:
    log, _ = simulated_log(400, caching=False)
    rows = [
        {
            "input_toks": int(p),
            "output_toks": int(o),
            "queued_ts": a,
            "first_token_ts": f,
            "last_token_ts": e,
        }
        for p, o, a, f, e in zip(
            log.prompt_tokens,
            log.output_tokens,
            log.arrival_s,
            log.first_s,
            log.last_s,
            strict=True,
        )
    ]
    file = folder / "requests.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    meta = {"engine_kwargs": {"max_num_seqs": 32, "max_num_batched_tokens": 1024}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return file
