"""Real vLLM servers on CPU with a tiny model: order, counts and token ids, never times."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slo_bench.harness.backends.serve import Serve
from slo_bench.harness.backends.servers import Server, ServerError
from slo_bench.harness.clusters.servers import measure
from slo_bench.harness.core.records import Outcome
from slo_bench.harness.core.wire import DROPPED, REJECTED, VLLM_FIELD
from slo_bench.harness.engines.over_http import Endpoint, HttpOptions
from slo_bench.harness.engines.over_http.faults import Fault
from slo_bench.workloads.workload import Workload

pytestmark = pytest.mark.backends

HERE = Path(__file__).parent
BLOCKER_TOKENS = 900
SHORT_TOKENS = 8
PATIENCE_S = 300


@dataclass(frozen=True)
class Reply:
    tokens: list[int]
    finish_reason: str
    stop_reason: str


@dataclass
class Up:
    """A server that is up, and the log of its steps."""

    server: Server
    step_log: Path

    def ask(self, prompt: list[int], max_tokens: int, name: str = "", **wire: float) -> Reply:
        [reply] = self.ask_all([prompt], max_tokens, name, **wire)
        return reply

    def ask_all(
        self, prompts: list[list[int]], max_tokens: int, name: str = "", **wire: float
    ) -> list[Reply]:
        """All at once, in one HTTP request."""
        body = {
            "model": "tiny",
            "prompt": prompts,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        if wire:
            body["vllm_xargs"] = wire
        asked = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", **({"x-request-id": name} if name else {})},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
        return [
            Reply(
                choice["token_ids"] or [], choice["finish_reason"], str(choice["stop_reason"] or "")
            )
            for choice in choices
        ]

    def metric(self, name: str) -> float:
        lines = self.server.metrics().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def until(self, name: str, at_least: int, hoping: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a metric; False once there is no hope left that it will come."""
        end_s = time.monotonic() + PATIENCE_S
        while self.metric(name) < at_least:
            if not hoping():
                return False
            assert time.monotonic() < end_s, f"{name} never was {at_least}"
            time.sleep(0.05)
        return True

    def steps(self) -> list[dict[str, Any]]:
        lines = self.step_log.read_text("utf-8").splitlines()
        return [step for line in lines if (step := json.loads(line))["event"] == "step"]


@pytest.fixture
def up(vllm, installed, tiny_model, tmp_path):
    installed(vllm)

    @contextlib.contextmanager
    def start(
        system: str | None, *more: str, max_model_tokens: int | None = 1024, **options: Any
    ) -> Iterator[Up]:
        wanted = Serve(
            backend=vllm,
            model=str(tiny_model(vllm)),
            system=system,
            served_name="tiny",
            max_model_tokens=max_model_tokens,
            block_tokens=32,
            server_args=("--no-enable-prefix-caching", "--dtype=float32", *more),
            **{"step_log": tmp_path / "steps.jsonl", **options},
        )
        with contextlib.ExitStack() as stack:
            [server] = wanted.start(stack, tmp_path / "servers" / f"{wanted.label}.log")
            yield Up(server, tmp_path / "steps.jsonl")

    return start


def prompt(row: int, tokens: int) -> list[int]:
    draw = random.Random(row)
    return [draw.randint(10, 2000) for _ in range(tokens)]


class QueueNeverStoodError(Exception):
    """The long request ended before five others waited behind it."""


def queue_up(server: Up, attempts: int = 6) -> None:
    """One runs long while five come, the first to come the last to be due.

    On a busy machine the long one may end too early; that proves nothing, and is tried again.
    """
    for _ in range(attempts):
        try:
            return _queue_up(server)
        except QueueNeverStoodError:
            continue
    raise AssertionError(f"no queue stood behind the long request in {attempts} attempts")


def _queue_up(server: Up) -> None:
    def ask(name: str, row: int, tokens: int, ttft_slo_s: float) -> None:
        server.ask(prompt(row, 8 + row), tokens, name=name, ttft_slo_s=ttft_slo_s)

    threads = [threading.Thread(target=ask, args=("long", 9, BLOCKER_TOKENS, 1.0))]
    threads[0].start()
    stood = server.until("num_requests_running", 1, threads[0].is_alive)
    for row in range(5):
        one = threading.Thread(
            target=ask, args=(f"r{row}", row, SHORT_TOKENS, 10_000.0 - 1000 * row)
        )
        one.start()
        threads.append(one)
        stood = stood and server.until("num_requests_waiting", row + 1, threads[0].is_alive)
    for thread in threads:
        thread.join(PATIENCE_S)
    if not stood:
        raise QueueNeverStoodError


def test_edf_finishes_in_order_of_deadlines(up):
    with up("edf", knobs={"max_num_seqs": 1}) as server:
        queue_up(server)
        assert server.server.handshake["system"] == "edf"
        entered = [name.split("-")[1] for step in server.steps() for name in step["entered"]]
        assert entered[-6:] == ["long", "r4", "r3", "r2", "r1", "r0"]


def test_without_a_policy_the_order_is_that_of_arrival(up):
    with up(None, "--max-num-seqs", "1", "--no-async-scheduling") as server:
        queue_up(server)
        assert "system" not in server.server.handshake
        prefilled = [tokens for step in server.steps() for _, tokens in step["chunks"]]
    assert prefilled[-6:] == [8 + row for row in (9, 0, 1, 2, 3, 4)]


@pytest.mark.parametrize("system", [str(HERE / "swap_always.py"), "edf"])
def test_preempted_requests_answer_as_if_undisturbed(up, system):
    n, tokens = 10, 100
    with up(system, kv_blocks=20, max_model_tokens=None) as server:
        alone = [server.ask(prompt(row, 100), tokens).tokens for row in range(n)]
        before = len(server.steps())
        replies = server.ask_all([prompt(row, 100) for row in range(n)], tokens)
        assert [reply.tokens for reply in replies] == alone
        steps = server.steps()[before:]
        victims = [victim for step in steps for victim in step["preempted"]]
        assert len(victims) >= 3  # KV was scarce indeed
        assert server.metric("num_preemptions_total") == len(victims)
        assert max(step["decode_seqs"] for step in steps) > 1
        prefilled = sum(tokens for step in steps for _, tokens in step["chunks"])
        if system.endswith("swap_always.py"):
            assert {victim["by"] for victim in victims} == {"swap"}
            assert max(step["swapped"] for step in steps) > 0
            assert prefilled == n * 100  # nothing was computed twice
        else:
            assert {victim["by"] for victim in victims} == {"recompute"}
            assert prefilled > n * 100


def test_moore_hodgson_puts_who_is_late_anyway_last(up):
    """Earliest deadline first would begin with it."""
    due_in_s = {"late": 0.01, "patient": 10_000.0, "first": 5_000.0, "second": 8_000.0}
    with up("prism-queue", knobs={"max_num_seqs": 1}) as server, ThreadPoolExecutor(5) as pool:
        long = pool.submit(server.ask, prompt(9, 8), BLOCKER_TOKENS, name="long")
        server.until("num_requests_running", 1)
        waiting = []
        for row, (name, bound_s) in enumerate(due_in_s.items()):
            asked = pool.submit(server.ask, prompt(row, 8), 4, name=name, ttft_slo_s=bound_s)
            waiting.append(asked)
            server.until("num_requests_waiting", row + 1, lambda: not long.done())
        assert not long.done(), "the queue never stood"
        assert all(len(asked.result().tokens) == 4 for asked in waiting)
        entered = [name.split("-")[1] for step in server.steps() for name in step["entered"]]
    assert entered == ["long", "first", "second", "patient", "late"]


def test_under_pressure_who_is_due_last_is_preempted(up):
    n, tokens = 8, 400  # so long that all have come before any ends
    with up("edf", kv_blocks=20, max_model_tokens=None) as server:
        with ThreadPoolExecutor(n) as pool:
            asked = [
                pool.submit(
                    server.ask,
                    prompt(row, 100),
                    tokens,
                    name=f"r{row}",
                    ttft_slo_s=1000.0 - 50 * row,
                )
                for row in range(n)
            ]
            assert all(len(one.result().tokens) == tokens for one in asked)
        running: set[int] = set()
        victims = 0
        for step in server.steps():
            running -= {number(name) for name in step["ended"]}
            for victim in step["preempted"]:
                assert number(victim["id"]) == min(running)  # the first to come is due last
                running.remove(number(victim["id"]))
                victims += 1
            running |= {number(name) for name in step["entered"]}
    assert victims >= 3


def number(name: str) -> int:
    return int(name.split("-")[1][1:])


def test_adaptivellm_swaps_some_and_recomputes_others(up):
    n, tokens = 10, 100
    # Host memory takes one request of up to 128 tokens: longer ones cannot be swapped.
    with up("adaptivellm", kv_blocks=20, max_model_tokens=None, host_blocks=4) as server:
        alone = [server.ask(prompt(row, 100), tokens).tokens for row in range(n)]
        before = len(server.steps())
        replies = server.ask_all([prompt(row, 100) for row in range(n)], tokens)
        assert [reply.tokens for reply in replies] == alone
        steps = server.steps()[before:]
        victims = [victim for step in steps for victim in step["preempted"]]
        swapped = [victim for victim in victims if victim["by"] == "swap"]
        again = [victim["kv_tokens"] + 1 for victim in victims if victim["by"] == "recompute"]
        assert swapped
        assert again
        prefilled = sum(tokens for step in steps for _, tokens in step["chunks"])
        assert prefilled == n * 100 + sum(again)  # of the swapped nothing was computed twice
        assert not [step for step in steps if step["chunks"] and step["decode_seqs"]]
        tally = server.server.tally()
        assert tally["preempted_swap"] == len(swapped)
        assert tally["preempted_recompute"] == len(again)
        for way in ("out", "in"):
            assert tally[f"executed_{way}"] == tally[f"decided_{way}"] == len(swapped)


def refusal(ask: Callable[..., Reply], *args: Any, **wire: float) -> str:
    """What a client is told that is given no answer."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(*args, **wire)
    assert raised.value.code == 503
    message: str = json.load(raised.value)["error"]["message"]
    return message


def test_clients_see_who_was_dropped_and_who_was_turned_away(up):
    with up(str(HERE / "strict.py"), knobs={"max_num_seqs": 1}) as server:
        assert refusal(server.ask, prompt(1, 400), 4).startswith(REJECTED)
        with ThreadPoolExecutor(3) as pool:
            long = pool.submit(server.ask, prompt(9, 8), BLOCKER_TOKENS)
            server.until("num_requests_running", 1)
            late = pool.submit(refusal, server.ask, prompt(2, 8), 4, ttft_slo_s=0.01)
            patient = pool.submit(server.ask, prompt(3, 8), 4, ttft_slo_s=10_000.0)
            assert late.result().startswith(DROPPED)
            assert len(patient.result().tokens) == 4
            assert len(long.result().tokens) == BLOCKER_TOKENS


def test_the_load_generator_tells_who_was_dropped_and_who_was_turned_away(up):
    workload = Workload(
        np.arange(3) * 0.1,
        np.array([20, 400, 20]),
        np.full(3, 5),
        ttft_slo_s=np.array([1000.0, 1000.0, 1e-6]),  # the last is late when it comes
    )
    options = HttpOptions(model="tiny", values_field=VLLM_FIELD, token_ids=(10, 2000))
    with up(str(HERE / "strict.py")) as server:
        found = measure(workload, [Endpoint.parse(server.server.url)], options)
    wanted = [Outcome.FINISHED, Outcome.REJECTED, Outcome.DROPPED]
    assert found.columns.outcome.tolist() == wanted, found.details
    assert found.faults() == {Fault.ABORTED: 2}
    assert found.columns.tokens_out.tolist() == [5, 0, 0]


def test_a_policy_that_is_not_in_the_server_is_an_error(up):
    stock = "--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler"
    with pytest.raises(ServerError, match="the policy edf is not in it"), up("edf", stock):
        pytest.fail("it must not count as started")


def test_a_killed_server_is_reported_and_nothing_is_left(up):
    with up(None, step_log=None) as server, ThreadPoolExecutor(1) as pool:
        assert not server.server.handshake  # vLLM as it is
        long = pool.submit(server.ask, prompt(9, 8), BLOCKER_TOKENS)
        server.until("num_requests_running", 1)
        guard = server.server._process.pid
        [leader] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        group = os.getpgid(int(leader))
        assert group == int(leader)
        os.kill(group, signal.SIGKILL)
        with pytest.raises((urllib.error.URLError, OSError)):
            long.result()
        server.server.wait()
        with pytest.raises(ServerError, match=r"ended with exit code 137.*servers"):
            server.server.check()
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
