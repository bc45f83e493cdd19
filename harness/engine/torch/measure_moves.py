"""What it takes to move layers, KV heads and parts of sequences to another process and back."""

from __future__ import annotations

from collections.abc import Iterator

from .cache import KvCache
from .decoder import Decoder
from .distributed import CompletedMove, Spread
from .sequence import Sequence
from .workers import Workers

_BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)
_MOST_BYTES = 1 << 27  # of one layer's KV
_ROUNDS = 4


def measured_moves(decoder: Decoder, workers: Workers, block_size: int) -> Iterator[CompletedMove]:
    """Moves of every kind with more and more KV, to worker 1 and back; the first round of each
    size is for warming up and left out.
    """
    each = decoder.config.kv_bytes_per_token(decoder.dtype.itemsize) * block_size
    for blocks in _BLOCKS:
        if blocks * each // decoder.config.layers > _MOST_BYTES:
            break
        made = (decoder.config, blocks, block_size, decoder.dtype, decoder.device)
        spread = Spread(decoder, KvCache(*made), workers)
        spread.lend_room(1, blocks)
        for _ in range(_ROUNDS):
            _round(spread, blocks, block_size)
        yield from spread.moves[len(spread.moves) // _ROUNDS :]


def _round(spread: Spread, blocks: int, block_size: int) -> None:
    spread.move_layers([0], 1)
    spread.move_layers([0], 0)
    if spread.config.kv_heads > 1:
        spread.move_heads(0, 1, helper=1)
        spread.return_heads(0)
    one = Sequence([1] * (blocks * block_size), blocks=list(range(blocks)))
    spread.split(one, blocks - 1, helper=1)
    spread.rejoin(one, list(range(blocks - 1)))
