"""From logits to the next tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from .sequence import Sampling, Sequence

_LARGE = 0x9E3779B97F4A7C15  # spreads a token's place over the seeds


def next_tokens(logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """One token for each row of `logits` [sequences, vocabulary]."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, sequence in enumerate(sequences):
        if sequence.sampling.temperature > 0:
            place = len(sequence.tokens)
            tokens[row] = _drawn(logits[row].float().cpu(), sequence.sampling, place)
    return tokens


def _drawn(logits: Tensor, sampling: Sampling, place: int) -> int:
    chances = torch.softmax(logits / sampling.temperature, -1)
    order = torch.argsort(chances, descending=True, stable=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    chances = chances[order]
    if sampling.top_p < 1:
        # The smallest set that reaches top_p: whoever begins below it belongs to it.
        before = chances.cumsum(0) - chances
        chances = torch.where(before < sampling.top_p * chances.sum(), chances, 0.0)
    generator = torch.Generator().manual_seed((sampling.seed + _LARGE * place) % (1 << 63))
    return int(order[torch.multinomial(chances, 1, generator=generator)])
