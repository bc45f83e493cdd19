"""Embeddings from encoders of the BERT family: one pass over a batch of texts, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ....workloads.parsing import parse_json
from .decoder_config import read_fields
from .load_decoder import check_room, torch_device
from .model_tensors import Checkpoint
from .torch_errors import ModelError

ENCODERS = ("bert", "roberta", "xlm-roberta")
_PREFIXES = ("", "bert.", "roberta.")

Affine = tuple[Tensor, Tensor]  # weight [out, in] or [hidden], bias


@dataclass(frozen=True)
class EncoderConfig:
    """`offset`: where positions begin. `pooling`: `cls` or `mean`."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    positions: int
    kinds: int
    eps: float
    offset: int
    pooling: str

    @property
    def context(self) -> int:
        """Maximum number of tokens of a text."""
        return self.positions - self.offset


@dataclass(frozen=True)
class _Layer:
    qkv: Affine
    out: Affine
    norm: Affine
    up: Affine
    down: Affine
    last_norm: Affine


def read_encoder(folder: Path) -> EncoderConfig:
    """The encoder in a folder.

    Raises:
        ModelError: it is none of the BERT family, or has a feature that is not supported.
    """
    fields = read_fields(folder)
    kind = fields.get("model_type")
    if kind not in ENCODERS:
        raise ModelError(
            f"{folder} is a model of type {kind!r}; backend torch embeds with {', '.join(ENCODERS)}"
        )
    if fields.get("hidden_act", "gelu") != "gelu":
        raise ModelError(f"{folder}: the activation {fields['hidden_act']!r} is not supported")
    if fields.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{folder}: only absolute positions are supported")
    try:
        padding = int(fields.get("pad_token_id") or 0)
        return EncoderConfig(
            layers=int(fields["num_hidden_layers"]),
            hidden=int(fields["hidden_size"]),
            heads=int(fields["num_attention_heads"]),
            inner=int(fields["intermediate_size"]),
            vocab=int(fields["vocab_size"]),
            positions=int(fields["max_position_embeddings"]),
            kinds=int(fields.get("type_vocab_size", 2)),
            eps=float(fields.get("layer_norm_eps", 1e-12)),
            offset=0 if kind == "bert" else padding + 1,
            pooling=_pooling(folder),
        )
    except KeyError as error:
        raise ModelError(f"{folder}/config.json lacks the field {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{folder}/config.json: {error}") from None


def _pooling(folder: Path) -> str:
    """As a sentence-transformers folder says it; else the mean."""
    file = folder / "1_Pooling" / "config.json"
    pooling = parse_json(file.read_text("utf-8")) if file.is_file() else {}
    cls = isinstance(pooling, dict) and pooling.get("pooling_mode_cls_token")
    return "cls" if cls else "mean"


class Encoder:
    """An encoder that is loaded.

    Raises:
        ModelError: its folder has no such model, or its weights are not whole.
        DoesNotFitError: the device has no room for them.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.config = config = read_encoder(folder)
        place = torch_device(device)
        needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        check_room(needed, place, f"the weights of {folder.name}")
        self._checkpoint = checkpoint = Checkpoint(folder, torch.float32, place)
        roots = (p for p in _PREFIXES if f"{p}embeddings.word_embeddings.weight" in checkpoint)
        self._root = next(roots, "")
        self._device = place
        prefix = "embeddings."
        self._words = self._get(f"{prefix}word_embeddings.weight", config.vocab, config.hidden)
        places = self._get(f"{prefix}position_embeddings.weight", config.positions, config.hidden)
        # Every text is of the first kind: what that adds is added to the positions, once.
        kinds = self._get(f"{prefix}token_type_embeddings.weight", config.kinds, config.hidden)
        self._places = places + kinds[0]
        self._norm = self._affine(f"{prefix}LayerNorm", config.hidden)
        self._layers = [self._layer(f"encoder.layer.{n}.") for n in range(config.layers)]

    def embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, hidden], of length one each; `texts` are token ids, special ones included.

        Raises:
            ModelError: a text is empty or too long.
        """
        lengths = [len(text) for text in texts]
        if not lengths or min(lengths) < 1 or max(lengths) > self.config.context:
            raise ModelError(
                f"texts must have from 1 to {self.config.context} tokens, but they have "
                f"{min(lengths, default=0)} to {max(lengths, default=0)}"
            )
        with torch.inference_mode():
            states = self._states([token for text in texts for token in text], lengths)
            parts = states.split(lengths)
            if self.config.pooling == "cls":
                pooled = torch.stack([part[0] for part in parts])
            else:
                pooled = torch.stack([part.mean(0) for part in parts])
            return F.normalize(pooled, dim=-1)

    def _states(self, tokens: list[int], lengths: Sequence[int]) -> Tensor:
        config = self.config
        ids = torch.tensor(tokens, device=self._device)
        places = torch.cat([torch.arange(n, device=self._device) for n in lengths]) + config.offset
        x = self._normed(F.embedding(ids, self._words) + self._places[places], self._norm)
        for layer in self._layers:
            x = self._normed(
                x + F.linear(self._attended(x, layer, lengths), *layer.out), layer.norm
            )
            inner = F.gelu(F.linear(x, *layer.up))
            x = self._normed(x + F.linear(inner, *layer.down), layer.last_norm)
        return x

    def _attended(self, x: Tensor, layer: _Layer, lengths: Sequence[int]) -> Tensor:
        heads = F.linear(x, *layer.qkv).view(len(x), 3, self.config.heads, -1)
        parts = []
        for part in heads.split(list(lengths)):
            q, k, v = part.permute(1, 2, 0, 3).unsqueeze(1)
            parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return torch.cat(parts).reshape(len(x), -1)

    def _normed(self, x: Tensor, norm: Affine) -> Tensor:
        return F.layer_norm(x, (self.config.hidden,), *norm, self.config.eps)

    def _layer(self, prefix: str) -> _Layer:
        config = self.config
        projections = [
            self._affine(f"{prefix}attention.self.{name}", config.hidden, config.hidden)
            for name in ("query", "key", "value")
        ]
        return _Layer(
            qkv=(torch.cat([w for w, _ in projections]), torch.cat([b for _, b in projections])),
            out=self._affine(f"{prefix}attention.output.dense", config.hidden, config.hidden),
            norm=self._affine(f"{prefix}attention.output.LayerNorm", config.hidden),
            up=self._affine(f"{prefix}intermediate.dense", config.inner, config.hidden),
            down=self._affine(f"{prefix}output.dense", config.hidden, config.inner),
            last_norm=self._affine(f"{prefix}output.LayerNorm", config.hidden),
        )

    def _affine(self, name: str, wide: int, *narrow: int) -> Affine:
        return self._get(f"{name}.weight", wide, *narrow), self._get(f"{name}.bias", wide)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.get(f"{self._root}{name}", shape)
