"""Prompts as the network and its TF-IDF part read them: token ids and numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .distribution import Ints

PAD_TO = 8  # tokens: lengths that recur are quicker, and padding costs
SIZES = 3  # numbers told of a prompt


@dataclass(frozen=True)
class Encoded:
    """Prompts as token ids and numbers: a text that several models are asked is read once.

    `ids` and `types` are of different texts, `place` (n,) says which one each prompt is, `about`
    has shape (n, sizes + models).
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    place: Ints
    about: np.ndarray

    def __len__(self) -> int:
        return len(self.place)

    def nameless(self) -> Encoded:
        """The same, where nobody says who will answer."""
        about = self.about.copy()
        about[:, SIZES:] = 0
        return replace(self, about=about)

    def batch(
        self, rows: Ints, device: str, *, pad_to: int = PAD_TO
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """The inputs of `Network` for these rows, padded to a multiple of `pad_to` tokens.

        One text alone is not padded and has no mask, which is quicker.
        """
        texts, place = np.unique(self.place[rows], return_inverse=True)
        alone = len(texts) == 1
        longest = max(len(self.ids[text]) for text in texts)
        width = longest if alone else -(-longest // pad_to) * pad_to
        ids = np.zeros((len(texts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        types = np.zeros_like(ids)
        for at, text in enumerate(texts):
            known = self.ids[text]
            ids[at, : len(known)] = known
            mask[at, : len(known)] = 1
            if self.types is not None:
                types[at, : len(known)] = self.types[text]
        return (
            torch.from_numpy(ids).to(device),
            None if alone else torch.from_numpy(mask).to(device),
            None if self.types is None else torch.from_numpy(types).to(device),
            torch.from_numpy(self.about[rows]).to(device),
            torch.from_numpy(place).to(device),
        )
