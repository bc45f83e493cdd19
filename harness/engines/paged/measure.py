"""What steps and swaps take on this machine, over a grid of batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from .batch import Piece
from .build import Engine
from .sequence import Sequence

_REPEATS = 5
_ENOUGH_S = 1.0  # of one batch, repeats included


@dataclass(frozen=True)
class Shape:
    """A batch: `chunks` equal chunks of `tokens` after `before` each, beside `sequences` that
    decode over `kv_tokens` each; or, with `blocks`, a copy of so many KV blocks in one direction.
    """

    chunks: int = 0
    tokens: int = 0
    before: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    blocks: int = 0
    direction: str = ""

    @property
    def key(self) -> list[int | str]:
        """Names it in a file."""
        return list(vars(self).values())

    def kv_blocks(self, block_tokens: int) -> int:
        """That it needs on the device."""
        if self.blocks:
            return self.blocks
        each = -(-(self.before + self.tokens) // block_tokens)
        return self.chunks * each + self.sequences * -(-(self.kv_tokens + 1) // block_tokens)


def grid(context: int, most_sequences: int) -> Iterator[Shape]:
    """Batches in order of size, so that what is measured first says most.

    Lengths go up to the model's context, decoding sequences up to `most_sequences`.
    """
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= most_sequences]
    lengths = [n for n in (16, 64, 128, 256, 512, 1024, 2048, 4096) if n < context]
    shapes = [Shape(sequences=n, kv_tokens=kv) for n in counts for kv in lengths]
    spans = [(tokens, before) for tokens in lengths for before in (0, *lengths[1::2])]
    spans = [(tokens, before) for tokens, before in spans if tokens + before <= context]
    shapes += [Shape(1, tokens, before) for tokens, before in spans]
    shapes += [Shape(chunks, tokens, 0) for chunks in (2, 4, 8) for tokens in lengths[:5]]
    shapes += [
        Shape(1, tokens, before, n, kv)
        for tokens, before in spans
        if tokens >= 64 and before in (0, *lengths[3:4])
        for n in counts[1::2]
        for kv in lengths[2::2]
    ]
    yield from sorted(shapes, key=_weight)


def _weight(shape: Shape) -> int:
    read = shape.chunks * shape.tokens * (shape.before + shape.tokens) // 64
    return (
        40 * (shape.chunks * shape.tokens + shape.sequences)
        + read
        + (shape.sequences * shape.kv_tokens)
    )


def swaps(most_blocks: int) -> Iterator[Shape]:
    """Copies of 1, 2, 3, 4, 6, 8, … blocks, in both directions."""
    sizes = sorted({size for k in range(12) for size in (2**k, 3 * 2**k)})
    for size in (s for s in sizes if s <= most_blocks):
        for direction in ("to-host", "to-gpu"):
            yield Shape(blocks=size, direction=direction)


def measured_s(engine: Engine, shape: Shape) -> float:
    """The median of a few runs, after one that does not count."""
    run = _copy(engine, shape) if shape.blocks else _step(engine, shape)
    run()
    times = [run()]
    while len(times) < _REPEATS and sum(times) + times[-1] < _ENOUGH_S:
        times.append(run())
    return statistics.median(times)


def _step(engine: Engine, shape: Shape) -> _Timed:
    free = iter(range(engine.room.blocks))
    size = engine.room.block_tokens

    def sequence(tokens: int) -> Sequence:
        held = [next(free) for _ in range(-(-tokens // size))]
        return Sequence([1 + n % 100 for n in range(tokens)], blocks=held)

    decodes = [sequence(shape.kv_tokens + 1) for _ in range(shape.sequences)]
    prompts = [sequence(shape.before + shape.tokens) for _ in range(shape.chunks)]
    pieces = [Piece(prompt, shape.before, shape.tokens) for prompt in prompts]
    return _Timed(engine, lambda: engine.runner.run(decodes, pieces))


def _copy(engine: Engine, shape: Shape) -> _Timed:
    assert engine.swapper is not None
    swapper, blocks = engine.swapper, list(range(shape.blocks))
    copy = swapper.out if shape.direction == "to-host" else swapper.into

    def run() -> None:
        copy(blocks, blocks)
        swapper.wait()

    return _Timed(engine, run)


class _Timed:
    def __init__(self, engine: Engine, run: Callable[[], object]) -> None:
        self._run = run
        self._cuda = engine.decoder.device.type == "cuda"

    def __call__(self) -> float:
        begin_s = time.perf_counter()
        self._run()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s


def host_s(engine: Engine, shapes: Seq[Shape]) -> float:
    """Median time to put a batch together, which is part of every step."""
    times = []
    for shape in shapes:
        if shape.sequences and not shape.chunks:
            size = engine.room.block_tokens
            count = -(-(shape.kv_tokens + 1) // size)
            decodes = [
                Sequence(
                    [1] * (shape.kv_tokens + 1), blocks=list(range(n * count, (n + 1) * count))
                )
                for n in range(shape.sequences)
            ]
            begin_s = time.perf_counter()
            engine.runner.layout.batch(decodes, [])
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
