"""A linear model of tokens and pairs of tokens, which the network's distribution is blended with.

It errs on other prompts than the network, takes seconds to fit and almost no time to apply.

Both read prompts as token ids and numbers (`Encoded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...workloads.arrays import Floats, Ints

PAD_TO = 8  # tokens: lengths that recur are quicker, and padding costs
SIZES = 3  # numeric features of a prompt


@dataclass(frozen=True)
class Encoded:
    """Prompts as token ids and numbers: the text of a prompt for several models is encoded once.

    `ids` and `types` are of different texts, `place` (n,) is the text of each prompt, `about` has
    shape (n, sizes + models).
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    place: Ints
    about: np.ndarray

    def __len__(self) -> int:
        return len(self.place)

    def nameless(self) -> Encoded:
        """A copy without the names of the models that answer."""
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
        for row, text in enumerate(texts):
            tokens = self.ids[text]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            if self.types is not None:
                types[row, : len(tokens)] = self.types[text]
        return (
            torch.from_numpy(ids).to(device),
            None if alone else torch.from_numpy(mask).to(device),
            None if self.types is None else torch.from_numpy(types).to(device),
            torch.from_numpy(self.about[rows]).to(device),
            torch.from_numpy(place).to(device),
        )


_FEWEST = 2  # prompts that a token or pair must stand in
_LOOSENESS = 2.0  # inverse of what weights are punished with
_ABSENT = -14.0  # log odds of buckets that no answer fell into
_PAIR = 1 << 24  # more than any vocabulary has: a pair's key is first · this + second
_MOST = 1e9  # of a weight
PREFIX = "words/"  # of its tensors' names


@dataclass(frozen=True)
class TfIdfClassifier:
    """Multinomial logistic regression on TF-IDF of token ids and on a prompt's numbers.

    `keys` (terms,) rise; `rarity` (terms,) is each one's inverse document frequency; `weights` has
    shape (terms + numbers, buckets), `bias` (buckets,).
    """

    keys: Ints
    rarity: NDArray[np.float32]
    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def fit(cls, encoded: Encoded, true: Ints, buckets: int) -> TfIdfClassifier:
        """Of prompts and the buckets that their answers fell into, two different ones at least."""
        import scipy.sparse as sparse
        from sklearn.linear_model import LogisticRegression

        term_sets = [np.unique(_terms(ids)) for ids in encoded.ids]
        keys, rows = np.unique(np.concatenate(term_sets), return_counts=True)
        often = rows >= _FEWEST
        keys, rows = keys[often], rows[often]
        rarity = (np.log((1 + len(term_sets)) / (1 + rows)) + 1).astype(np.float32)
        each = [_weighted(ids, keys, rarity) for ids in encoded.ids]
        values = np.concatenate([value for _, value in each])
        places = np.concatenate([positions for positions, _ in each])
        ends = np.cumsum([0, *(len(positions) for positions, _ in each)])
        terms = sparse.csr_matrix((values, places, ends), shape=(len(each), len(keys)))
        x = sparse.hstack([terms[encoded.place], sparse.csr_matrix(encoded.about)]).tocsr()
        fitted = LogisticRegression(C=_LOOSENESS, max_iter=200).fit(x, true)
        weights = np.zeros((x.shape[1], buckets), dtype=np.float32)
        bias = np.full(buckets, _ABSENT, dtype=np.float32)
        # Of two buckets there is one set of weights: the odds of the second.
        present = fitted.classes_ if len(fitted.classes_) > 2 else fitted.classes_[1:]
        bias[fitted.classes_] = 0
        weights[:, present] = fitted.coef_.T
        bias[present] = fitted.intercept_
        return cls(keys, rarity, weights, bias)

    def probabilities(self, encoded: Encoded) -> Floats:
        """Of each bucket, shape (n, buckets)."""
        terms = len(self.keys)
        odds = np.empty((len(encoded.ids), len(self.bias)), dtype=np.float32)
        for text, ids in enumerate(encoded.ids):
            positions, value = _weighted(ids, self.keys, self.rarity)
            odds[text] = value @ self.weights[positions]
        numbers = encoded.about @ self.weights[terms:] + self.bias
        both = odds[encoded.place].astype(np.float64) + numbers
        likely = np.exp(both - both.max(axis=1, keepdims=True))
        shares: Floats = likely / likely.sum(axis=1, keepdims=True)
        return shares

    def tensors(self) -> dict[str, NDArray[Any]]:
        """What is kept of it, by name."""
        return {f"{PREFIX}{name}": value for name, value in vars(self).items()}

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, NDArray[Any]], *, numbers: int, buckets: int
    ) -> TfIdfClassifier:
        """Restore a model from the result of `tensors`, for prompts with `numbers` numeric
        features.

        Raises:
            ValueError: the tensors have other shapes.
        """
        arrays = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
        terms = len(arrays["keys"]) if "keys" in arrays and arrays["keys"].ndim == 1 else 0
        expected = {
            "keys": ((terms,), "int64"),
            "rarity": ((terms,), "float32"),
            "weights": ((terms + numbers, buckets), "float32"),
            "bias": ((buckets,), "float32"),
        }
        if not terms or {n: (v.shape, v.dtype.name) for n, v in arrays.items()} != expected:
            raise ValueError("TF-IDF arrays must have the shapes that predictor.json implies")
        numbers_of = (arrays["rarity"], arrays["weights"], arrays["bias"])
        if not all((np.abs(values) < _MOST).all() for values in numbers_of):
            raise ValueError("TF-IDF weights must be finite and below the limit")
        if not (np.diff(arrays["keys"]) > 0).all():
            raise ValueError("TF-IDF keys must ascend")
        return cls(**arrays)


def _terms(ids: Sequence[int]) -> Ints:
    """Keys of the tokens and of the pairs that stand side by side."""
    single = np.asarray(ids, dtype=np.int64)
    return np.concatenate([single, (single[:-1] + 1) * _PAIR + single[1:]])


def _weighted(
    ids: Sequence[int], keys: Ints, rarity: NDArray[np.float32]
) -> tuple[Ints, NDArray[np.float32]]:
    """Places in `keys` of a prompt's terms, and their TF-IDF: 1 + log(count), of length one."""
    terms, counts = np.unique(_terms(ids), return_counts=True)
    positions = np.minimum(np.searchsorted(keys, terms), len(keys) - 1)
    matches = keys[positions] == terms
    positions = positions[matches]
    value = ((1 + np.log(counts[matches])) * rarity[positions]).astype(np.float32)
    return positions, value / max(float(np.linalg.norm(value)), 1e-9)
