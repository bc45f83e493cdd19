"""A worker process: layers with their KV, and KV heads of others' layers, that moved here.

    python -m slo_bench.harness.engine.torch.torch_worker STORE RANK SIZE TIMEOUT_S

It does what rank 0 says until that says stop, or is gone.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import Partial
from .batch import Batch, Decodes
from .cache import InUse, KvCache, LayerKv, Packed, copy_blocks, packed, unpacked
from .decoder import Decoder, store
from .decoder_config import DecoderConfig
from .pipeline import Pipeline, Traffic
from .threads import pin
from .torch_errors import WorkerError
from .torch_workers import join, leave, receive, send
from .weights import DecoderWeights, Layer, Linear

_IDLE = timedelta(days=30)  # nobody may need it for long; where rank 0 ends, it ends at once


class TorchWorker:
    """What lives here of one model. Answers each message of `distributed.Spread` with another."""

    def echo(self, payload: Tensor) -> Tensor:
        """Return the payload, so that a round trip can be timed."""
        return payload

    def begin(self, config: DecoderConfig) -> None:
        """Nothing of this model is here yet, and of none before it any more."""
        nothing = torch.empty(0)
        weights = DecoderWeights(nothing, None, [], (nothing, None), Linear(nothing))
        self._config = config
        self._decoder = Decoder(config, weights)
        self._layers: dict[int, tuple[Layer, LayerKv]] = {}
        self._heads: dict[int, tuple[Decoder, LayerKv]] = {}
        self._lent: list[Tensor] = []  # a tensor a layer, as in a cache
        self._carriers = (
            Pipeline(lambda n: self._layers[n][1].kv, lambda: sorted(self._layers)),
            Pipeline(lambda n: self._heads[n][1].kv, lambda: sorted(self._heads), last=True),
        )

    def prefetch(self, traffic: Traffic) -> None:
        """An iteration begins; what lives here loads its part of it."""
        for carrier in self._carriers:
            carrier.begin(traffic)

    def drain(self) -> None:
        """Answers when its part is stored."""
        for carrier in self._carriers:
            carrier.drain()

    def take_layer(self, number: int, layer: Layer, kv: Packed) -> None:
        """A layer lives here from now on."""
        self._layers[number] = (layer, unpacked(kv))

    def give_layer(self, number: int, in_use: InUse | None) -> tuple[Layer, Packed]:
        """Remove and return a layer."""
        layer, held = self._layers.pop(number)
        return layer, packed(held, in_use)

    def swap(self, out: bool, blocks: list[int], num_cpu_blocks: list[int]) -> None:
        """Blocks of all that lives here go to host memory, or come back."""
        for _, held in (*self._layers.values(), *self._heads.values()):
            if out:
                copy_blocks(held.kv, blocks, held.host, num_cpu_blocks)
            else:
                copy_blocks(held.host, num_cpu_blocks, held.kv, blocks)

    def run(self, numbers: list[int], x: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden] through layers that live here, in their order."""
        turn = self._decoder.turn(batch)
        for number in numbers:
            layer, held = self._layers[number]
            self._carriers[0].ready(number)
            x = self._decoder.layer(x, layer, held.kv, batch, turn)
            self._carriers[0].computed(number)
        return x

    def project(
        self, number: int, x: Tensor, batch: Batch, mine: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer that lives here begins, but for its KV heads from `mine` on: their queries, keys
        and values. `finish` goes on with it.
        """
        layer, _ = self._layers[number]
        qkv = self._decoder.projected(x, layer, self._decoder.turn(batch))
        cut = mine * self._config.group
        self._begun = x, qkv[0][:, :cut], qkv[1][:, :mine], qkv[2][:, :mine]
        away = qkv[0][:, cut:], qkv[1][:, mine:], qkv[2][:, mine:]
        return away[0].contiguous(), away[1].contiguous(), away[2].contiguous()

    def attend_own(self, number: int, batch: Batch) -> None:
        """Attention of the heads that the layer has here."""
        _, queries, keys, values = self._begun
        kv = self._layers[number][1].kv
        self._carriers[0].ready(number)
        store(kv, keys, values, batch)
        self._carriers[0].computed(number)
        self._attended = self._decoder.attention(queries, keys, values, kv, batch)

    def finish(self, number: int, attended: Tensor) -> Tensor:
        """The rest of that layer, with the attention of its other heads."""
        layer, _ = self._layers[number]
        return self._decoder.rest(self._begun[0], torch.cat([self._attended, attended], 1), layer)

    def split_heads(self, number: int, mine: int, in_use: InUse | None) -> Packed:
        """Remove and return the KV heads from `mine` on of a layer."""
        layer, held = self._layers[number]
        gone = packed(held.heads(slice(mine, None)), in_use)
        self._layers[number] = layer, held.heads(slice(0, mine))
        return gone

    def join_heads(self, number: int, kv: Packed) -> None:
        """Add KV heads that were split off to a layer again."""
        layer, held = self._layers[number]
        self._layers[number] = layer, held.joined(unpacked(kv))

    def read_blocks(self, blocks: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """KV of these blocks, of each layer and of each layer's heads that live here."""
        index = torch.tensor(blocks)
        layers = {n: held.kv.index_select(1, index) for n, (_, held) in self._layers.items()}
        heads = {n: held.kv.index_select(1, index) for n, (_, held) in self._heads.items()}
        return layers, heads

    def write_blocks(
        self, blocks: list[int], layers: dict[int, Tensor], heads: dict[int, Tensor]
    ) -> None:
        """What `read_blocks` gave, into these blocks."""
        index = torch.tensor(blocks)
        for n, kv in layers.items():
            self._layers[n][1].kv.index_copy_(1, index, kv)
        for n, kv in heads.items():
            self._heads[n][1].kv.index_copy_(1, index, kv)

    def take_heads(self, number: int, kv: Packed) -> None:
        """The last KV heads of a layer live here from now on."""
        count = kv.kv.shape[2]
        mine = replace(self._config, kv_heads=count, heads=count * self._config.group)
        self._heads[number] = (Decoder(mine, self._decoder.weights), unpacked(kv))

    def give_heads(self, number: int, in_use: InUse | None) -> Packed:
        """Remove and return the offloaded heads."""
        return packed(self._heads.pop(number)[1], in_use)

    def attend(
        self, number: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch
    ) -> Tensor:
        """Attention of those heads, [rows, heads, head_dim]; their new KV stays here."""
        decoder, (kv, _) = self._heads[number]
        self._carriers[1].ready(number)
        store(kv, keys, values, batch)
        self._carriers[1].computed(number)
        return decoder.attention(queries, keys, values, kv, batch)

    # ---------------------------------------------------------------- parts of sequences

    def room(self, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Allocate that many blocks for split sequences."""
        cache = KvCache(self._config, blocks, block_size, dtype, torch.device("cpu"))
        self._lent = cache.layers

    def take_blocks(self, blocks: list[int], kv: list[Tensor]) -> None:
        """These blocks live here from now on; a tensor a layer."""
        for held, coming in zip(self._lent, kv, strict=True):
            held.index_copy_(1, torch.tensor(blocks), coming)

    def give_blocks(self, blocks: list[int]) -> list[Tensor]:
        """Remove and return the blocks of a split sequence."""
        return [held.index_select(1, torch.tensor(blocks)) for held in self._lent]

    def attend_part(self, number: int, queries: Tensor, to: Decodes) -> Partial:
        """Of decoding sequences, over their blocks that live here."""
        return self._decoder.decoded(queries, self._lent[number], to)


def main() -> None:
    """Run a worker process until its connection closes."""
    place, rank, size, timeout_s, *core = sys.argv[1:]
    torch.set_num_threads(1)
    pin([int(number) for number in core])
    try:
        join(Path(place), int(rank), int(size), float(timeout_s))
        models: defaultdict[int, TorchWorker] = defaultdict(TorchWorker)
        with torch.inference_mode():
            while (message := receive(0, _IDLE)) is not None:
                owner, method, arguments = message
                answer: Any = None
                if owner is None:
                    models.clear()
                else:
                    answer = getattr(models[owner], method)(*arguments)
                send(0, (time.process_time(), answer))
    except WorkerError:
        pass  # rank 0 is gone
    finally:
        leave()


if __name__ == "__main__":
    main()
