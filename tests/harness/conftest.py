"""A system small enough to follow by hand: a clock of whole seconds and a few KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from reference.plain import PlainInstance
from slo_bench.harness.core.records.request_records import Records, Result
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import System
from slo_bench.workloads.workload import Workload

Step = tuple[int, int, list[tuple[int, int]]]  # decoding requests, their KV tokens, chunks


@dataclass
class Seconds:
    """Every iteration takes `step_s_`, and `per_token_s` for each token computed in it.

    `leaps=False` makes the simulator ask for every single iteration, which `log` then shows.
    """

    step_s_: float = 1.0
    per_token_s: float = 0.0
    leaps: bool = True
    log: list[Step] = field(default_factory=list)

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        self.log.append((decode_seqs, decode_kv_tokens, list(chunks)))
        tokens = decode_seqs + sum(tokens for _, tokens in chunks)
        return self.step_s_ + self.per_token_s * tokens

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        return steps * (self.step_s_ + self.per_token_s * decode_seqs)

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        if duration_s <= 0 or not self.leaps:
            return 0
        each_s = self.step_s_ + self.per_token_s * decode_seqs
        steps = max(1, int(duration_s / each_s) - 1)
        while steps * each_s < duration_s:
            steps += 1
        return steps


@dataclass(frozen=True)
class Memory:
    """A placement reduced to what the simulator asks of it."""

    num_gpu_blocks: int = 1000
    num_cpu_blocks: int = 0
    swap_s_per_block: float = 0.25
    pp: int = 1
    dp: int = 1
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    block_size: int = 16
    context_tokens: int = 1 << 20
    state_slots: int | None = None

    @property
    def model(self) -> Memory:
        return self

    @property
    def lanes(self) -> int:
        return self.pp

    @property
    def tp(self) -> int:
        return 1


@dataclass(frozen=True)
class Served:
    result: Result
    log: list[Step]  # every iteration; empty where leaps hide some

    @property
    def records(self) -> Records:
        return self.result.records


@pytest.fixture(scope="session")
def serve() -> Callable[..., Served]:
    """`serve(workload, system or policy, step_s=…, num_gpu_blocks=…, …, any option of
    simulate())`.
    """

    def served(workload, system, *, step_s=1.0, per_token_s=0.0, leaps=True, **options):
        of_memory = {k: options.pop(k) for k in list(options) if k in Memory.__dataclass_fields__}
        clock = Seconds(step_s, per_token_s, leaps)
        if not isinstance(system, System):
            system = System("own", system)
        result = simulate(workload, system, Memory(**of_memory), clock, **options)
        return Served(result, [] if leaps else clock.log)

    return served


@pytest.fixture(params=["every iteration", "leaping", "plain reference"])
def serve_each_way(serve, request) -> Callable[..., Served]:
    """As `serve`, in three ways that must not differ."""

    def served(workload, system, **options):
        way = request.param
        engine = PlainInstance if way == "plain reference" else None
        return serve(workload, system, leaps=way == "leaping", engine=engine, **options)

    return served


@pytest.fixture(scope="session")
def requests() -> Callable[..., Workload]:
    """`requests((arrival_s, prompt, output), …, follows=[…])`: a workload, row by row."""

    def made(*rows, **columns):
        arrival, prompt, output = zip(*rows, strict=True)
        for name in ("max_output_tokens", "follows", "think_s", "ttft_slo_s"):
            if name in columns:
                columns[name] = np.array(columns[name])
        return Workload(
            np.array(arrival, dtype=float), np.array(prompt), np.array(output), **columns
        )

    return made
