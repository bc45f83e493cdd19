"""The forward pass of a decoder over one batch of prompt chunks and decodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .attention import Partial, chunk, decode
from .batch import Batch, Decodes
from .decoder_config import DecoderConfig
from .pipeline import Pipeline
from .rope import rotate, rotations
from .tiers import UnitShape
from .weights import Affine, DecoderWeights, Layer

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TILE = 512  # rows at once on a CPU: what lies between two products stays in a cache


class Decoder:
    """A model that is loaded. It holds no state of any request: KV is the caller's."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self._scale = config.head_dim**-0.5
        self._eps = torch.tensor(config.eps)
        self._rotations: Tensor | None = None
        if config.rope is not None:
            self._rotations = rotations(
                config.rope, config.head_dim, config.context, weights.embed.device
            )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and KV."""
        return self.weights.embed.dtype

    @property
    def dtype_name(self) -> str:
        """Data type of weights and KV as placements and profiles name it."""
        return _DTYPE_NAMES[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block of all layers."""
        return self.config.kv_bytes_per_token(self.dtype.itemsize) * block_size

    def carrier(self, cache: list[Tensor]) -> Pipeline:
        """Makes the transfer of KV between a store and `cache` in parallel to the computation."""
        return Pipeline(cache.__getitem__, lambda: range(self.config.layers))

    def logits(self, batch: Batch, cache: list[Tensor], carrier: Pipeline) -> Tensor:
        """Logits of shape [rows wanted, vocabulary]; `cache` has a tensor for each layer and takes
        the new KV. `carrier` is called for each layer.
        """
        x = self.embedded(batch)
        turn = self.turn(batch)
        for n, (layer, kv) in enumerate(zip(self.weights.layers, cache, strict=True)):
            carrier.ready(n)
            x = self.layer(x, layer, kv, batch, turn)
            carrier.computed(n)
        return self.head(x, batch)

    def embedded(self, batch: Batch) -> Tensor:
        """[rows, hidden], what the first layer gets."""
        x = F.embedding(batch.tokens, self.weights.embed)
        if self.weights.positions is not None:
            places = batch.positions + self.config.position_offset
            x = x + F.embedding(places, self.weights.positions)
        return x

    def turn(self, batch: Batch) -> Tensor | None:
        """The rotation of each row; the same for all layers."""
        return None if self._rotations is None else self._rotations[batch.positions]

    def head(self, x: Tensor, batch: Batch) -> Tensor:
        """[rows wanted, vocabulary] from what the last layer gave."""
        if batch.logit_rows is not None:
            x = x.index_select(0, batch.logit_rows)
        return self.weights.head(self._norm(x, self.weights.norm))

    def layer(
        self, x: Tensor, layer: Layer, kv: Tensor, batch: Batch, turn: Tensor | None
    ) -> Tensor:
        """One layer: its attention, then its feed-forward part."""
        queries, keys, values = self.projected(x, layer, turn)
        store(kv, keys, values, batch)
        attended = self.attention(queries, keys, values, kv, batch)
        return self.rest(x, attended, layer)

    def projected(
        self, x: Tensor, layer: Layer, turn: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [rows, its heads, head_dim]."""
        config = self.config
        both = config.heads + config.kv_heads
        qkv = layer.qkv(self._norm(x, layer.norm))
        qkv = qkv.view(len(x), -1, config.head_dim)
        qk, values = qkv[:, :both], qkv[:, both:]
        if layer.qk_norm is not None:
            parts = (qk[:, : config.heads], qk[:, config.heads :])
            normed = zip(parts, layer.qk_norm, strict=True)
            qk = torch.cat([rms_norm(p, w, self._eps) for p, w in normed], 1)
        if turn is not None:
            qk = rotate(qk, turn)
        return qk[:, : config.heads], qk[:, config.heads :], values

    def rest(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        """What follows attention in a layer."""
        attended = attended.reshape(len(x), -1)
        if len(x) <= _TILE or x.device.type != "cpu":
            return self._fed_forward(x, attended, layer)
        tiles = zip(x.split(_TILE), attended.split(_TILE), strict=True)
        return torch.cat(
            [self._fed_forward(part, attended_part, layer) for part, attended_part in tiles]
        )

    def _fed_forward(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = layer.out(attended, plus=x)
        inner = layer.up(self._norm(x, layer.mlp_norm))
        return layer.down(self._activated(inner), plus=x)

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        kv: Tensor,
        batch: Batch,
        joined: Callable[[Partial], Partial] = lambda part: part,
    ) -> Tensor:
        """Attention output [rows, heads, head_dim]; `kv` holds the new keys and values already.
        `joined` adds the attention of decoding sequences to blocks at other workers.
        """
        parts, decodes = [], 0
        if batch.decodes is not None:
            decodes = batch.decodes.count
            partial = joined(self.decoded(queries[:decodes], kv, batch.decodes))
            parts.append(partial.finished().to(queries.dtype))
        for piece in batch.chunks:
            rows = slice(piece.begin, piece.end)
            parts.append(chunk(queries[rows], keys[rows], values[rows], kv, piece))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decoded(self, queries: Tensor, kv: Tensor, to: Decodes) -> Partial:
        """Of the decoding sequences, over the blocks that `kv` has."""
        return decode(queries, kv, to, self._scale)

    def _norm(self, x: Tensor, norm: Affine) -> Tensor:
        weight, bias = norm
        if bias is not None:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.config.eps)
        return rms_norm(x, weight, self._eps)

    def _activated(self, inner: Tensor) -> Tensor:
        if self.config.gated:
            gate, up = inner.chunk(2, -1)
            return _ACTIVATIONS[self.config.activation](gate).mul_(up)
        return _ACTIVATIONS[self.config.activation](inner)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """`x` over the root mean square of its last dimension, times `weight`.

    On a CPU, torch's own has more operations, and takes longer in float32.
    """
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight, float(eps))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x.float() * scale).mul_(weight).to(x.dtype)


def store(kv: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> None:
    """The new KV of every row, into its slot."""
    dim = kv.shape[-1]
    kv[0].view(-1, dim).index_copy_(0, batch.slots, keys.reshape(-1, dim))
    kv[1].view(-1, dim).index_copy_(0, batch.slots, values.reshape(-1, dim))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def unit_shape(decoder: Decoder, blocks: int, block_size: int) -> UnitShape:
    """Shape of a unit of that many blocks of a model."""
    c = decoder.config
    return UnitShape(c.layers, blocks, c.kv_heads, block_size, c.head_dim, decoder.dtype)


def fingerprint(decoder: Decoder) -> str:
    """Names a model by its configuration and a sample of its weights."""
    layer = decoder.weights.layers[0]
    sample = [decoder.weights.embed[:8], layer.qkv.dense()[:8].t(), decoder.weights.norm[0]]
    content = b"".join(t.float().cpu().contiguous().numpy().tobytes() for t in sample)
    return hashlib.sha256(repr(decoder.config).encode() + content).hexdigest()
