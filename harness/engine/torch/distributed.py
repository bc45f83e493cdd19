"""A decoder over several processes: layers and KV heads move between them in mid-generation.

A layer moves with its weights and its KV; the activations then go to where it is and come back
(layer migration of BanaServe, Eqs. 4-1 to 4-3). KV heads move without weights: a helper keeps their
KV and computes their attention from the queries, keys and values of each step (attention migration,
Eqs. 4-4 and 4-5; heads need no common softmax). Every row is computed by the same operations in the
same order wherever that happens, so that tokens stay the same. The first blocks of a sequence move
without weights too: their worker attends to them, and the parts are joined by their log-sum-exp
(Eqs. 4-6 to 4-8, mended: `attention.merged`), which rounds in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from .attention import Partial, merged
from .batch import Batch, Decodes
from .cache import InUse, KvCache, LayerKv, Swapper, packed, unpacked
from .decoder import Decoder, store
from .pipeline import Pipeline, Traffic
from .sequence import OffloadedBlocks, Sequence
from .torch_errors import ModelError
from .torch_workers import HERE, Workers


@dataclass(frozen=True)
class CompletedMove:
    """What moved (weights and KV in use), and how long that took from its order to its being in
    place.
    """

    what: str  # `layers`, `heads` or `sequence`
    layers: tuple[int, ...]
    source: int
    target: int
    moved_bytes: int
    seconds: float


class _SpreadPipeline(Pipeline):
    """Carries the traffic of an iteration here and at the workers."""

    def __init__(self, spread: Spread, cache: list[Tensor]) -> None:
        super().__init__(cache.__getitem__, lambda: spread.layers_at(HERE))
        self._spread = spread
        self._ranks: Seq[int] = ()

    def begin(self, traffic: Traffic) -> None:
        self._ranks = self._spread.busy()
        for rank in self._ranks:
            self._spread.workers.ask(rank, "prefetch", traffic)
        super().begin(traffic)

    def drain(self) -> None:
        super().drain()
        for rank in self._ranks:
            self._spread.workers.ask(rank, "drain")


class SpreadSwapper(Swapper):
    """Swaps here and at the workers."""

    def __init__(self, spread: Spread, cache: KvCache, host: KvCache) -> None:
        super().__init__(cache, host)
        self._spread = spread
        self._workers = spread.workers

    def out(self, blocks: Seq[int], num_cpu_blocks: Seq[int]) -> None:
        super().out(blocks, num_cpu_blocks)
        for rank in self._spread.busy():
            self._workers.ask(rank, "swap", True, list(blocks), list(num_cpu_blocks))

    def into(self, num_cpu_blocks: Seq[int], blocks: Seq[int]) -> None:
        super().into(num_cpu_blocks, blocks)
        for rank in self._spread.busy():
            self._workers.ask(rank, "swap", False, list(blocks), list(num_cpu_blocks))


class Spread(Decoder):
    """A decoder with layers or KV heads at other workers.

    Args:
        decoder: the whole model, at first on this process.
        cache: its own part of the KV.
        workers: processes that may take layers, heads or blocks.
        host: swapped KV; it moves with its layers and heads.
        home: the process where all layers are at first; at a worker, this process only embeds
            tokens, computes logits and says what to do.

    `in_use` returns the blocks that must move with a layer; None: all.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        workers: Workers,
        host: KvCache | None = None,
        home: int = HERE,
    ) -> None:
        layers = list(decoder.weights.layers)  # the decoder's own stay where they are
        super().__init__(decoder.config, replace(decoder.weights, layers=layers))
        self._cache = cache
        self._host = [layer[:, :0] for layer in cache.layers] if host is None else host.layers
        self.in_use: Callable[[], InUse] | None = None
        self.workers = workers.of(home)  # whose layers and heads these are there
        self._holders = [HERE] * decoder.config.layers
        self._helped: dict[int, tuple[int, int]] = {}  # by layer: helper, its KV heads
        self._offloaded: dict[int, list[int]] = {}  # free blocks for parts of sequences, by worker
        self._split_up: set[Sequence] = set()
        self.moves: list[CompletedMove] = []
        for rank in workers.ranks:
            self.workers.ask(rank, "begin", decoder.config)
        self.home = home
        if home != HERE:
            self.in_use = lambda: InUse(())  # nothing has been computed
            self.move_layers(self._all, home)
            self.in_use = None
            self.moves.clear()

    def carrier(self, cache: list[Tensor]) -> Pipeline:
        """Makes the transfer of KV between a store and all processes, each for its own layers."""
        return _SpreadPipeline(self, cache)

    def busy(self) -> list[int]:
        """Workers where anything of this model lives."""
        helpers = {helper for helper, _ in self._helped.values()}
        return sorted(({*self._holders} | helpers) - {HERE})

    def logits(self, batch: Batch, cache: list[Tensor], carrier: Pipeline) -> Tensor:
        x, turn = self.embedded(batch), self.turn(batch)
        for rank, group in groupby(range(self.config.layers), self._holders.__getitem__):
            numbers = list(group)
            if rank != HERE:
                for whole, part in groupby(numbers, lambda n: n not in self._helped):
                    if whole:
                        x = self.workers.ask(rank, "run", list(part), x, batch)
                        continue
                    for n in part:
                        x = self._helped_at(rank, n, x, batch)
                continue
            for n in numbers:
                layer = self.weights.layers[n]
                carrier.ready(n)
                if n in self._helped or batch.elsewhere:
                    queries, keys, values = self.projected(x, layer, turn)
                    attended = self._split if batch.elsewhere else self._attended
                    output = attended(n, queries, keys, values, cache[n], batch)
                    x = self.rest(x, output, layer)
                else:
                    x = self.layer(x, layer, cache[n], batch, turn)
                carrier.computed(n)
        return self.head(x, batch)

    def _attended(
        self, n: int, queries: Tensor, keys: Tensor, values: Tensor, kv: Tensor, batch: Batch
    ) -> Tensor:
        helper, theirs = self._helped[n]
        mine = self.config.kv_heads - theirs
        cut = mine * self.config.group
        away = (n, queries[:, cut:], keys[:, mine:], values[:, mine:], self._of(batch, theirs))
        self.workers.tell(helper, "attend", *away)
        own_batch = self._of(batch, mine)
        store(kv, keys[:, :mine], values[:, :mine], own_batch)
        here = self.attention(queries[:, :cut], keys[:, :mine], values[:, :mine], kv, own_batch)
        return torch.cat([here, self.workers.answer(helper)], 1)

    def _helped_at(self, rank: int, n: int, x: Tensor, batch: Batch) -> Tensor:
        """A layer of worker `rank`, some heads of which are at another: both attend at once."""
        helper, theirs = self._helped[n]
        mine = self.config.kv_heads - theirs
        away = self.workers.ask(rank, "project", n, x, batch, mine)
        self.workers.tell(helper, "attend", n, *away, self._of(batch, theirs))
        self.workers.ask(rank, "attend_own", n, self._of(batch, mine))
        output: Tensor = self.workers.ask(rank, "finish", n, self.workers.answer(helper))
        return output

    def _split(
        self, n: int, queries: Tensor, keys: Tensor, values: Tensor, kv: Tensor, batch: Batch
    ) -> Tensor:
        """Workers attend to the beginnings of sequences while their ends are attended to here."""
        for part in batch.elsewhere:
            queries_of_rows = queries.index_select(0, part.rows)
            self.workers.tell(part.rank, "attend_part", n, queries_of_rows, part.decodes)
        store(kv, keys, values, batch)

        def joined(here: Partial) -> Partial:
            for part in batch.elsewhere:
                rows, there = part.rows, self.workers.answer(part.rank)
                mine = [t.index_select(0, rows) for t in (here.values, here.weight, here.peak)]
                whole = merged([there, Partial(*mine)])
                for held, merged_rows in zip(
                    vars(here).values(), vars(whole).values(), strict=True
                ):
                    held.index_copy_(0, rows, merged_rows)
            return here

        return self.attention(queries, keys, values, kv, batch, joined)

    def _of(self, batch: Batch, heads: int) -> Batch:
        """The same batch for a part of its KV heads."""
        every, size = self.config.kv_heads, self._cache.block_size
        slots = batch.slots.view(-1, every)[:, 0]
        block, place = slots // (every * size), slots % size
        rows = block.unsqueeze(1) * heads + torch.arange(heads, device=slots.device)
        decodes = batch.decodes
        if decodes is not None:
            mask = decodes.mask.view(-1, every, 1, size)[:, :heads].reshape(-1, 1, size)
            fields = {**vars(decodes), "mask": mask}
            decodes = Decodes(**fields)
        changed = {**vars(batch), "slots": (rows * size + place.unsqueeze(1)).ravel()}
        return Batch(**{**changed, "decodes": decodes})

    # ---------------------------------------------------------------- places of layers and heads

    def layers_at(self, rank: int) -> list[int]:
        """Layers at a process, with all their heads or without some."""
        return [n for n, holder in enumerate(self._holders) if holder == rank]

    def movable(self, rank: int) -> list[int]:
        """Layers there with all their heads."""
        return [n for n in self.layers_at(rank) if n not in self._helped]

    def helped_by(self, rank: int) -> dict[int, int]:
        """KV heads that are there, by layer."""
        return {n: heads for n, (helper, heads) in self._helped.items() if helper == rank}

    def kv_bytes(self, blocks: int | None) -> int:
        """Bytes of KV of that many blocks (None: all) of one layer."""
        config, size = self.config, self._cache.block_size
        each: int = 2 * config.kv_heads * config.head_dim * self.dtype.itemsize
        count = self._cache.blocks if blocks is None else blocks
        return count * size * each

    def layer_bytes(self, blocks: int | None) -> list[int]:
        """Bytes of the weights of each layer and of that many of its KV blocks."""
        return [layer.weight_bytes + self.kv_bytes(blocks) for layer in self.weights.layers]

    @property
    def own_weight_bytes(self) -> int:
        """Of what never moves: embeddings and head."""
        embed, head = self.weights.embed, self.weights.head.weight
        weight_bytes: int = embed.nbytes
        return weight_bytes if head is embed else weight_bytes + head.nbytes

    def held_bytes(self, rank: int, blocks: int) -> int:
        """Bytes of weights and of that many KV blocks at a process; `home` is this one."""
        every, kv = self.config.kv_heads, self.kv_bytes(blocks)
        there = self.layer_bytes(blocks)
        held = sum(there[n] for n in self.layers_at(rank))
        if rank == HERE:
            away = sum(heads for _, heads in self._helped.values())
            return held + self.own_weight_bytes - kv * away // every
        return held + kv * sum(self.helped_by(rank).values()) // every

    def busy_s(self) -> dict[int, float]:
        """CPU seconds of each worker since it began."""
        for rank in self.workers.ranks:
            self.workers.ask(rank, "echo", torch.empty(0))
        return dict(self.workers.workers.busy_s)

    # ---------------------------------------------------------------- moving

    def move_layers(self, layers: Seq[int], target: int) -> CompletedMove:
        """Move weights and KV of these layers to worker `target` (0: this process), between two
        steps.

        Raises:
            ModelError: a layer is at the target already, or has heads at another worker.
            WorkerError: a worker has ended.
        """
        self._whole()
        sources = {self._holders[n] for n in layers}
        if len(sources) != 1 or target in sources or any(n in self._helped for n in layers):
            raise ModelError(
                f"layers {list(layers)} cannot move to {target}: they must all be at one other "
                "worker, with all their heads"
            )
        source, begin_s, moved = sources.pop(), time.perf_counter(), 0
        for n in layers:
            in_use = self._in_use()
            if source == HERE:
                layer, kv = self.weights.layers[n], packed(self._kv(n), in_use)
            else:
                layer, kv = self.workers.ask(source, "give_layer", n, in_use)
            if target == HERE:
                self.weights.layers[n] = layer
                self._put(n, unpacked(kv))
            else:
                self.workers.ask(target, "take_layer", n, layer, kv)
                self._put(n, self._kv(n).gone)
            moved += kv.nbytes + layer.weight_bytes
            self._holders[n] = target
        return self._moved("layers", tuple(layers), source, target, moved, begin_s)

    def offload_layers(self, count: int, helper: int) -> None:
        """Let worker `helper` have the last `count` layers, and home all others: what is away stays
        one stretch, so that activations travel twice a step.

        Raises:
            WorkerError: a worker has ended.
        """
        there = self.movable(helper)
        if count > len(there):
            here = self.movable(self.home)
            self.move_layers(here[len(there) - count :], helper)
        elif count < len(there):
            self.move_layers(there[: len(there) - count], self.home)

    def offload_heads(self, count: int, helper: int) -> None:
        """Let worker `helper` have the last `count` KV heads of every layer, and home all others.

        Raises:
            WorkerError: a worker has ended.
        """
        for n, heads in self.helped_by(helper).items():
            if heads != count:
                self.return_heads(n)
        if count:
            for n in self.movable(self.home):
                self.move_heads(n, count, helper)

    def _in_use(self) -> InUse | None:
        return None if self.in_use is None else self.in_use()

    def _kv(self, n: int) -> LayerKv:
        return LayerKv(self._cache.layers[n], self._host[n])

    def _put(self, n: int, held: LayerKv) -> None:
        self._cache.layers[n], self._host[n] = held

    def move_heads(self, n: int, heads: int, helper: int) -> CompletedMove:
        """Move the last `heads` KV heads of layer `n` from its home to worker `helper`.

        Raises:
            ModelError: the layer is not at home, has a helper already, or has no more heads than
                that.
            WorkerError: the worker has ended.
        """
        self._whole()
        mine = self.config.kv_heads - heads
        if self._holders[n] != self.home or n in self._helped or heads < 1 or mine < 1:
            raise ModelError(f"{heads} KV heads of layer {n} cannot move to worker {helper}")
        begin_s = time.perf_counter()
        if self.home == HERE:
            held = self._kv(n)
            kv = packed(held.heads(slice(mine, None)), self._in_use())
            self._put(n, held.heads(slice(0, mine)))
        else:
            kv = self.workers.ask(self.home, "split_heads", n, mine, self._in_use())
        self.workers.ask(helper, "take_heads", n, kv)
        self._helped[n] = (helper, heads)
        return self._moved("heads", (n,), self.home, helper, kv.nbytes, begin_s)

    def return_heads(self, n: int) -> CompletedMove:
        """The heads of layer `n` that a helper has come back.

        Raises:
            WorkerError: the worker is gone.
        """
        helper, _ = self._helped[n]
        begin_s = time.perf_counter()
        kv = self.workers.ask(helper, "give_heads", n, self._in_use())
        if self.home == HERE:
            self._put(n, self._kv(n).joined(unpacked(kv)))
        else:
            self.workers.ask(self.home, "join_heads", n, kv)
        del self._helped[n]
        return self._moved("heads", (n,), helper, self.home, kv.nbytes, begin_s)

    def read_blocks(self, blocks: Seq[int]) -> list[Tensor]:
        """KV of these blocks, [2, blocks, KV heads, block tokens, head_dim] of each layer, from
        wherever its layers and heads are. Its home is a worker.

        Raises:
            WorkerError: a worker has ended.
        """
        layer_kv: dict[int, Tensor] = {}
        head_kv: dict[int, Tensor] = {}
        for rank in self.busy():
            layers, heads = self.workers.ask(rank, "read_blocks", list(blocks))
            layer_kv |= layers
            head_kv |= heads
        return [
            torch.cat([layer_kv[n], head_kv[n]], 2) if n in head_kv else layer_kv[n]
            for n in self._all
        ]

    def write_blocks(self, blocks: Seq[int], kv: Seq[Tensor]) -> None:
        """What `read_blocks` of an equal model gave, into these blocks.

        Raises:
            WorkerError: a worker has ended.
        """
        mine = {n: self.config.kv_heads - heads for n, (_, heads) in self._helped.items()}
        for rank in self.busy():
            layers = {n: kv[n][:, :, : mine.get(n)].contiguous() for n in self.layers_at(rank)}
            heads = {n: kv[n][:, :, mine[n] :].contiguous() for n in self.helped_by(rank)}
            self.workers.ask(rank, "write_blocks", list(blocks), layers, heads)

    def lend_room(self, helper: int, blocks: int) -> None:
        """Let worker `helper` allocate `blocks` blocks for split sequences, of which it holds none
        yet.
        """
        room = (blocks, self._cache.block_size, self.dtype)
        self.workers.ask(helper, "room", *room)
        self._offloaded[helper] = list(range(blocks))

    def split(self, sequence: Sequence, blocks: int, helper: int) -> CompletedMove:
        """Move the first `blocks` blocks of a decoding sequence to worker `helper`, which attends
        to them from then on; the results of both parts are joined by the log-sum-exp of their
        scores. Their ids in this process become free.

        Raises:
            ModelError: it is split already, has no more blocks than that, a layer or head is at
                another worker, or the helper has no room.
            WorkerError: the worker has ended.
        """
        free = self._offloaded.get(helper, [])
        away = any(self._holders) or bool(self._helped)
        if (
            sequence.offloaded
            or away
            or not 0 < blocks < len(sequence.blocks)
            or blocks > len(free)
        ):
            raise ModelError(
                f"{blocks} of {len(sequence.blocks)} blocks cannot move to worker {helper}, which "
                f"has room for {len(free)}: the last one stays, all layers and heads must be here, "
                "and a sequence is split only once"
            )
        begin_s = time.perf_counter()
        index = torch.tensor(sequence.blocks[:blocks], device=self.device)
        kv = [layer.index_select(1, index) for layer in self._cache.layers]
        there = [free.pop(0) for _ in range(blocks)]
        self.workers.ask(helper, "take_blocks", there, kv)
        sequence.offloaded = OffloadedBlocks(helper, there)
        del sequence.blocks[:blocks]
        self._split_up.add(sequence)
        moved = sum(t.nbytes for t in kv)
        return self._moved("sequence", self._all, HERE, helper, moved, begin_s)

    def rejoin(self, sequence: Sequence, blocks: Seq[int]) -> CompletedMove:
        """What a helper has of it comes back, into these free blocks here.

        Raises:
            ModelError: it is not split, or these are not as many.
            WorkerError: the worker is gone.
        """
        offloaded = sequence.offloaded
        if offloaded is None or len(blocks) != len(offloaded.blocks):
            raise ModelError(
                f"{sequence.offloaded_blocks} blocks cannot come back into {len(blocks)}"
            )
        begin_s = time.perf_counter()
        kv = self.workers.ask(offloaded.rank, "give_blocks", offloaded.blocks)
        index = torch.tensor(blocks, device=self.device)
        for held, coming in zip(self._cache.layers, kv, strict=True):
            held.index_copy_(1, index, coming)
        self.forget(sequence)
        sequence.blocks[:0] = blocks
        moved = sum(t.nbytes for t in kv)
        return self._moved("sequence", self._all, offloaded.rank, HERE, moved, begin_s)

    def forget(self, sequence: Sequence) -> None:
        """It is done: what a helper has of it is free."""
        if sequence.offloaded is not None:
            self._offloaded[sequence.offloaded.rank] += sequence.offloaded.blocks
            sequence.offloaded = None
            self._split_up.remove(sequence)

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.config.layers))

    def _whole(self) -> None:
        if self._split_up:
            raise ModelError("layers and heads stay where they are while a sequence is split")

    def _moved(
        self,
        kind: str,
        layers: tuple[int, ...],
        source: int,
        target: int,
        moved_bytes: int,
        begin_s: float,
    ) -> CompletedMove:
        seconds = time.perf_counter() - begin_s
        self.moves.append(CompletedMove(kind, layers, source, target, moved_bytes, seconds))
        return self.moves[-1]
