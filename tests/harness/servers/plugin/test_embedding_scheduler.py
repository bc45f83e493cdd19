"""Passes of an embedding server under the policy inside the language model's server."""

from __future__ import annotations

import json
import math
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from slo_bench.harness.core.collocated_policy import Beside, Collocated
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.wire import REJECTED
from slo_bench.harness.policies.collocation.collocation_baselines import CollocatedFcfs, StaticSplit
from slo_bench.harness.policies.collocation.collocation_policy import Collocation
from slo_bench.harness.servers.plugin.contract import EMBED_PASSES, EmbedderBeside
from slo_bench.harness.servers.plugin.embedding_scheduler import EmbeddingScheduler
from slo_bench.harness.servers.plugin.hosted import HostedPolicy
from slo_bench.workloads.request import Slo

TOKENS = 10  # whose activations fill a block
SPEC = EmbedderBeside("", 100)


@dataclass
class Server:
    """A language model's server with 100 KV blocks."""

    used: int = 0
    taken_blocks: int = 0
    n_running: int = 0
    oldest_s: float = math.inf
    passes: dict[str, int] = field(default_factory=dict)
    total_kv_blocks: int = 100
    block_bytes: int = 100 * TOKENS

    def __post_init__(self) -> None:
        self.lock = threading.RLock()

    def free_blocks(self) -> int:
        return self.total_kv_blocks - self.used - self.taken_blocks

    def oldest_waiting_arrival_s(self) -> float:
        return self.oldest_s

    def take_blocks(self, blocks: int) -> None:
        self.taken_blocks = blocks

    def return_blocks(self) -> None:
        self.taken_blocks = 0

    def embedder_changed(self, passes: Any) -> None:
        self.passes = dict(passes)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def scheduler_of(policy: Collocated, spec: EmbedderBeside = SPEC) -> EmbeddingScheduler:
    return EmbeddingScheduler(Server(), policy, spec, HostedPolicy(policy), clock=Clock())


def prompt(tokens: int) -> list[RequestState]:
    return [RequestState(0, 0.0, tokens, 0, 0, Slo())]


def arrive(number: int, blocks: int, texts: int = 1, **values: Any) -> dict[str, Any]:
    return {
        "arrive": number,
        "num_inputs": texts,
        "prompt_tokens": blocks * TOKENS,
        "values": values,
    }


def test_embedding_pass_holds_blocks_until_it_ends():
    scheduler = scheduler_of(Collocated())
    host = scheduler.host
    assert scheduler.step([arrive(1, 30, texts=16), arrive(2, 20, texts=64)]) == [{"begin": [1, 2]}]
    assert (host.taken_blocks, scheduler.held_blocks) == (50, 50)
    assert scheduler.step([arrive(3, 5)]) == []  # one pass at a time
    assert [r.id for r in scheduler.running()] == [1, 2]
    assert scheduler.step([{"end": 0.5}]) == [{"begin": [3]}]
    assert scheduler.step([{"end": 0.1}]) == []
    assert host.taken_blocks == 0
    assert host.passes == dict(zip(EMBED_PASSES, (2, 3, 81, 55), strict=True))


def test_embedding_pass_waits_for_memory():
    scheduler = scheduler_of(Collocated())
    scheduler.host.used = 90
    assert scheduler.step([arrive(1, 20), arrive(2, 5)]) == []  # the first comes first
    scheduler.host.used = 75
    assert scheduler.step([]) == [{"begin": [1, 2]}]


def test_quota_of_algorithm_2_limits_passes_beside_generation():
    policy = Collocation(min_embed_share=0.1, default_llm_share=1.0, quota="static")
    scheduler = scheduler_of(policy)
    assert scheduler.step([arrive(1, 30), arrive(2, 5)]) == [{"begin": [1, 2]}]  # nothing generates
    scheduler.step([{"end": 0.1}])
    scheduler.host.n_running = 1
    assert scheduler.step([arrive(3, 6), arrive(4, 6)]) == [{"begin": [3]}]
    assert scheduler.counters.of_policy()["passes_cut"] == 1
    assert scheduler.step([{"end": 0.1}]) == [{"begin": [4]}]


def test_language_model_policy_sees_the_embedder():
    scheduler = scheduler_of(Collocation())
    embedder = scheduler.policy_state.embedder
    assert isinstance(scheduler.policy_state, Beside)
    scheduler.host.used = 100
    scheduler.step([arrive(1, 30, priority=1, e2e_slo_s=2.0, waited_s=0.5)])
    [r] = embedder.waiting(0.0)
    assert (r.priority, r.slo.e2e_s, r.arrival_s, r.num_inputs) == (1, 2.0, 999.5, 1)
    assert embedder.blocks([r]) == 30
    assert (embedder.total_blocks, embedder.free_blocks, embedder.held_blocks) == (100, 0, 0)
    scheduler.host.used = 0
    scheduler.step([])
    assert embedder.held_blocks == 30


def test_embedding_pass_times_are_learned():
    scheduler = scheduler_of(Collocated())
    for number in range(1, 20):
        blocks = 1 + number % 7
        assert scheduler.step([arrive(number, blocks)]) == [{"begin": [number]}]
        scheduler.step([{"end": 0.01 + 0.002 * blocks * TOKENS}])
    assert scheduler.pass_s(prompt(100)) == pytest.approx(0.21, rel=0.02)
    scheduler.step([arrive(99, 10)])
    assert scheduler.now_s == pytest.approx(1000.21, abs=0.01)  # the end of the pass


def test_first_come_embedding_waits_for_an_older_generation_request():
    scheduler = scheduler_of(CollocatedFcfs())
    scheduler.host.oldest_s = 999.0
    assert scheduler.step([arrive(1, 5)]) == []
    scheduler.host.oldest_s = math.inf
    assert scheduler.step([]) == [{"begin": [1]}]


def test_impossible_embedding_requests_are_rejected():
    scheduler = scheduler_of(StaticSplit(llm_share=0.9))
    [share, memory] = scheduler.step([arrive(1, 11), arrive(2, 101)])
    assert share == {"reject": 1, "because": f"{REJECTED} by the policy"}
    assert memory["reject"] == 2
    assert "takes 101 KV blocks, and there are 100" in memory["because"]
    assert scheduler.step([arrive(3, 10)]) == [{"begin": [3]}]


def test_disconnected_embedding_client_is_forgotten_before_its_pass():
    scheduler = scheduler_of(Collocated())
    scheduler.step([arrive(1, 5), arrive(2, 5)])
    scheduler.step([arrive(3, 5), {"leave": 1}, {"leave": 3}])
    assert scheduler.host.taken_blocks == 10
    assert scheduler.step([{"end": None}]) == []
    assert scheduler.pass_s(prompt(100)) == 0.0  # nothing is learned from a pass that failed


class Broken(Collocated):
    def embed_batch(self, embedder: Any) -> Any:
        raise ValueError("no")


def test_policy_error_leaves_the_models_uncoordinated(capsys):
    scheduler = scheduler_of(Broken())
    assert scheduler.step([arrive(1, 5)]) == [{"begin": [1]}]
    assert scheduler._hosted.errors.count == 1
    assert "ValueError: no" in capsys.readouterr().err


def test_embedding_scheduler_protocol_over_the_socket(tmp_path):
    path = tmp_path / "scheduler"
    scheduler = scheduler_of(Collocated(), EmbedderBeside(str(path), 100))
    scheduler.listen()
    for _ in range(2):  # the second gateway finds nothing of the first
        with socket.socket(socket.AF_UNIX) as gateway:
            gateway.settimeout(30)
            gateway.connect(str(path))
            lines = gateway.makefile("rw")
            print(json.dumps(arrive(1, 30)), file=lines, flush=True)
            assert json.loads(lines.readline()) == {"begin": [1]}
            assert scheduler.host.taken_blocks == 30
            lines.close()
