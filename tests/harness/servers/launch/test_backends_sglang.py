"""Our policies inside a real SGLang on CPU, with a tiny random model.

Orders, counts and token ids; never latency. Each server takes about a minute to start, and ends
with the tests that need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.wire import DROPPED, REJECTED, SGLANG_FIELD
from slo_bench.harness.load_generator.http import Api, Endpoint, HttpOptions
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.launch.environments import environment, home
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.harness.servers.launch.server_kind import Launch
from slo_bench.harness.servers.launch.server_process import (
    READY_S,
    ServerError,
    free_port,
    plugin_folder,
    serving,
)
from slo_bench.harness.servers.plugin.contract import POLICY_VARIABLE, PolicySpec
from slo_bench.harness.servers.sglang.plugin.targets import HOOKS
from slo_bench.harness.servers.sglang.sglang_kind import SGLANG
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

pytestmark = pytest.mark.backends

HERE = Path(__file__).parent
BLOCK_SIZE = 16
LONGEST_TOKENS = 16_384
BLOCKER_TOKENS = 15_000  # more than are generated before the test ends it
PATIENCE_S = 300


@pytest.fixture(scope="module")
def sglang():
    try:
        return environment("sglang")
    except SloBenchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(sglang, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang") / "tiny-llama"
    return make_model(folder, {**model_fields(), "max_position_embeddings": LONGEST_TOKENS})


@contextlib.contextmanager
def started(
    sglang, model, folder, *, num_gpu_blocks=1200, server_args=(), named=None, parameters=None
):
    launch = Launch(
        model=str(model),
        port=free_port(),
        served_name="tiny",
        num_gpu_blocks=num_gpu_blocks,
        block_size=BLOCK_SIZE,
        max_model_tokens=min(num_gpu_blocks * BLOCK_SIZE, LONGEST_TOKENS),
        step_log=folder / "steps.jsonl",
        server_args=("--dtype", "float32", *server_args),
        system=named,
        policy=named and system(named).with_parameters(**parameters or {}).policy,
    )
    with serving(SGLANG, sglang, launch, log=folder / "server.log") as server:
        server.wait_until_ready(READY_S)
        yield server


@pytest.fixture
def stock(sglang, model, tmp_path):
    """Unpatched, one request at a time."""
    with started(sglang, model, tmp_path, server_args=("--max-running-requests", "1")) as server:
        yield Logged(server, tmp_path / "steps.jsonl")


@pytest.fixture
def edf(sglang, model, tmp_path):
    """Earliest deadline first, one at a time."""
    with started(sglang, model, tmp_path, named="edf", parameters={"max_num_seqs": 1}) as server:
        yield Logged(server, tmp_path / "steps.jsonl")


@pytest.fixture
def scarce_edf(sglang, model, tmp_path):
    """Earliest deadline first, three at a time, KV for fewer, and an SGLang that is optimistic."""
    with started(
        sglang,
        model,
        tmp_path,
        num_gpu_blocks=80,
        server_args=("--schedule-conservativeness", "0.1"),
        named="edf",
        parameters={"max_num_seqs": 3},
    ) as server:
        yield Logged(server, tmp_path / "steps.jsonl")


@pytest.fixture(scope="module")
def turns_away(sglang, model, tmp_path_factory):
    """Rejects long prompts and drops who is late; one at a time."""
    folder = tmp_path_factory.mktemp("turns-away")
    policy = f"{HERE / 'turns_away.py'}:TurnsAway"
    with started(
        sglang, model, folder, named=policy, parameters={"max_num_seqs": 1, "caution": 0.0}
    ) as server:
        yield Logged(server, folder / "steps.jsonl")


@dataclass
class Logged:
    server: object
    step_log: Path

    def events(self, kind):
        whole, _, _ = self.step_log.read_text().rpartition("\n")  # without a line half written
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["event"] == kind]

    def waiting(self):
        return self.events("step")[-1]["waiting"]


async def eventually(read, expected):
    deadline_s = time.monotonic() + PATIENCE_S
    while (current := read()) != expected:
        assert time.monotonic() < deadline_s, f"still {current}, not {expected}"
        await asyncio.sleep(0.05)


@dataclass
class Ask:
    rid: str
    prompt_tokens: int
    tokens: int
    values: dict = field(default_factory=dict)
    # SGLang takes requests that ignore the end of sequence in only if all their tokens fit; it
    # does not have to retract anybody then. A smallest number of tokens has no such effect.
    exact_by: str = "ignore_eos"

    @property
    def exactly(self):
        value = True if self.exact_by == "ignore_eos" else self.tokens
        return {"max_new_tokens": self.tokens, self.exact_by: value}

    @property
    def prompt(self):
        draw = random.Random(self.rid)
        return [draw.randrange(3, 2048) for _ in range(self.prompt_tokens)]


class Client:
    """Sends in order, and notes who was done in which order."""

    def __init__(self, url):
        self._url = url
        self.answers = {}
        self.done = []
        self._tasks = []

    async def __aenter__(self):
        self._http = httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, trust_env=False)
        return self

    async def __aexit__(self, *error):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def send(self, *asks):
        self._tasks += [asyncio.create_task(self._generate(ask)) for ask in asks]

    async def queue_up(self, logged, *asks):
        """Let one request run until those wait in this order; then it ends."""
        blocker = Ask("blocker", 20, BLOCKER_TOKENS)
        await self.block(blocker)
        for come, ask in enumerate(asks, 1):
            self.send(ask)
            await eventually(logged.waiting, come)
        await self.end(blocker)

    async def end(self, ask):
        assert ask.rid not in self.done
        answer = await self._http.post("/abort_request", json={"rid": ask.rid})
        answer.raise_for_status()

    async def block(self, *asks):
        """Send, and wait until each has given its first token."""
        for ask in asks:
            first = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._generate(ask, first)))
            await first.wait()

    async def rest(self):
        await asyncio.gather(*self._tasks)
        return self.done

    async def _generate(self, ask, first=None):
        body = {
            "rid": ask.rid,
            "input_ids": ask.prompt,
            "stream": first is not None,
            "sampling_params": {
                "temperature": 0,
                **ask.exactly,
                "custom_params": ask.values,
            },
        }
        async with self._http.stream("POST", "/generate", json=body) as answer:
            async for line in answer.aiter_lines():
                if first is not None:
                    first.set()
                line = line.removeprefix("data: ")
                if line and line != "[DONE]":
                    self.answers[ask.rid] = (answer.status_code, json.loads(line))
        self.done.append(ask.rid)

    def output_ids(self, rid):
        status, answer = self.answers[rid]
        assert status == 200, answer
        return answer["output_ids"]


def greedy(sglang, model, asks):
    """What Hugging Face answers."""
    query = {"prompts": [a.prompt for a in asks], "tokens": [a.tokens for a in asks]}
    done = subprocess.run(
        [sglang.python, HERE / "greedy_tokens.py", model],
        input=json.dumps(query),
        capture_output=True,
        check=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return json.loads(done.stdout)


def waiting(first_deadline_s=100):
    """Six that come with ever earlier deadlines."""
    return [Ask(f"r{i}", 20, 60, {"deadline_in_s": first_deadline_s - 10 * i}) for i in range(6)]


def test_plugin_hooks_fit_the_installed_sglang(sglang):
    code = (
        "import json, sys; from slo_bench.harness.servers.sglang.plugin.targets import moved; "
        "json.dump(moved(), sys.stdout)"
    )
    assert json.loads(_inside(sglang, code).stdout) == []


def test_sglang_without_a_policy_has_no_hooks(sglang):
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from sglang.srt.plugins.hook_registry import HookRegistry as r; print(len(r._hooks))"
    )
    assert _inside(sglang, code).stdout.strip() == "0"


@pytest.mark.weekly
def test_sglang_without_a_hooked_method_does_not_start(sglang):
    code = (
        "from sglang.srt.managers.scheduler import Scheduler; del Scheduler.run_batch; "
        "from sglang.srt.plugins import load_plugins; load_plugins(); print('started')"
    )
    done = _inside(sglang, code, system_name="edf")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "Scheduler.run_batch is gone" in done.stderr


@pytest.mark.weekly
def test_sglang_with_an_unsupported_policy_does_not_start(sglang):
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('started')"
    done = _inside(sglang, code, system_name="vllm-swap")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "vllm-swap cannot run inside SGLang: it decides preemption_mode" in done.stderr


def _inside(sglang, code, system_name=None):
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(plugin_folder(home()))}
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if system_name is not None:
        spec = PolicySpec.of(system_name, system(system_name).policy)
        environ[POLICY_VARIABLE] = spec.to_json()
    command = [sglang.python, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)


def test_unpatched_sglang_serves_by_arrival_and_answers_greedily(sglang, model, stock):
    async def run():
        async with Client(stock.server.url) as client:
            await client.queue_up(stock, *waiting())
            await client.rest()
            return client

    client = asyncio.run(run())
    assert "system" not in stock.server.handshake  # its steps are logged, and that is all
    assert client.done == ["blocker", *(ask.rid for ask in waiting())]
    ids = [client.output_ids(ask.rid) for ask in waiting()]
    assert ids == greedy(sglang, model, waiting())


def test_edf_serves_in_order_of_deadlines(edf):
    async def run():
        async with Client(edf.server.url) as client:
            await client.queue_up(edf, *waiting())
            return await client.rest()

    assert edf.server.handshake["hooks"] == list(HOOKS)
    assert edf.server.handshake["system"] == "edf"
    done = asyncio.run(run())
    entered = [rid for step in edf.events("step") for rid in step["entered"]]
    expected = ["blocker", *(ask.rid for ask in reversed(waiting()))]
    assert entered[-7:] == expected
    assert done == expected


OF_PAPERS = {
    # Six of ever earlier deadlines, and so in their order.
    "ascendra-lp": (waiting(), [5, 4, 3, 2, 1, 0]),
    "prism-queue": (waiting(), [5, 4, 3, 2, 1, 0]),
    # The urgent first, then as they came.
    "collocation": (
        [Ask(f"r{i}", 20, 20, {"priority": int(i == 3)}) for i in range(4)],
        [3, 0, 1, 2],
    ),
    # Waiting time over length: the short overtake the long.
    "adaptivellm": ([Ask(f"r{i}", 20 if i > 1 else 900, 20) for i in range(4)], [2, 3, 0, 1]),
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", OF_PAPERS)
def test_policies_of_papers_order_the_queue_and_keep_answers(sglang, model, tmp_path, name):
    asks, order = OF_PAPERS[name]
    with started(sglang, model, tmp_path, named=name, parameters={"max_num_seqs": 1}) as server:
        logged = Logged(server, tmp_path / "steps.jsonl")

        async def run():
            async with Client(server.url) as client:
                await client.queue_up(logged, *asks)
                await client.rest()
                return client

        client = asyncio.run(run())
    assert client.done == ["blocker", *(asks[place].rid for place in order)]
    assert [client.output_ids(ask.rid) for ask in asks] == greedy(sglang, model, asks)


@pytest.mark.weekly
def test_edf_retracts_the_latest_deadline_and_keeps_answers(sglang, model, scarce_edf):
    # SGLang would retract whoever has given the fewest tokens: the urgent one, who comes last.
    # Three cannot be held to their ends, nor two; one can.
    asks = [
        Ask("relaxed", 32, 700, {"deadline_in_s": 900}, "min_new_tokens"),
        Ask("middle", 32, 700, {"deadline_in_s": 600}, "min_new_tokens"),
        Ask("urgent", 32, 700, {"deadline_in_s": 300}, "min_new_tokens"),
    ]

    async def run():
        async with Client(scarce_edf.server.url) as client:
            await client.block(*asks)
            await client.rest()
            return client

    client = asyncio.run(run())
    victims = [line["id"] for line in scarce_edf.events("preempted")]
    assert victims[:2] == ["relaxed", "middle"]
    assert "urgent" not in victims
    assert client.done[0] == "urgent"
    retracted = {
        rid: answer["meta_info"]["num_retractions"] for rid, (_, answer) in client.answers.items()
    }
    assert retracted == {rid: victims.count(rid) for rid in ("relaxed", "middle", "urgent")}
    assert [client.output_ids(ask.rid) for ask in asks] == greedy(sglang, model, asks)


def test_killed_sglang_is_reported_and_leaves_no_process(sglang, model, tmp_path):
    with started(sglang, model, tmp_path) as server:
        (process,) = _children(server._process.pid)
        family = _descendants(process)
        assert len(family) > 2  # scheduler and detokenizer are processes of their own

        async def run():
            async with Client(server.url) as client:
                await client.block(Ask("long", 20, BLOCKER_TOKENS))
                os.kill(process, signal.SIGKILL)
                with pytest.raises(httpx.HTTPError):
                    await client.rest()

        asyncio.run(run())
        server.wait()
        with pytest.raises(ServerError, match="ended with exit code 137"):
            server.check()
    assert [pid for pid in family if _alive(pid)] == []


def test_late_and_long_requests_are_answered_as_dropped_and_rejected(turns_away):
    late = {"deadline_in_s": 0.1}

    async def run():
        async with Client(turns_away.server.url) as client:
            blocker = Ask("blocker", 20, BLOCKER_TOKENS)
            await client.block(blocker)
            before = len(turns_away.events("away"))
            client.send(
                Ask("late", 20, 5, late),
                Ask("late too", 20, 5, late),
                Ask("long", 200, 5),
                Ask("patient", 20, 5, {"deadline_in_s": 1000}),
            )
            await eventually(lambda: len(turns_away.events("away")) - before, 3)
            await eventually(turns_away.waiting, 1)
            await client.end(blocker)
            await client.rest()
            return client

    client = asyncio.run(run())
    status = {rid: status for rid, (status, _) in client.answers.items()}
    assert status == {"blocker": 200, "late": 503, "late too": 503, "long": 503, "patient": 200}
    assert "slo_bench: dropped" in json.dumps(client.answers["late"])
    assert "slo_bench: rejected" in json.dumps(client.answers["long"])
    away = {line["id"]: line["reason"] for line in turns_away.events("away")}
    assert away == {
        "late": "slo_bench: dropped by the policy",
        "late too": "slo_bench: dropped by the policy",
        "long": "slo_bench: rejected by the policy",
    }


@pytest.mark.parametrize(
    ("api", "choices"), [(Api.COMPLETIONS, 2), (Api.CHAT, 1), (Api.RESPONSES, 1), (Api.MESSAGES, 1)]
)
def test_answers_of_each_api_have_the_tokens_of_their_usage(turns_away, api, choices):
    workload = Workload(np.arange(3) * 0.05, np.full(3, 10), np.full(3, 20))
    body = {"n": choices, "temperature": 1} if choices > 1 else {}
    lenient = {"send_delay_limit_s": 600.0, "rate_limit_share": 1.0, "processes": 1}
    options = HttpOptions(model="tiny", token_ids=(10, 2000), api=api, body=body, **lenient)
    columns = measure(workload, [Endpoint.parse(turns_away.server.url)], options).columns
    assert (columns.outcome == Outcome.FINISHED).all()
    assert (columns.completion_tokens == columns.output_tokens).all()
    assert ((columns.output_tokens > 15) & (columns.output_tokens <= 20 * choices)).all()
    assert not (columns.unsure | columns.refuted | columns.surplus).any()


def test_rejected_stream_ends_with_the_error(turns_away):
    body = {
        "model": "tiny",
        "prompt": list(range(3, 203)),
        "max_tokens": 5,
        "stream": True,
    }
    answer = httpx.post(
        turns_away.server.url + "/v1/completions", json=body, timeout=60, trust_env=False
    )
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert error["message"].startswith("slo_bench: rejected")


def test_load_generator_records_dropped_and_rejected_requests(turns_away):
    workload = Workload(
        np.arange(3) * 0.1,
        np.array([20, 200, 20]),
        np.full(3, 5),
        ttft_slo_s=np.array([1000.0, 1000.0, 1e-6]),  # the last is late when it comes
    )
    options = HttpOptions(model="tiny", values_field=SGLANG_FIELD, token_ids=(3, 2048))
    measurement = measure(workload, [Endpoint.parse(turns_away.server.url)], options)
    outcomes = [Outcome.FINISHED, Outcome.REJECTED, Outcome.DROPPED]
    assert measurement.columns.outcome.tolist() == outcomes, measurement.details
    assert measurement.faults() == {RequestFault.ABORTED: 2}
    assert measurement.details[1].startswith(REJECTED)
    assert measurement.details[2].startswith(DROPPED)
    assert measurement.columns.output_tokens.tolist() == [5, 0, 0]


def _children(pid):
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in lists for word in file.read_text().split()]


def _descendants(pid):
    return [pid, *(descendant for child in _children(pid) for descendant in _descendants(child))]


def _alive(pid, within_s=5.0):
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True
