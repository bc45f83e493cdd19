"""Layers and KV heads that move between processes in mid-generation: not a token changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
from slo_bench.harness.engine.torch.torch_errors import ModelError  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402

pytestmark = pytest.mark.torch


Greedy = Callable[[str, list[int], int], list[int]]
TOKENS, SIZE = 22, 8


class Scene:
    """Three sequences, one of them in chunks, step by step."""

    def __init__(self, folder: Path, workers: Workers, home: int = 0) -> None:
        decoder = load_decoder(folder)
        self.cache = KvCache(decoder.config, 60, SIZE, decoder.dtype, decoder.device)
        self.spread = Spread(decoder, self.cache, workers, home=home)
        self.runner = Runner(self.spread, self.cache)
        draw = random.Random(4)
        self.prompts = [[draw.randrange(3, 160) for _ in range(n)] for n in (5, 30, 17)]
        free = list(range(60))
        draw.shuffle(free)
        self.sequences = [
            Sequence(list(p), blocks=[free.pop() for _ in range(7)]) for p in self.prompts
        ]
        self._computed = 0

    def step(self) -> None:
        first, second, third = self.sequences
        pieces: list[Piece] = []
        if not self._computed:
            pieces = [Piece(first, 0, 5), Piece(third, 0, 17)]
        decodes = [] if pieces else [first, third]
        if self._computed < 30:
            pieces.append(Piece(second, self._computed, 10))
            self._computed += 10
        else:
            decodes.append(second)
        decodes = [s for s in decodes if len(s.tokens) < len(self._prompt(s)) + TOKENS]
        sequences = [*decodes, *(p.sequence for p in pieces if p.last)]
        for sequence, token in zip(sequences, self.runner.run(decodes, pieces), strict=True):
            sequence.tokens.append(token)

    def _prompt(self, sequence: Sequence) -> list[int]:
        return self.prompts[self.sequences.index(sequence)]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool
    assert all(process.poll() == 0 for process in pool.processes)


@pytest.mark.parametrize("name", ["llama", "opt", "mistral"])
def test_tokens_are_unchanged_while_layers_and_heads_move(
    name: str, workers: Workers, model_folder: Callable[[str], Path], generated: Greedy
) -> None:
    scene = Scene(model_folder(name), workers)
    spread = scene.spread
    moves = {
        1: lambda: spread.move_heads(1, 1, helper=2),  # in the midst of a prompt
        4: lambda: spread.move_layers([0], 1),
        7: lambda: spread.return_heads(1),
        9: lambda: spread.move_layers([1], 1),
        12: lambda: spread.move_layers([0, 1], 2),
        15: lambda: spread.move_layers([0, 1], 0),
        17: lambda: spread.move_heads(0, 1, helper=1),
        20: lambda: spread.return_heads(0),
    }
    for step in range(TOKENS + 2):
        if step in moves:
            moves[step]()
        scene.step()
    for prompt, sequence in zip(scene.prompts, scene.sequences, strict=True):
        assert sequence.tokens == generated(name, prompt, len(sequence.tokens) - len(prompt))
        assert len(sequence.tokens) >= len(prompt) + TOKENS - 2
    assert len(spread.moves) == len(moves)
    assert all(move.moved_bytes > 0 and move.seconds > 0 for move in spread.moves)


@pytest.mark.parametrize("name", ["llama", "opt", "mistral"])
def test_tokens_are_unchanged_where_the_model_lives_in_a_worker(
    name: str, workers: Workers, model_folder: Callable[[str], Path], generated: Greedy
) -> None:
    scene = Scene(model_folder(name), workers, home=1)
    spread = scene.spread
    moves = {
        1: lambda: spread.offload_heads(1, helper=2),
        4: lambda: spread.offload_heads(0, helper=2),
        7: lambda: spread.offload_layers(1, helper=2),
        12: lambda: spread.offload_layers(0, helper=2),
        15: lambda: spread.offload_heads(1, helper=2),
    }
    for step in range(TOKENS + 2):
        if step in moves:
            moves[step]()
        if step in (3, 9, 17):  # to another place, and back again
            blocks = scene.sequences[0].blocks
            kv = spread.read_blocks(blocks)
            spread.write_blocks(blocks, [torch.zeros_like(layer) for layer in kv])
            spread.write_blocks(blocks, kv)
        scene.step()
    for prompt, sequence in zip(scene.prompts, scene.sequences, strict=True):
        assert sequence.tokens == generated(name, prompt, len(sequence.tokens) - len(prompt))
    assert [move.what for move in spread.moves] == ["heads"] * 4 + ["layers"] * 2 + ["heads"] * 2
    assert spread.busy() == [1, 2]


def test_impossible_module_moves_are_refused(
    workers: Workers, model_folder: Callable[[str], Path]
) -> None:
    spread = Scene(model_folder("llama"), workers).spread
    with pytest.raises(ModelError, match="cannot move to 0"):
        spread.move_layers([0], 0)
    with pytest.raises(ModelError, match="2 KV heads of layer 0"):
        spread.move_heads(0, 2, helper=1)
    spread.move_heads(0, 1, helper=1)
    with pytest.raises(ModelError, match="with all their heads"):
        spread.move_layers([0], 1)
    spread.return_heads(0)


@pytest.mark.parametrize("name", ["llama", "opt", "mistral"])
def test_tokens_are_unchanged_by_splits_along_the_sequence(
    name: str, workers: Workers, model_folder: Callable[[str], Path], generated: Greedy
) -> None:
    scene = Scene(model_folder(name), workers)
    spread, (_, second, third) = scene.spread, scene.sequences
    spread.lend_room(1, 6)
    spread.lend_room(2, 3)
    free = sorted(set(range(60)) - {b for s in scene.sequences for b in s.blocks})
    scribbled = torch.full_like(scene.cache.layers[0][:, :1], 1e6)
    for step in range(TOKENS + 2):
        if step == 4:
            gone = second.blocks[:3]
            spread.split(second, 3, helper=1)
            for layer in scene.cache.layers:
                layer[:, gone] = scribbled  # they are somebody else's now
        if step == 6:
            spread.split(third, 1, helper=2)
        if step == 9:
            spread.rejoin(second, free[:3])
        if step == 12:
            spread.split(second, 4, helper=1)
        scene.step()
    for prompt, sequence in zip(scene.prompts, scene.sequences, strict=True):
        assert sequence.tokens == generated(name, prompt, len(sequence.tokens) - len(prompt))
        spread.forget(sequence)
    assert [move.what for move in spread.moves] == ["sequence"] * 4
    assert all(move.moved_bytes > 0 and move.seconds > 0 for move in spread.moves)
    spread.move_layers([0], 1)  # nothing is split any more
    spread.move_layers([0], 0)


def test_impossible_sequence_splits_are_refused(
    workers: Workers, model_folder: Callable[[str], Path]
) -> None:
    scene = Scene(model_folder("llama"), workers)
    spread, sequence = scene.spread, scene.sequences[1]
    for _ in range(4):
        scene.step()
    with pytest.raises(ModelError, match="room for 0"):
        spread.split(sequence, 1, helper=1)
    spread.lend_room(1, 20)
    for blocks in (0, len(sequence.blocks)):
        with pytest.raises(ModelError, match="the last one stays"):
            spread.split(sequence, blocks, helper=1)
    spread.split(sequence, 2, helper=1)
    with pytest.raises(ModelError, match="split only once"):
        spread.split(sequence, 1, helper=1)
    with pytest.raises(ModelError, match="while a sequence is split"):
        spread.move_layers([0], 1)
    with pytest.raises(ModelError, match="while a sequence is split"):
        spread.move_heads(0, 1, helper=1)
    with pytest.raises(ModelError, match="2 blocks cannot come back into 1"):
        spread.rejoin(sequence, [0])
