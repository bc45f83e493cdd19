"""Runs batches: sequences in, the next token of each out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from .batch import Layout, Piece
from .cache import KvCache
from .decoder import Decoder
from .pipeline import Traffic
from .sampling import next_tokens
from .sequence import Sequence


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
            asked = [*decodes, *(piece.sequence for piece in pieces if piece.last)]
            if asked:
                return next_tokens(logits, asked)
            if self.layout.device.type == "cuda":  # no token is read back: the step is not over
                torch.cuda.synchronize(self.layout.device)
            return []
