"""A worker that dies while a model is spread over it: an error, no hang, no orphan."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch.batch import Piece  # noqa: E402
from slo_bench.harness.engine.torch.cache import KvCache  # noqa: E402
from slo_bench.harness.engine.torch.distributed import Spread  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.runner import Runner  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_errors import WorkerError  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("during", ["a step", "a move", "a split step", "a rejoining"])
def test_worker_death_raises_worker_error(during: str, model_folder: Callable[[str], Path]) -> None:
    draw = random.Random(1)
    decoder = load_decoder(model_folder("llama"))
    cache = KvCache(decoder.config, 8, 8, decoder.dtype, decoder.device)
    sequence = Sequence([draw.randrange(3, 160) for _ in range(9)], blocks=[0, 1, 2])
    with Workers(1, timeout_s=60.0) as workers:
        (process,) = workers.processes
        spread = Spread(decoder, cache, workers)
        runner = Runner(spread, cache)
        if during in ("a step", "a move"):
            spread.move_layers([1], 1)
        sequence.tokens += runner.run([], [Piece(sequence, 0, 9)])
        if during in ("a split step", "a rejoining"):
            spread.lend_room(1, 2)
            spread.split(sequence, 1, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        ask = partial(runner.run, [sequence], [])
        if during == "a move":
            ask = partial(spread.move_layers, [1], 0)
        if during == "a rejoining":
            ask = partial(spread.rejoin, sequence, [3])
        pattern = r"worker 1 (has ended with exit code -9|does not|can)"
        with pytest.raises(WorkerError, match=pattern):
            ask()
    assert process.poll() is not None


MOVES: dict[str, Callable[[Spread, Sequence], object]] = {
    "layers out": lambda spread, sequence: spread.move_layers([0], 1),
    "layers back": lambda spread, sequence: spread.move_layers([1], 0),
    "layers on": lambda spread, sequence: spread.move_layers([1], 2),
    "heads out": lambda spread, sequence: spread.move_heads(0, 1, 1),
    "heads back": lambda spread, sequence: spread.return_heads(0),
    "split": lambda spread, sequence: spread.split(sequence, 1, 1),
    "rejoin": lambda spread, sequence: spread.rejoin(sequence, [3]),
}


@pytest.mark.parametrize("move", MOVES)
def test_worker_death_during_a_move_raises_worker_error(
    move: str, model_folder: Callable[[str], Path]
) -> None:
    """It stands still when the move begins, and is killed while that waits for it."""
    draw = random.Random(2)
    decoder = load_decoder(model_folder("llama"))
    cache = KvCache(decoder.config, 8, 8, decoder.dtype, decoder.device)
    sequence = Sequence([draw.randrange(3, 160) for _ in range(9)], blocks=[0, 1, 2])
    with Workers(2, timeout_s=60.0) as workers:
        processes = list(workers.processes)
        spread = Spread(decoder, cache, workers)
        if move in ("layers back", "layers on"):
            spread.move_layers([1], 1)
        if move == "heads back":
            spread.move_heads(0, 1, 1)
        sequence.tokens += Runner(spread, cache).run([], [Piece(sequence, 0, 9)])
        if move in ("split", "rejoin"):
            spread.lend_room(1, 2)
        if move == "rejoin":
            spread.split(sequence, 1, 1)
        moves = list(spread.moves)
        processes[0].send_signal(signal.SIGSTOP)
        death = threading.Timer(0.3, processes[0].kill)
        death.start()
        with pytest.raises(WorkerError, match="worker 1 "):
            MOVES[move](spread, sequence)
        death.join()
        assert spread.moves == moves  # nothing moved
    assert all(process.poll() is not None for process in processes)


def test_worker_that_ends_at_its_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        workers = Workers(2)
        with pytest.raises(WorkerError, match=r"process [12] ended with code 1"), workers:
            pass
    assert all(process.poll() is not None for process in workers.processes)
    with Workers(1) as others:  # the next ones in this process start
        assert others.echo_s(torch.zeros(1)) > 0


def test_worker_that_never_connects_times_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(sleeper))
    workers = Workers(1, timeout_s=0.2)
    with pytest.raises(WorkerError, match=r"did not start within 0\.2 s"), workers:
        pass
    assert all(process.poll() is not None for process in workers.processes)
