"""Instances in processes of their own: KV is handed over, layers and heads move between them, and
not a token is another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference.kv_block_ids import check_block_ids
from slo_bench.harness.core.predictions import Guess
from slo_bench.harness.core.records.request_records import Result
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import system
from slo_bench.workloads.workload import Workload

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch import distributed  # noqa: E402
from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig  # noqa: E402
from slo_bench.harness.engine.torch.clock import CpuClock  # noqa: E402
from slo_bench.harness.engine.torch.executed_cluster import (  # noqa: E402
    ExecutedCluster,
    InstanceProcesses,
    LearnedStepTime,
    spare_blocks,
)
from slo_bench.harness.engine.torch.execution import Opens, PagedInstance  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.tiers import TierFolder  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK = 8
Answers = dict[int, list[int]]


class Steps(LearnedStepTime):
    """What policies are told: 0.1 ms a token."""

    def step_s(self, decode_seqs: int, decode_kv_tokens: int, chunks: Any) -> float:
        return 1e-3 + 1e-4 * (decode_seqs + sum(tokens for _, tokens in chunks))


class Processes(InstanceProcesses):
    """Every look at the clock takes a millisecond; answers are kept."""

    ticks = 0

    def __post_init__(self) -> None:
        self.answers: Answers = {}
        super().__post_init__()
        self.step_time = Steps(self.predictions)

    def elapsed_s(self) -> float:
        self.ticks += 1
        return self.ticks * 1e-3

    def _link(self) -> str:
        return "1gb/s@100us"

    def make(self, *arguments: Any, **settings: Any) -> Any:
        instance = super().make(*arguments, **settings)
        if isinstance(instance, PagedInstance):
            instance.ended = lambda r, sequence: self.answers.update({r.id: sequence.tokens})
        return instance


@pytest.fixture(autouse=True)
def moves_take_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine: what is decided does not hang on its speed."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(distributed, "time", clock)


class Busy(dict[int, float]):
    """CPU seconds of workers: 0.1 ms for each answer."""

    def __setitem__(self, rank: int, measured_s: float) -> None:
        super().__setitem__(rank, self.get(rank, 0.0) + 1e-4)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(3) as pool:
        pool.busy_s = Busy()
        yield pool
    assert all(process.poll() == 0 for process in pool.processes)


def requests(count: int, *, every_s: float = 0.004, output_tokens: int = 12) -> Workload:
    rows = np.arange(count)
    return Workload(rows * every_s, 5 + 7 * (rows % 9), output_tokens + rows % 5)


def prompt_of(r: RequestState) -> Sequence:
    draw = random.Random(r.id)
    return Sequence([draw.randrange(3, 160) for _ in range(r.prompt_tokens)])


def alone(folder: Path, workload: Workload, opens: Opens = prompt_of) -> Answers:
    """Answers of an engine whose model is in one piece."""
    engine = Engine(load_decoder(folder), KvCacheConfig(400, BLOCK))
    policy: Any = system("vllm").policy
    instance = engine.instance(policy, opens, CpuClock())
    assert isinstance(instance, PagedInstance)
    answers: Answers = {}
    instance.ended = lambda r, sequence: answers.update({r.id: sequence.tokens})
    for row, request in enumerate(workload):
        output_tokens = request.output_tokens
        instance.inbox.append(
            RequestState(row, 0.0, request.prompt_tokens, output_tokens, output_tokens, request.slo)
        )
    instance.run(float("inf"), False)
    return answers


def executed(
    name: str,
    folder: Path,
    workers: Workers,
    workload: Workload,
    room: KvCacheConfig,
    opens: Opens = prompt_of,
    **parameters: Any,
) -> tuple[Processes, Result]:
    decoder = load_decoder(folder)
    room = replace(room, spare_blocks=spare_blocks(folder, decoder, room))
    processes = Processes(decoder, folder, room, workers, opens, Guess())
    result = simulate(
        workload,
        system(name).with_parameters(**parameters),
        processes.placement,
        processes.step_time,
        instances=workers.count,
        engine=processes.make,
        cluster=ExecutedCluster,
    )
    for instance in processes.instances:
        check_block_ids(instance.kv_manager)
    return processes, result


def test_tokens_are_unchanged_by_hand_over_to_decode_processes(
    workers: Workers, save_model: Callable[..., Path]
) -> None:
    folder, workload = save_model("qwen3", num_hidden_layers=4), requests(24)
    processes, result = executed(
        "distserve", folder, workers, workload, KvCacheConfig(120, BLOCK), prefill_instances=2
    )
    assert result.counts["handovers"] == len(workload)
    assert processes.answers == alone(folder, workload)
    assert (result.records.transfer_s > 0).all()


EAGER = {
    "benefit": "printed",
    "rise": 0.0,
    "fall": 0.0,
    "efficiency": 0.0,
    "control_every_s": 0.02,
    "window_s": 0.05,
}


@pytest.mark.parametrize(
    ("module", "prefill_instances", "output_tokens", "every_s"),
    [("layers", 1, 12, 0.01), ("heads", 2, 40, 0.002)],
)
def test_tokens_are_unchanged_while_modules_move_between_instances(
    module: str,
    prefill_instances: int,
    output_tokens: int,
    every_s: float,
    workers: Workers,
    save_model: Callable[..., Path],
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    folder = save_model("qwen3", num_hidden_layers=4, **heads)
    workload = requests(30, every_s=every_s, output_tokens=output_tokens)
    processes, result = executed(
        "banaserve",
        folder,
        workers,
        workload,
        KvCacheConfig(200, BLOCK),
        **EAGER,
        prefill_instances=prefill_instances,
        large_gap=0.0,
        layer_moves=module == "layers",
        head_moves=module == "heads",
    )
    assert processes.answers == alone(folder, workload)
    moves = [moved.move for instance in processes.instances for moved in instance.moves]
    assert {move.what for move in moves} == {module}
    assert all(move.moved_bytes > 0 for move in moves)
    assert result.counts["returns"] > 0 or module == "heads"
    assert result.counts[f"{module[:-1]}_moves"] > 0


CONVERSATIONS = (0, 1, 2, 1, 0, 1)  # by turns on two instances


def test_prefixes_are_found_in_the_shared_kv_store(
    workers: Workers, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_model("qwen3", num_hidden_layers=4)
    workload = replace(
        requests(6),
        arrival_s=np.repeat([0.0, 0.5], 3),
        prompt_tokens=np.full(6, 33),
        prefix_blocks=[tuple(100 * number + n for n in range(4)) for number in CONVERSATIONS],
        prefix_block_size=BLOCK,
    )
    tiers = (TierFolder.parse(f"{tmp_path}/store=0.01"),)
    room = KvCacheConfig(200, BLOCK, prefix_block_size=BLOCK, store=tiers)
    settings: Any = {
        "prefill_instances": 2,
        "load_threshold": 0.0,
        "layer_moves": False,
        "head_moves": False,
    }
    processes, result = executed(
        "banaserve", folder, workers, workload, room, opens=conversation, **settings
    )
    assert result.counts["store_hits"] > 0
    assert processes.answers == alone(folder, workload, conversation)
    assert list((tmp_path / "store").glob("[0-9]*"))


def conversation(r: RequestState) -> Sequence:
    draw = random.Random(CONVERSATIONS[r.id])
    return Sequence([draw.randrange(3, 160) for _ in range(r.prompt_tokens)])
