"""Requests are preempted, swapped and resumed while layers and heads are elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.core.policy import Policy  # noqa: E402
from slo_bench.harness.core.state import RequestState  # noqa: E402
from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig  # noqa: E402
from slo_bench.harness.engine.torch.clock import RealClock  # noqa: E402
from slo_bench.harness.engine.torch.execution import Execution, PagedInstance  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402
from slo_bench.harness.policies.systems import system  # noqa: E402
from slo_bench.workloads.request import Slo  # noqa: E402

pytestmark = pytest.mark.torch

Greedy = Callable[[str, list[int], int], list[int]]
BLOCK = 8


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def requests(count: int) -> list[RequestState]:
    draw = random.Random(7)
    return [
        RequestState(row, 0.0, draw.randint(1, 60), draw.randint(4, 24), 30, Slo())
        for row in range(count)
    ]


def prompt_of(r: RequestState) -> list[int]:
    draw = random.Random(r.id)
    return [draw.randrange(3, 160) for _ in range(r.prompt_tokens)]


def test_tokens_are_unchanged_by_swaps_while_layers_and_heads_are_away(
    workers: Workers, model_folder: Callable[[str], Path], generated: Greedy
) -> None:
    decoder = load_decoder(model_folder("qwen3"))
    engine = Engine(decoder, KvCacheConfig(24, BLOCK, 40), workers)
    policy, spread = system("vllm-swap").policy, engine.spread
    assert isinstance(policy, Policy)
    assert spread is not None
    request_states = requests(14)
    answers: dict[int, list[int]] = {}
    instance = engine.instance(policy, lambda r: Sequence(prompt_of(r)), RealClock())
    assert isinstance(instance, PagedInstance)
    instance.ended = lambda r, sequence: answers.update({r.id: sequence.tokens})
    execution = instance.step_time
    assert isinstance(execution, Execution)
    swapped: list[int] = []  # requests in host memory at each move

    def in_turn() -> Iterator[None]:
        while True:
            for move in (
                lambda: spread.move_layers([1], 1),
                lambda: spread.move_heads(0, 1, helper=2),
                lambda: spread.move_layers([1], 2),
                lambda: spread.return_heads(0),
                lambda: spread.move_layers([1], 0),
            ):
                yield
                swapped.append(sum(r.in_host_memory for r in instance.swapped))
                move()
                yield

    turns = in_turn()
    execution.between = lambda: next(turns)
    instance.inbox.extend(request_states)
    instance.run(float("inf"), False)
    assert answers == {
        r.id: generated("qwen3", prompt_of(r), r.output_tokens) for r in request_states
    }
    assert len(spread.moves) > 10
    assert any(swapped)
    assert any(r.swaps for r in request_states)
    whole = decoder.config.kv_bytes_per_token(4) * BLOCK * (24 + 40)
    heads = [move.moved_bytes for move in spread.moves if move.what == "heads"]
    assert max(heads) < whole // 4  # blocks in use, not all there are
