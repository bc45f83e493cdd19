"""Embeddings from encoders of the BERT family: one pass over a batch of texts, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .decoder_config import modules_of
from .encoder_config import read_encoder
from .load_decoder import check_room, torch_device
from .model_tensors import Checkpoint
from .torch_errors import ModelError

Affine = tuple[Tensor, Tensor]  # weight [out, in] or [hidden], bias


@dataclass(frozen=True)
class _Layer:
    qkv: Affine
    out: Affine
    norm: Affine
    up: Affine
    down: Affine
    last_norm: Affine


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
        self._modules = modules_of(config.family)
        self._root = root = checkpoint.root(self._modules)
        self._shapes = dict(config.tensors(root, ()))
        self._device = place
        modules = self._modules
        self._words = self._get(f"{root}{modules.tokens}.weight")
        places = self._get(f"{root}{modules.positions[0]}.weight")
        # Every text is of the first kind: what that adds is added to the positions, once.
        kinds = self._get(f"{root}{modules.token_types}.weight")
        self._places = places + kinds[0]
        self._norm = self._affine(f"{root}{modules.norm}")
        self._layers = [self._layer(number) for number in range(config.layers)]

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

    def _layer(self, number: int) -> _Layer:
        names = self._modules
        prefix = f"{self._root}{names.layers}.{number}."
        self._shapes.update(self.config.tensors(self._root, (number,)))
        projections = [self._affine(f"{prefix}{name}") for name in names.qkv]
        [up] = names.up
        return _Layer(
            qkv=(torch.cat([w for w, _ in projections]), torch.cat([b for _, b in projections])),
            out=self._affine(f"{prefix}{names.out}"),
            norm=self._affine(f"{prefix}{names.attention_norm}"),
            up=self._affine(f"{prefix}{up}"),
            down=self._affine(f"{prefix}{names.down}"),
            last_norm=self._affine(f"{prefix}{names.mlp_norm}"),
        )

    def _affine(self, module: str) -> Affine:
        return self._get(f"{module}.weight"), self._get(f"{module}.bias")

    def _get(self, name: str) -> Tensor:
        return self._checkpoint.get(name, self._shapes[name])
