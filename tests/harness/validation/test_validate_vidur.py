"""Requests simulated by Vidur, reproduced one by one from the very tables that Vidur used.

Vidur (Agrawal et al., MLSys 2024) prices an iteration differently from this project and its vLLM
differs from vLLM in how it counts a batch of prompts. Both differences live here: what is tested
is that the loop takes every iteration as Vidur did.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slo_bench.harness.core.state import Phase
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import System
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.predictors.specs import ModelSpec, model
from slo_bench.workloads.workload import Workload

SHARED = Path(
    os.environ.get("SLO_BENCH_SHARED", Path(__file__).parents[4] / "shared" / "data")
).expanduser()
CROSSCHECK = SHARED / "profiles" / "crosscheck"
TABLES = CROSSCHECK / "vidur_tables_llama3-8b_a100.npz"
GRANULE = 64  # tokens of KV that Vidur rounds up to
SHARED_BATCH = 1.1  # attention over several sequences takes a tenth longer than its table says


class VidurStepTime:
    """Linear layers, attention of the decodes at their mean KV length, attention of prefill."""

    def __init__(self, tables: Path) -> None:
        archive = np.load(tables)
        scale = float(archive["layers"]) / 1e3
        self.linear_s = (archive["lin_ms"] * scale).tolist()
        self.decode_s = (archive["decode_ms"] * scale).tolist()
        self.prefill_s = (archive["prefill_ms"].astype(float) * scale).tolist()
        self.blocks = int(archive["num_blocks"])
        self.watermark_blocks = int(archive["watermark"])

    def step_s(self, decode_seqs, decode_kv_tokens, chunks: Sequence[tuple[int, int]]):
        tokens = decode_seqs + sum(chunk for _, chunk in chunks)
        seconds = self.linear_s[-8 * (-tokens // 8)]
        if chunks:
            granules = sum(-(-kv // GRANULE) for kv, _ in chunks)
            length = round(math.sqrt(sum(chunk * chunk for _, chunk in chunks)))
            several = SHARED_BATCH if len(chunks) > 1 else 1.0
            seconds += self.prefill_s[granules][length] * several
        if decode_seqs:
            # Vidur counts the token that is being computed.
            mean = (decode_kv_tokens + decode_seqs) // decode_seqs
            several = SHARED_BATCH if decode_seqs > 1 else 1.0
            seconds += self.decode_s[decode_seqs][-(-mean // GRANULE)] * several
        return seconds

    def _runs(self, seqs, kv_tokens):
        """(step time, steps that take it), granule after granule."""
        while True:
            mean = (kv_tokens + seqs) // seqs
            top = -(-mean // GRANULE) * GRANULE
            steps = ((top + 1) * seqs - kv_tokens - 1) // seqs
            yield self.step_s(seqs, kv_tokens, ()), steps
            kv_tokens += steps * seqs

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        total_s = 0.0
        runs = self._runs(decode_seqs, decode_kv_tokens)
        while steps > 0:
            step_s, max_steps = next(runs)
            total_s += step_s * min(steps, max_steps)
            steps -= max_steps
        return total_s

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        done = 0
        runs = self._runs(decode_seqs, decode_kv_tokens)
        while duration_s > 0:
            step_s, max_steps = next(runs)
            steps = min(max_steps, math.ceil(duration_s / step_s))
            done += steps
            duration_s -= steps * step_s
        return done


@dataclass(frozen=True)
class VidurVllm(VllmV0):
    """Vidur's vLLM: a batch of prompts is budgeted as if all were as long as the longest, and
    decodes keep no spare block.
    """

    def limits(self, view):
        return dataclasses.replace(super().limits(view), decode_headroom_blocks=0)

    def headroom_blocks(self, r, view):
        batch = [p.prompt_tokens for p in view.running() if p.phase is Phase.PREFILL]
        padded = (len(batch) + 1) * max([r.prompt_tokens, *batch])
        return 0 if padded <= self.max_num_batched_tokens else view.total_blocks


@dataclass(frozen=True)
class TableMemory:
    num_gpu_blocks: int
    model: ModelSpec
    block_size: int = 16
    num_cpu_blocks: int = 0
    pp: int = 1
    dp: int = 1
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    state_slots: int | None = None
    lanes: int = 1
    tp: int = 1
    swap_s_per_block: float = 0.0


def deviations_s(file: str, system: System) -> tuple[float, float]:
    """Largest difference in time to first token and in end-to-end latency over all requests."""
    with (CROSSCHECK / file).open() as lines:
        rows = list(csv.DictReader(lines))

    def column(name: str, kind: type = float) -> np.ndarray:
        return np.array([kind(row[name]) for row in rows])

    step_time = VidurStepTime(TABLES)
    workload = Workload(
        column("arrived_at"), column("prefill_tokens", int), column("decode_tokens", int)
    )
    placement = TableMemory(step_time.blocks, model("llama-3-8b"))
    records = simulate(workload, system, placement, step_time, overlong_requests="reject").records
    return (
        np.abs(records.ttft_s - column("ttft_s")).max(),
        np.abs(records.e2e_s - column("e2e_s")).max(),
    )


SARATHI = System("sarathi", Sarathi(chunk_tokens=512, max_num_seqs=512))
VLLM = System("vllm", VidurVllm(max_num_batched_tokens=4096, max_num_seqs=512))


@pytest.mark.skipif(not TABLES.is_file(), reason=f"no {TABLES}; SLO_BENCH_SHARED names the folder")
@pytest.mark.parametrize(
    ("run", "system"),
    [
        ("sarathi_1000_6.45", SARATHI),
        ("sarathi_5000_6.45", SARATHI),
        ("sarathi_5000_3.0", SARATHI),
        ("vllm_5000_6.45", VLLM),
    ],
)
def test_request_times_equal_those_of_vidur(run, system):
    ttft_s, e2e_s = deviations_s(f"vidur_llama3-8b_a100_{run}_lean.csv", system)
    assert ttft_s < 1e-6
    assert e2e_s < 1e-6
