"""The engine on a real model: tokens do not depend on what the policy did to a request."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from reference.kv_block_ids import check_block_ids  # noqa: E402
from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager  # noqa: E402
from slo_bench.harness.core.policy import Policy, StaticPolicy  # noqa: E402
from slo_bench.harness.core.predictions import LearnedPredictions  # noqa: E402
from slo_bench.harness.core.state import RequestState  # noqa: E402
from slo_bench.harness.engine.loop.measures import Measures  # noqa: E402
from slo_bench.harness.engine.loop.timed import Ran, Recording, TimedInstance  # noqa: E402
from slo_bench.harness.engine.simulator.simulated import SimulatedInstance  # noqa: E402
from slo_bench.harness.engine.torch.cache import KvCache, Swapper  # noqa: E402
from slo_bench.harness.engine.torch.decoder import Decoder  # noqa: E402
from slo_bench.harness.engine.torch.executed_static import PagedStaticInstance, StaticExecution  # noqa: E402
from slo_bench.harness.engine.torch.execution import Execution, PagedInstance  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.runner import Runner  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sampling, Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_kv_cache_manager import TorchKVCacheManager  # noqa: E402
from slo_bench.harness.policies.systems import system  # noqa: E402
from slo_bench.workloads.request import Slo  # noqa: E402

pytestmark = pytest.mark.torch


Greedy = Callable[[str, list[int], int], list[int]]
Folder = Callable[[str], Path]
BLOCK = 8
DEVICE = os.environ.get("SLO_BENCH_TEST_DEVICE", "cpu")  # cuda:0 on a machine that has one
NO_SLO = Slo()


class Jumps:
    """A clock that goes on by some time whenever it is read."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += self._draw.choice((0.001, 0.01, 0.02))
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)


def tokens_of(block: int, count: int = BLOCK) -> list[int]:
    draw = random.Random(block)
    return [draw.randrange(3, 160) for _ in range(count)]


def prompt_of(r: RequestState) -> list[int]:
    """The same for the same prefix blocks."""
    tokens = [token for block in r.prefix_blocks for token in tokens_of(block)]
    return (tokens + tokens_of(10_000 + r.id, 200))[: r.prompt_tokens]


def requests(count: int, seed: int = 0, prefixes: bool = False) -> list[RequestState]:
    draw = random.Random(seed)
    request_states, now_s = [], 0.0
    for row in range(count):
        now_s += draw.choice((0.0, 0.01, 0.05))
        prompt, answer = draw.randint(1, 60), draw.randint(1, 24)
        blocks: tuple[int, ...] = ()
        if prefixes:
            first = 100 * draw.randrange(3)  # a hash names its tokens and all before them
            blocks = tuple(range(first, first + min(5, prompt // BLOCK)))
        request_states.append(RequestState(row, now_s, prompt, answer, 30, NO_SLO, blocks))
    return request_states


class Engine:
    """A paged instance with everything it needs; `answers` by request."""

    def __init__(
        self,
        decoder: Decoder,
        policy: Policy,
        *,
        blocks: int = 200,
        num_cpu_blocks: int = 0,
        prefixes: bool = False,
        sampling: Sampling | None = None,
        eos: frozenset[int] = frozenset(),
        kind: type[PagedInstance] = PagedInstance,
    ) -> None:
        cache = KvCache(decoder.config, blocks, BLOCK, decoder.dtype, decoder.device)
        cpu = torch.device("cpu")
        host = KvCache(decoder.config, num_cpu_blocks, BLOCK, decoder.dtype, cpu, pinned=True)
        self.kv_manager = TorchKVCacheManager(
            blocks, BLOCK, num_cpu_blocks, BLOCK if prefixes else 0
        )
        predictions = LearnedPredictions()
        how = sampling or Sampling()
        self.execution = Execution(
            Runner(decoder, cache),
            self.kv_manager,
            Swapper(cache, host) if num_cpu_blocks else None,
            Jumps(),
            predictions,
            lambda r: Sequence(prompt_of(r), how, eos),
        )
        self.answers: dict[int, list[int]] = {}
        self.streamed: dict[int, list[int]] = {}
        self.instance = kind(policy, self.kv_manager, predictions, self.execution, Measures())
        self.instance.ended = self._ended
        self.instance.gave = lambda r, token: self.streamed.setdefault(r.id, []).append(token)

    def _ended(self, r: RequestState, sequence: Sequence) -> None:
        self.answers[r.id] = sequence.tokens

    def run(self, request_states: Iterable[RequestState]) -> dict[int, list[int]]:
        self.instance.inbox.extend(request_states)
        self.instance.run(float("inf"), False)
        check_block_ids(self.kv_manager)
        assert self.kv_manager.free == self.kv_manager.total
        assert self.kv_manager.host_free == self.kv_manager.host_total
        assert not self.execution.sequences
        return self.answers


@pytest.fixture(scope="module")
def decoder(model_folder: Folder) -> Decoder:
    return load_decoder(model_folder("qwen3"), DEVICE, "float32")


def reference(generated: Greedy, request_states: list[RequestState]) -> dict[int, list[int]]:
    return {r.id: generated("qwen3", prompt_of(r), r.output_tokens) for r in request_states}


@pytest.mark.parametrize(
    ("name", "blocks", "num_cpu_blocks", "prefixes"),
    [
        ("vllm", 200, 0, False),
        ("vllm", 24, 0, False),
        ("vllm", 24, 0, True),
        ("vllm-swap", 24, 40, False),
        ("vllm-swap", 24, 40, True),
        ("vllm-swap", 24, 6, False),
        ("adaptivellm", 24, 40, False),
        ("sarathi", 24, 0, False),
        ("sglang", 30, 0, True),
        ("orca", 60, 0, False),
        ("vllm-v0", 24, 0, False),
    ],
)
def test_tokens_equal_generate_under_every_policy(
    name: str, blocks: int, num_cpu_blocks: int, prefixes: bool, decoder: Decoder, generated: Greedy
) -> None:
    request_states = requests(14, seed=2, prefixes=prefixes)
    policy = system(name).policy
    assert isinstance(policy, Policy)
    engine = Engine(
        decoder, policy, blocks=blocks, num_cpu_blocks=num_cpu_blocks, prefixes=prefixes
    )
    assert engine.run(request_states) == reference(generated, request_states)
    for r in request_states:
        assert engine.streamed[r.id] == engine.answers[r.id][r.prompt_tokens :]
    if blocks == 24 and num_cpu_blocks != 6:  # where host memory is full, it admits nobody instead
        assert engine.instance.measures.preemptions
    if num_cpu_blocks == 40 and name == "vllm-swap":
        assert any(r.swaps for r in request_states)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(["vllm", "vllm-swap", "sglang", "sarathi", "adaptivellm"]),
    blocks=st.integers(13, 40),
    num_cpu_blocks=st.integers(0, 20),
    prefixes=st.booleans(),
)
def test_tokens_do_not_depend_on_memory_in_random_runs(
    seed: int,
    name: str,
    blocks: int,
    num_cpu_blocks: int,
    prefixes: bool,
    decoder: Decoder,
    plenty: dict[int, dict[int, list[int]]],
) -> None:
    """Against the same engine with all the room it could want."""
    policy = system(name).policy
    assert isinstance(policy, Policy)
    key = 2 * seed + prefixes
    if key not in plenty:
        wide = Engine(decoder, system("vllm").policy, blocks=400)  # type: ignore[arg-type]
        plenty[key] = wide.run(requests(8, seed, prefixes))
    engine = Engine(
        decoder, policy, blocks=blocks, num_cpu_blocks=num_cpu_blocks, prefixes=prefixes
    )
    assert engine.run(requests(8, seed, prefixes)) == plenty[key]


@pytest.fixture(scope="module")
def plenty() -> dict[int, dict[int, list[int]]]:
    return {}


def test_sampled_tokens_do_not_depend_on_preemptions(decoder: Decoder) -> None:
    hot = Sampling(temperature=1.2, top_p=0.9, seed=11)

    def answers(blocks: int) -> dict[int, list[int]]:
        policy = system("vllm").policy
        assert isinstance(policy, Policy)
        engine = Engine(decoder, policy, blocks=blocks, sampling=hot)
        sampled = engine.run(requests(10, seed=5))
        assert bool(engine.instance.measures.preemptions) is (blocks < 100)
        return sampled

    assert answers(200) == answers(20)


def test_answer_ends_with_the_eos_token(decoder: Decoder, generated: Greedy) -> None:
    request_states = requests(10, seed=6)
    whole = reference(generated, request_states)
    eos = frozenset(range(3, 20))
    policy = system("vllm").policy
    assert isinstance(policy, Policy)
    engine = Engine(decoder, policy, blocks=24, eos=eos)
    cut = {}
    for r in requests(10, seed=6):
        answer = whole[r.id][r.prompt_tokens :]
        end = next((n for n, token in enumerate(answer, 1) if token in eos), len(answer))
        cut[r.id] = whole[r.id][: r.prompt_tokens + end]
    assert engine.run(request_states) == cut
    assert cut != whole
    assert all(r.emitted_tokens == len(cut[r.id]) - r.prompt_tokens for r in request_states)


class Diary:
    """What an instance decided, iteration by iteration."""

    diary: ClassVar[list[Any]]

    def schedule(self) -> bool:
        runs: bool = super().schedule()  # type: ignore[misc]
        loop: Any = self
        entry = (
            runs,
            loop.decode_seqs,
            [r.id for r in loop.decoding],
            [r.id for r in loop.prefilling],
            list(loop.chunks),
            sorted(r.id for r in loop.swapped),
            sorted(r.id for r in loop.waiting),
            loop.kv_manager.free,
            loop.now_s,
        )
        loop.diary.append(entry)
        return runs


class PagedDiary(Diary, PagedInstance):
    diary: ClassVar[list[Any]] = []


class TimedDiary(Diary, TimedInstance):
    diary: ClassVar[list[Any]] = []


class SimulatedDiary(Diary, SimulatedInstance):
    diary: ClassVar[list[Any]] = []


@pytest.mark.parametrize(
    ("name", "num_cpu_blocks", "prefixes"),
    [
        ("vllm", 0, False),
        ("sglang", 0, True),
        ("sarathi", 0, False),
        ("vllm-swap", 30, False),
        ("adaptivellm", 30, False),
        ("edf-drop", 0, False),
    ],
)
def test_replayed_step_times_give_the_same_decisions(
    name: str, num_cpu_blocks: int, prefixes: bool, decoder: Decoder
) -> None:
    policy = system(name).policy
    assert isinstance(policy, Policy)
    real = Engine(
        decoder,
        policy,
        blocks=24,
        num_cpu_blocks=num_cpu_blocks,
        prefixes=prefixes,
        kind=PagedDiary,
    )
    ran: list[Ran] = []
    real.execution.heard = lambda seqs, kv_tokens, chunks, step: ran.append(step)
    PagedDiary.diary = []
    request_states = requests(16, seed=9, prefixes=prefixes)
    real.run(request_states)
    assert PagedDiary.diary

    # The simulator itself knows no swaps that are part of a step; where there are none, it is it.
    kind: Any = TimedDiary if num_cpu_blocks else SimulatedDiary
    kind.diary = []
    predictions = LearnedPredictions()
    kv_manager = KVCacheManager(24, BLOCK, num_cpu_blocks, BLOCK if prefixes else 0)
    recording = Recording(ran, predictions)
    replayed = kind(policy, kv_manager, predictions, recording, (), Measures())
    again = requests(16, seed=9, prefixes=prefixes)
    replayed.inbox.extend(again)
    replayed.run(float("inf"), False)
    assert kind.diary == PagedDiary.diary
    for measured, other in zip(request_states, again, strict=True):
        for column in ("first_token_s", "finish_s", "swaps", "recomputes", "cached_tokens"):
            left, right = getattr(measured, column), getattr(other, column)
            assert left == right or left != left, column


@pytest.mark.parametrize(
    ("name", "blocks", "parameters"),
    [("fifo", 200, {}), ("fifo", 40, {}), ("s3", 40, {}), ("slo-odbs", 200, {"output_cap": 0})],
)
def test_static_batches_generate_the_tokens_of_generate(
    name: str, blocks: int, parameters: dict[str, int], decoder: Decoder, generated: Greedy
) -> None:
    policy = system(name).with_parameters(**parameters).policy
    assert isinstance(policy, StaticPolicy)
    cache = KvCache(decoder.config, blocks, BLOCK, decoder.dtype, decoder.device)
    kv_manager = TorchKVCacheManager(blocks, BLOCK)
    clock = Jumps()
    execution = StaticExecution(
        Runner(decoder, cache), kv_manager, clock, lambda r: Sequence(prompt_of(r))
    )
    instance = PagedStaticInstance(policy, kv_manager, LearnedPredictions(), execution, Measures())
    answers: dict[int, list[int]] = {}
    instance.ended = lambda r, sequence: answers.update({r.id: sequence.tokens})
    request_states = requests(12, seed=12)
    instance.inbox.extend(request_states)
    instance.run(float("inf"), False)
    assert answers == reference(generated, request_states)
    assert instance.measures.padded_tokens
    check_block_ids(kv_manager)
    assert not execution.sequences
    assert all(r.finish_s >= r.first_token_s > r.arrival_s for r in request_states)
