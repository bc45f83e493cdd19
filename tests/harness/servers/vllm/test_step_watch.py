"""The plugin that only watches: what it writes, and that the scheduler is left as it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from slo_bench.harness.results.step_log import read_step_log
from slo_bench.harness.servers.plugin.contract import HANDSHAKE_VARIABLE, STEP_LOG_VARIABLE, StepLog
from slo_bench.harness.servers.vllm.plugin.vllm_steps import StepWatch


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def scheduler_class():
    """A stand-in for vLLM's, new for each test: its methods are wrapped."""

    class Scheduler:
        def __init__(self, *outputs):
            self.outputs = list(outputs)
            self.requests = {}
            self.waiting = []
            self.left = 1
            self.block_size = 32
            limits = SimpleNamespace(
                max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=True
            )
            self.vllm_config = SimpleNamespace(
                scheduler_config=limits,
                cache_config=SimpleNamespace(num_gpu_blocks=65, enable_prefix_caching=False),
                model_config=SimpleNamespace(max_model_len=512, enforce_eager=True),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )

        def schedule(self, throttle=False):
            scheduled = self.outputs.pop(0)
            for name, tokens in scheduled.items():
                self.requests[name].num_computed_tokens += tokens
            return SimpleNamespace(num_scheduled_tokens=scheduled)

        def update_from_output(self, output, result):
            return ("told", result)

        def get_num_unfinished_requests(self):
            return self.left

    return Scheduler


@pytest.fixture
def watch(monkeypatch, tmp_path):
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv(STEP_LOG_VARIABLE, str(path))
    monkeypatch.setenv(HANDSHAKE_VARIABLE, str(tmp_path / "handshake.json"))
    log, clock, scheduler = StepLog(), Clock(), scheduler_class()
    StepWatch(log, clock).install(scheduler)
    yield scheduler, clock, path
    log._file.close()


def request(prompt_tokens, computed=0):
    return SimpleNamespace(num_prompt_tokens=prompt_tokens, num_computed_tokens=computed)


def test_step_log_of_overlapping_steps(watch):
    kind, clock, path = watch
    scheduler = kind({"a": 40, "b": 1}, {}, {"b": 1})
    scheduler.requests = {"a": request(90), "b": request(10, computed=12)}
    clock.now_s = 1.0
    first = scheduler.schedule(throttle=True)
    clock.now_s = 1.1
    empty = scheduler.schedule()
    second = scheduler.schedule()
    clock.now_s = 3.0
    assert scheduler.update_from_output(first, "r") == ("told", "r")
    scheduler.update_from_output(empty, "r")
    scheduler.left = 0
    clock.now_s = 3.5
    scheduler.update_from_output(second, "r")
    steps = read_step_log(path).steps
    assert [(s.decode_seqs, s.decode_kv_tokens, s.chunks) for s in steps] == [
        (1, 12, [(0, 40)]),
        (1, 13, []),
    ]
    assert [s.duration_s for s in steps] == [2.0, 0.5]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "step", "done", "done"]
    assert lines[-1]["left"] == 0


def test_vllm_handshake_has_the_scheduler_settings(watch, tmp_path):
    kind, _, _ = watch
    kind()
    handshake = json.loads((tmp_path / "handshake.json").read_text())
    assert handshake["server"] == "vllm"
    assert handshake["kv_cache"] == {
        "num_gpu_blocks": 65,
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    assert handshake["engine_kwargs"]["async_scheduling"] is True
    assert handshake["engine_kwargs"]["max_num_batched_tokens"] == 64
