"""What steps, swaps and moves to other processes take on this machine, over a grid of batches.

A machine's speed may wander by a third within a minute. So everything is timed in rounds that lie
far apart, and steps between two timings of a reference, a batch that never changes: what a step
takes in relation to that wanders less. Copies wait for memory, which has little to do with any
reference; of them the quickest count.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ....predictors.profiles.profile_format import MeasuredDevice
from .batch import Piece
from .build_engine import Engine
from .cache import KvCache
from .decoder import Decoder
from .distributed import CompletedMove, Spread
from .sequence import Sequence
from .timing import Timing
from .torch_workers import Workers

ROUNDS = 4
_REPEATS = 3  # in a round
_COPIES = 7
_LONG_S = 0.1  # what takes as long needs neither repeats nor a run that does not count
_REFERENCE_REPEATS = 3

_OUT, _IN = "to-host", "to-gpu"


@dataclass(frozen=True)
class BatchShape:
    """A batch: `chunks` equal chunks of `tokens` after `before` each, together with `sequences`
    that decode over `kv_tokens` each; or, with `blocks`, a copy of that many KV blocks in one
    direction.
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
        """Name of the shape in a file."""
        return list(vars(self).values())

    def num_gpu_blocks(self, block_size: int) -> int:
        """That it needs on the device."""
        if self.blocks:
            return self.blocks
        each = -(-(self.before + self.tokens) // block_size)
        return self.chunks * each + self.sequences * -(-(self.kv_tokens + 1) // block_size)


def grid(context: int, most_sequences: int) -> Iterator[BatchShape]:
    """Batches in order of size, so that what is measured first says most.

    Lengths go up to the model's context, decoding sequences up to `most_sequences`.
    """
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= most_sequences]
    lengths = [n for n in (16, 64, 128, 256, 512, 1024, 2048, 4096) if n < context]
    shapes = [BatchShape(sequences=n, kv_tokens=kv) for n in counts for kv in lengths]
    spans = [(tokens, before) for tokens in lengths for before in (0, *lengths[1::2])]
    spans = [(tokens, before) for tokens, before in spans if tokens + before <= context]
    shapes += [BatchShape(1, tokens, before) for tokens, before in spans]
    shapes += [BatchShape(chunks, tokens, 0) for chunks in (2, 4, 8) for tokens in lengths[:5]]
    shapes += [
        BatchShape(1, tokens, before, n, kv)
        for tokens, before in spans
        if tokens >= 64 and before in (0, *lengths[3:4])
        for n in counts[1::2]
        for kv in lengths[2::2]
    ]
    yield from sorted(shapes, key=_weight)


def _weight(shape: BatchShape) -> int:
    read = shape.chunks * shape.tokens * (shape.before + shape.tokens) // 64
    return (
        40 * (shape.chunks * shape.tokens + shape.sequences)
        + read
        + (shape.sequences * shape.kv_tokens)
    )


def swaps(most_blocks: int) -> Iterator[BatchShape]:
    """Copies of 1, 2, 3, 4, 6, 8, … blocks, in both directions."""
    sizes = sorted({size for k in range(12) for size in (2**k, 3 * 2**k)})
    for size in (s for s in sizes if s <= most_blocks):
        for direction in (_OUT, _IN):
            yield BatchShape(blocks=size, direction=direction)


class BatchTimer:
    """Times batches and copies on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        context = engine.decoder.config.context
        kv_tokens, tokens = min(256, context // 2), min(64, context // 4)
        self._reference = _step(engine, BatchShape(1, tokens, 0, 4, kv_tokens))

    def timed(self, shape: BatchShape) -> Timing:
        """Of a step the median of a few runs after one that does not count; of a copy the best."""
        if shape.blocks:
            copy = _copy(self._engine, shape)
            return Timing(min(copy() for _ in range(_COPIES)))
        run = _step(self._engine, shape)
        beside = self._references()
        times = [run()]
        if times[0] < _LONG_S:
            times = [run() for _ in range(_REPEATS)]
        return Timing(statistics.median(times), statistics.median(beside + self._references()))

    def _references(self) -> list[float]:
        self._reference()
        return [self._reference() for _ in range(_REFERENCE_REPEATS)]


def _batch(engine: Engine, shape: BatchShape) -> tuple[list[Sequence], list[Piece]]:
    """Decoding sequences and pieces of prompts, one after the other in the cache."""
    free = iter(range(engine.room.blocks))
    size = engine.room.block_size

    def sequence(tokens: int) -> Sequence:
        held = [next(free) for _ in range(-(-tokens // size))]
        return Sequence([1 + n % 100 for n in range(tokens)], blocks=held)

    decodes = [sequence(shape.kv_tokens + 1) for _ in range(shape.sequences)]
    prompts = [sequence(shape.before + shape.tokens) for _ in range(shape.chunks)]
    return decodes, [Piece(prompt, shape.before, shape.tokens) for prompt in prompts]


def _step(engine: Engine, shape: BatchShape) -> _Timed:
    decodes, pieces = _batch(engine, shape)
    return _Timed(engine.decoder.device, lambda: engine.runner.run(decodes, pieces))


def _copy(engine: Engine, shape: BatchShape) -> _Timed:
    assert engine.swapper is not None
    swapper, count = engine.swapper, shape.blocks
    copy = swapper.out if shape.direction == _OUT else swapper.into
    draw = random.Random(count)

    def run() -> None:
        # Nowhere near the last in a cache.
        begin = draw.randint(0, engine.room.num_cpu_blocks - count)
        blocks = list(range(begin, begin + count))
        copy(blocks, blocks)
        swapper.wait()

    return _Timed(engine.decoder.device, run)


def by_cpu_time(device: torch.device) -> bool:
    """Does one thread compute it all? Then its CPU time is what a step takes on a quiet machine."""
    threads: int = torch.get_num_threads()
    return device.type == "cpu" and threads == 1


class _Timed:
    def __init__(self, device: torch.device, run: Callable[[], object]) -> None:
        self._run = run
        self._device = device
        self._clock = time.thread_time if by_cpu_time(device) else time.perf_counter

    def __call__(self) -> float:
        begin_s = self._clock()
        self._run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock() - begin_s


def measured_device(device: torch.device, dtype: torch.dtype, kv_bytes: float) -> MeasuredDevice:
    """The best of a few runs of a copy of 64 MiB (2 GiB on CUDA), read and written, and of a
    product of square matrices. `kv_bytes`: room for KV that the engine takes.
    """
    cuda = device.type == "cuda"
    size = (1 << 31 if cuda else 1 << 26) // dtype.itemsize
    source = torch.ones(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(_Timed(device, lambda: target.copy_(source)))
    side = 8192 if cuda else 768
    square = torch.ones(side, side, dtype=dtype, device=device)
    product_s = _best_s(_Timed(device, lambda: square @ square))
    if cuda:
        memory: int = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = 2 * size * dtype.itemsize / copy_s
    return MeasuredDevice(memory, kv_bytes, bandwidth, 2 * side**3 / product_s)


def _best_s(run: _Timed) -> float:
    return min(run() for _ in range(4))


def host_s(engine: Engine, shapes: Seq[BatchShape]) -> float:
    """Median time to put a batch together, which is part of every step."""
    times = []
    for shape in shapes:
        if shape.sequences and not shape.chunks:
            decodes, _ = _batch(engine, shape)
            begin_s = time.perf_counter()
            engine.runner.layout.batch(decodes, [])
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


_MOVED_BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)
_MOST_MOVED_BYTES = 1 << 27  # of one layer's KV
_MOVE_ROUNDS = 4


def measured_moves(decoder: Decoder, workers: Workers, block_size: int) -> Iterator[CompletedMove]:
    """Moves of every kind with more and more KV, to worker 1 and back; the first round of each
    size is for warming up and left out.
    """
    each = decoder.block_bytes(block_size)
    for blocks in _MOVED_BLOCKS:
        if blocks * each // decoder.config.layers > _MOST_MOVED_BYTES:
            break
        cache = KvCache(decoder.config, blocks, block_size, decoder.dtype, decoder.device)
        spread = Spread(decoder, cache, workers)
        spread.lend_room(1, blocks)
        for _ in range(_MOVE_ROUNDS):
            _move_round(spread, blocks, block_size)
        yield from spread.moves[len(spread.moves) // _MOVE_ROUNDS :]


def _move_round(spread: Spread, blocks: int, block_size: int) -> None:
    spread.move_layers([0], 1)
    spread.move_layers([0], 0)
    if spread.config.kv_heads > 1:
        spread.move_heads(0, 1, helper=1)
        spread.return_heads(0)
    sequence = Sequence([1] * (blocks * block_size), blocks=list(range(blocks)))
    spread.split(sequence, blocks - 1, helper=1)
    spread.rejoin(sequence, list(range(blocks - 1)))
