"""BanaServe's Algorithm 4-1 decides what moves in the real engine, as in the simulator."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.core.module_moves import Module
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.torch.migrating import Migrator
from slo_bench.harness.policies.systems import module_policy, system
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig  # noqa: E402
from slo_bench.harness.engine.torch.distributed import CompletedMove, Spread  # noqa: E402
from slo_bench.harness.engine.torch.execution import Execution, PagedInstance  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_errors import WorkerError  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402

pytestmark = pytest.mark.torch

Served = dict[int, list[int]]
BLOCK = 8


class Ticks:
    """A clock that goes on by 10 ms whenever it is read."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 0.01
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)


class Scripted(Migrator):
    """CPU seconds as told: who is `busy` took all of the time."""

    busy = 0

    def _spent(self) -> dict[int, float]:
        before: dict[int, float] = getattr(self, "_cpu_s", dict.fromkeys((0, 1), 0.0))
        return {
            device: spent + (1e6 if device == self.busy else 0.0)
            for device, spent in before.items()
        }


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def prompt_of(r: RequestState) -> list[int]:
    draw = random.Random(r.id)
    return [draw.randrange(3, 160) for _ in range(r.prompt_tokens)]


def served(engine: Engine, before: Callable[[PagedInstance], Scripted | None]) -> Served:
    """Answers of 16 requests; who moves layers is told which process is busy."""
    policy = system("vllm-swap").policy
    assert isinstance(policy, Policy)
    instance = engine.instance(policy, lambda r: Sequence(prompt_of(r)), Ticks())
    assert isinstance(instance, PagedInstance)
    migrator, answers = before(instance), dict[int, list[int]]()

    def ended(r: RequestState, sequence: Sequence) -> None:
        answers[r.id] = sequence.tokens
        if migrator is not None:
            migrator.busy = len(answers) // 4 % 2  # first here, then there, and so on

    instance.ended = ended
    instance.inbox.extend(RequestState(row, 0.0, 5 + 3 * row, 20, 30, Slo()) for row in range(16))
    instance.run(float("inf"), False)
    return answers


def test_module_policy_moves_layers_away_and_back(
    workers: Workers, save_model: Callable[..., Path]
) -> None:
    decoder = load_decoder(save_model("qwen3", num_hidden_layers=4))
    undisturbed = served(Engine(decoder, KvCacheConfig(200, BLOCK)), lambda _: None)
    engine = Engine(decoder, KvCacheConfig(24, BLOCK, 40), workers)
    rule = module_policy({"control_every_s": 0.05, "efficiency": 0.0})
    migrators: list[Scripted] = []

    def watched(instance: PagedInstance) -> Scripted:
        execution, kv_manager = instance.step_time, instance.kv_manager
        assert isinstance(execution, Execution)
        assert engine.spread is not None
        clock = execution.clock
        migrators.append(
            Scripted(engine.spread, lambda: kv_manager.total - kv_manager.free, rule, clock.now_s)
        )
        execution.between = migrators[0].look
        return migrators[0]

    assert served(engine, watched) == undisturbed
    history = migrators[0].history
    layers = [m.planned for m in history if m.planned.module is Module.LAYERS]
    assert {(move.source, move.target) for move in layers} == {(0, 1), (1, 0)}
    for moved in history:  # from the more loaded to the less, and nearer to each other
        gap = moved.loads[moved.planned.source] - moved.loads[moved.planned.target]
        assert gap > rule.fall
        assert abs(moved.planned.source_load - moved.planned.target_load) < gap
        assert moved.completed
        json.loads(moved.line())


def test_module_policy_moves_heads_for_small_gaps(
    workers: Workers, model_folder: Callable[[str], Path]
) -> None:
    engine = Engine(load_decoder(model_folder("qwen3")), KvCacheConfig(400, BLOCK), workers)
    assert engine.spread is not None
    rule = module_policy({"rise": 0.0, "fall": 0.0, "large_gap": 2.0, "efficiency": 0.0})
    clock = Ticks()
    migrator = Scripted(engine.spread, lambda: 300, rule, clock.now_s)
    migrator.busy = -1
    clock.wait_until(100.0)
    migrator.look()
    (moved,) = migrator.history
    assert moved.planned.module is Module.HEADS
    assert [change.what for change in moved.completed] == ["heads", "heads"]
    assert engine.spread.helped_by(1) == {0: 1, 1: 1}
    after = migrator.loads()
    assert after[0] == pytest.approx(moved.planned.source_load)
    assert after[1] == pytest.approx(moved.planned.target_load)


def test_worker_that_dies_before_a_control_cycle_is_an_error(
    model_folder: Callable[[str], Path],
) -> None:
    with Workers(1) as workers:
        engine = Engine(load_decoder(model_folder("llama")), KvCacheConfig(24, BLOCK), workers)
        assert engine.spread is not None
        clock = Ticks()
        migrator = Migrator(engine.spread, lambda: 10, module_policy({}), clock.now_s)
        (process,) = workers.processes
        process.send_signal(signal.SIGKILL)
        process.wait()
        clock.wait_until(100.0)
        with pytest.raises(WorkerError, match="worker 1"):
            migrator.look()


def test_module_policy_refuses_unknown_and_impossible_parameters() -> None:
    assert not module_policy({"head_moves": 0}).head_moves
    with pytest.raises(SloBenchError, match="not by colour"):
        module_policy({"colour": 1.0})
    with pytest.raises(SloBenchError, match="rise"):
        module_policy({"rise": 9.0})


_RUN = """
systems = ["{system}"]
backend = "{backend}"
workload = ["alpaca"]
rates = [40.0]
requests = 12
seeds = 1
num_gpu_blocks = [200]
[server]
workers = 1
[server.moving]
rise = 0.0
fall = 0.0
large_gap = 0.0
efficiency = 0.0
control_every_s = 0.01
"""


def test_run_in_which_layers_move_writes_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "moves.toml"
    file.write_text(_RUN.format(system="vllm", backend="torch"))
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", str(file), "--no-report", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (log,) = (out / "servers").glob("*.moves.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines
    assert lines[0]["made"][0]["what"] == "layers"


def test_run_whose_worker_is_killed_in_a_move_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "moves.toml"
    file.write_text(_RUN.format(system="vllm", backend="torch"))
    processes, real = [], Spread.move_layers

    def killed(self: Spread, layers: list[int], target: int) -> CompletedMove:
        (process,) = self.workers.workers.processes
        processes.append(process)
        process.send_signal(signal.SIGSTOP)
        threading.Timer(0.2, process.kill).start()
        return real(self, layers, target)

    monkeypatch.setattr(Spread, "move_layers", killed)
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, WorkerError)
    assert "worker 1 " in str(done.exception)
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("name", "backend", "word"),
    [("fifo", "torch", "between iterations"), ("vllm", "vllm", "only with torch")],
)
def test_run_refuses_module_moves_where_no_module_can_move(
    name: str, backend: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "moves.toml"
    file.write_text(_RUN.format(system=name, backend=backend))
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, SloBenchError)
    assert word in str(done.exception)
