"""Real vLLM servers on CPU with a tiny model: order, counts and token ids, never times."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.wire import DROPPED, REJECTED, VLLM_FIELD
from slo_bench.harness.load_generator.http import Endpoint, HttpOptions
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.launch.serve_settings import Serve
from slo_bench.harness.servers.launch.server_process import ServerError, ServerProcess
from slo_bench.workloads.workload import Workload

pytestmark = pytest.mark.backends

HERE = Path(__file__).parent
BLOCKER_TOKENS = 3900
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

    server: ServerProcess
    step_log: Path

    def ask(self, prompt: list[int], max_tokens: int, name: str = "", **wire: float) -> Reply:
        [reply] = self.ask_all([prompt], max_tokens, name, **wire)
        return reply

    def ask_all(
        self, prompts: list[list[int]], max_tokens: int, name: str = "", **wire: float
    ) -> list[Reply]:
        """All at once, in one HTTP request."""
        with urllib.request.urlopen(
            self._request(prompts, max_tokens, name, **wire), timeout=PATIENCE_S
        ) as answer:
            choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
        return [
            Reply(
                choice["token_ids"] or [], choice["finish_reason"], str(choice["stop_reason"] or "")
            )
            for choice in choices
        ]

    def _request(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        name: str,
        *,
        stream: bool = False,
        **wire: float,
    ) -> urllib.request.Request:
        body = {
            "model": "tiny",
            "prompt": prompts,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "stream": stream,
        }
        if wire:
            body["vllm_xargs"] = wire
        return urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", **({"x-request-id": name} if name else {})},
        )

    @contextlib.contextmanager
    def busy(self, **wire: float) -> Iterator[None]:
        """A long request, `long`, runs until the end of the block: then its client goes away."""
        request = self._request([prompt(9, 17)], BLOCKER_TOKENS, "long", stream=True, **wire)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.readline()  # it runs
            yield
            assert self.metric("num_requests_running") == 1, "the long request has ended"

    def metric(self, name: str) -> float:
        lines = self.server.metrics().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def until(self, name: str, at_least: int) -> None:
        """Wait for a metric."""
        end_s = time.monotonic() + PATIENCE_S
        while self.metric(name) < at_least:
            assert time.monotonic() < end_s, f"{name} never was {at_least}"
            time.sleep(0.05)

    def steps(self) -> list[dict[str, Any]]:
        lines = self.step_log.read_text("utf-8").splitlines()
        return [step for line in lines if (step := json.loads(line))["event"] == "step"]


@contextlib.contextmanager
def started(
    vllm: str,
    model: Path,
    folder: Path,
    system: str | None,
    *more: str,
    max_model_tokens: int | None = 4096,
    **options: Any,
) -> Iterator[Up]:
    serve = Serve(
        backend=vllm,
        model=str(model),
        system=system,
        served_name="tiny",
        max_model_tokens=max_model_tokens,
        block_size=32,
        server_args=("--no-enable-prefix-caching", "--dtype=float32", *more),
        **{"step_log": folder / "steps.jsonl", **options},
    )
    with contextlib.ExitStack() as stack:
        [server] = serve.start(stack, folder / "servers" / f"{serve.label}.log")
        yield Up(server, folder / "steps.jsonl")


@pytest.fixture
def up(vllm, installed, tiny_model, tmp_path):
    installed(vllm)
    return functools.partial(started, vllm, tiny_model(vllm), tmp_path)


@pytest.fixture(scope="module")
def scarce_edf(vllm, installed, tiny_model, tmp_path_factory):
    """Earliest deadline first, with KV for a few at a time."""
    installed(vllm)
    folder, model = tmp_path_factory.mktemp("scarce"), tiny_model(vllm)
    with started(vllm, model, folder, "edf", num_gpu_blocks=20, max_model_tokens=None) as server:
        yield server


@pytest.fixture(scope="module")
def strict(vllm, installed, tiny_model, tmp_path_factory):
    """Turns long prompts away and drops who is late; one at a time."""
    installed(vllm)
    folder, policy = tmp_path_factory.mktemp("strict"), str(HERE / "strict.py")
    with started(vllm, tiny_model(vllm), folder, policy, parameters={"max_num_seqs": 1}) as server:
        yield server


def prompt(row: int, tokens: int) -> list[int]:
    draw = random.Random(row)
    return [draw.randint(10, 2000) for _ in range(tokens)]


def queue_up(server: Up, asks: Sequence[tuple[str, list[int], float]], tokens: int) -> None:
    """One runs long while those come, each with its name, prompt and TTFT SLO, in this order."""
    with ThreadPoolExecutor(len(asks)) as pool:
        with server.busy(ttft_slo_s=1.0):
            waiting = []
            for come, (name, tokens_in, ttft_slo_s) in enumerate(asks, 1):
                future = pool.submit(server.ask, tokens_in, tokens, name, ttft_slo_s=ttft_slo_s)
                waiting.append(future)
                server.until("num_requests_waiting", come)
        assert all(len(future.result().tokens) == tokens for future in waiting)


def ever_earlier() -> list[tuple[str, list[int], float]]:
    """Five, the first to come the last to be due; known by the lengths of their prompts."""
    return [(f"r{row}", prompt(row, 8 + row), 10_000.0 - 1000 * row) for row in range(5)]


def test_edf_serves_in_order_of_deadlines(up):
    with up("edf", parameters={"max_num_seqs": 1}) as server:
        queue_up(server, ever_earlier(), SHORT_TOKENS)
        assert server.server.handshake["system"] == "edf"
        entered = [name.split("-")[1] for step in server.steps() for name in step["entered"]]
        assert entered[-6:] == ["long", "r4", "r3", "r2", "r1", "r0"]


def test_policy_that_raises_fails_its_request_only(up):
    with up(str(HERE / "fails_long.py")) as server:
        with pytest.raises(urllib.error.HTTPError) as failed:
            server.ask(prompt(0, 120), 4, "long")
        assert failed.value.code == 500
        message = json.load(failed.value)["error"]["message"]
        assert "queue_key of FailsLong raised ZeroDivisionError" in message
        assert len(server.ask(prompt(1, 20), 4, "short").tokens) == 4
        assert server.server.tally()["policy_errors"] >= 1


@pytest.mark.weekly
def test_unpatched_vllm_serves_by_arrival(up):
    with up(None, "--max-num-seqs", "1", "--no-async-scheduling") as server:
        queue_up(server, ever_earlier(), SHORT_TOKENS)
        assert "system" not in server.server.handshake
        prefilled = [tokens for step in server.steps() for _, tokens in step["chunks"]]
    assert prefilled[-6:] == [17, 8, 9, 10, 11, 12]


def undisturbed(server: Up, n: int, tokens: int) -> list[dict[str, Any]]:
    """All at once answer as each of them alone; the steps of all at once."""
    alone = [server.ask(prompt(row, 100), tokens).tokens for row in range(n)]
    before, preemptions = len(server.steps()), server.metric("num_preemptions_total")
    replies = server.ask_all([prompt(row, 100) for row in range(n)], tokens)
    assert [reply.tokens for reply in replies] == alone
    steps = server.steps()[before:]
    victims = [victim for step in steps for victim in step["preempted"]]
    assert len(victims) >= 3  # KV was scarce indeed
    assert server.metric("num_preemptions_total") - preemptions == len(victims)
    assert max(step["decode_seqs"] for step in steps) > 1
    return steps


def prefilled_tokens(steps: list[dict[str, Any]]) -> int:
    return sum(tokens for step in steps for _, tokens in step["chunks"])


def test_swapped_requests_answer_as_undisturbed_ones(up):
    with up(str(HERE / "swap_always.py"), num_gpu_blocks=20, max_model_tokens=None) as server:
        steps = undisturbed(server, 10, 100)
    assert {victim["by"] for step in steps for victim in step["preempted"]} == {"swap"}
    assert max(step["swapped"] for step in steps) > 0
    assert prefilled_tokens(steps) == 10 * 100  # nothing was computed twice


def test_recomputed_requests_answer_as_undisturbed_ones(scarce_edf):
    steps = undisturbed(scarce_edf, 10, 100)
    assert {victim["by"] for step in steps for victim in step["preempted"]} == {"recompute"}
    assert prefilled_tokens(steps) > 10 * 100


@pytest.mark.weekly
def test_prism_queue_serves_a_late_request_last(up):
    """Earliest deadline first would begin with it."""
    due_in_s = {"late": 0.01, "patient": 10_000.0, "first": 5_000.0, "second": 8_000.0}
    asks = [(name, prompt(row, 8), s) for row, (name, s) in enumerate(due_in_s.items())]
    with up("prism-queue", parameters={"max_num_seqs": 1}) as server:
        queue_up(server, asks, SHORT_TOKENS)
        entered = [name.split("-")[1] for step in server.steps() for name in step["entered"]]
    assert entered == ["long", "first", "second", "patient", "late"]


def test_edf_preempts_the_latest_deadline_under_pressure(scarce_edf):
    n, tokens = 8, 400  # so long that all have come before any ends
    before = len(scarce_edf.steps())
    with ThreadPoolExecutor(n) as pool:
        futures = [
            pool.submit(
                scarce_edf.ask,
                prompt(row, 100),
                tokens,
                name=f"r{row}",
                ttft_slo_s=1000.0 - 50 * row,
            )
            for row in range(n)
        ]
        assert all(len(future.result().tokens) == tokens for future in futures)
    running: set[str] = set()
    victims = 0
    for step in scarce_edf.steps()[before:]:
        running -= set(step["ended"])
        for victim in step["preempted"]:
            assert victim["id"] == min(running, key=number)  # the first to come is due last
            running.remove(victim["id"])
            victims += 1
        running |= set(step["entered"])
    assert victims >= 3


def number(name: str) -> int:
    return int(name.split("-")[1][1:])


def test_adaptivellm_swaps_some_and_recomputes_others(up):
    n, tokens = 10, 100
    # Host memory takes one request of up to 128 tokens: longer ones cannot be swapped.
    with up("adaptivellm", num_gpu_blocks=20, max_model_tokens=None, num_cpu_blocks=4) as server:
        steps = undisturbed(server, n, tokens)
        tally = server.server.tally()
    victims = [victim for step in steps for victim in step["preempted"]]
    swapped = [victim for victim in victims if victim["by"] == "swap"]
    again = [victim["kv_tokens"] + 1 for victim in victims if victim["by"] == "recompute"]
    assert swapped
    assert again
    assert prefilled_tokens(steps) == n * 100 + sum(again)  # of the swapped nothing was twice
    assert not [step for step in steps if step["chunks"] and step["decode_seqs"]]
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


def test_clients_are_answered_as_dropped_or_rejected(strict):
    assert refusal(strict.ask, prompt(1, 400), 4).startswith(REJECTED)
    with ThreadPoolExecutor(1) as pool:
        with strict.busy():
            patient = pool.submit(strict.ask, prompt(3, 8), 4, ttft_slo_s=10_000.0)
            late = refusal(strict.ask, prompt(2, 8), 4, ttft_slo_s=0.01)
            assert late.startswith(DROPPED)
        assert len(patient.result().tokens) == 4


def test_load_generator_records_dropped_and_rejected_requests(strict):
    workload = Workload(
        np.arange(3) * 0.1,
        np.array([20, 400, 20]),
        np.full(3, 5),
        ttft_slo_s=np.array([1000.0, 1000.0, 1e-6]),  # the last is late when it comes
    )
    options = HttpOptions(model="tiny", values_field=VLLM_FIELD, token_ids=(10, 2000))
    measurement = measure(workload, [Endpoint.parse(strict.server.url)], options)
    outcomes = [Outcome.FINISHED, Outcome.REJECTED, Outcome.DROPPED]
    assert measurement.columns.outcome.tolist() == outcomes, measurement.details
    assert measurement.faults() == {RequestFault.ABORTED: 2}
    assert measurement.columns.output_tokens.tolist() == [5, 0, 0]


@pytest.mark.weekly
def test_policy_missing_in_the_server_is_an_error(up):
    stock = "--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler"
    with pytest.raises(ServerError, match="the policy edf is not in it"), up("edf", stock):
        pytest.fail("it must not count as started")


def test_killed_vllm_is_reported_and_leaves_no_process(up, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # with all processes that it has
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
