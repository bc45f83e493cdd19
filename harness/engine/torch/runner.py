"""Runs batches: sequences in, the next token of each out, drawn from its logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from .batch import Layout, Piece
from .cache import KvCache
from .decoder import Decoder
from .pipeline import Traffic
from .sequence import Sampling, Sequence, TokenLogprobs


class Runner:
    """A model and its KV cache. The caller assigns blocks to sequences."""

    def __init__(self, decoder: Decoder, cache: KvCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.carrier = decoder.carrier(cache.layers)
        self.layout = Layout(
            kv_heads=cache.kv_heads,
            block_size=cache.block_size,
            window=decoder.config.window,
            dtype=decoder.dtype,
            device=decoder.device,
        )

    def run(
        self, decodes: Seq[Sequence], pieces: Seq[Piece], traffic: Traffic | None = None
    ) -> list[int]:
        """Run one iteration. Returns the next token of every decoding sequence, then of every piece
        that ends its prompt; none is added to its sequence. `traffic` runs in parallel and ends
        with the iteration.
        """
        with torch.inference_mode():
            if traffic:
                self.carrier.begin(traffic)
            batch = self.layout.batch(decodes, pieces)
            logits = self.decoder.logits(batch, self.cache.layers, self.carrier)
            if traffic:
                self.carrier.drain()
            sequences = [*decodes, *(piece.sequence for piece in pieces if piece.last)]
            if sequences:
                return next_tokens(logits, sequences)
            if self.layout.device.type == "cuda":  # no token is read back: the step is not over
                torch.cuda.synchronize(self.layout.device)
            return []


_LARGE = 0x9E3779B97F4A7C15  # spreads a token's place over the seeds


def next_tokens(logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
    """One token for each row of `logits` [sequences, vocabulary]."""
    tokens: list[int] = logits.max(-1).indices.tolist()  # in bfloat16, argmax is four times slower
    for row, sequence in enumerate(sequences):
        if sequence.sampling.temperature > 0:
            place = len(sequence.tokens)
            tokens[row] = _drawn(logits[row].float().cpu(), sequence.sampling, place)
        if sequence.logprobs is not None:
            _note(logits[row], tokens[row], sequence.logprobs)
    return tokens


def _note(logits: Tensor, token: int, into: TokenLogprobs) -> None:
    logprobs = torch.log_softmax(logits.float(), -1)
    values, tokens = logprobs.topk(min(into.top, len(logprobs)))
    top = list(zip(tokens.tolist(), values.tolist(), strict=True))
    into.entries.append((float(logprobs[token]), top))


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
