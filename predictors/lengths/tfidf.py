"""A linear model of tokens and pairs of tokens, which the network's distribution is blended with.

It errs elsewhere than the network does, takes seconds to fit and next to nothing to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .distribution import Floats, Ints
from .encoded import Encoded

_FEWEST = 2  # prompts that a token or pair must stand in
_LOOSENESS = 2.0  # inverse of what weights are punished with
_ABSENT = -14.0  # log odds of buckets that no answer fell into
_PAIR = 1 << 24  # more than any vocabulary has: a pair's key is first · this + second
_MOST = 1e9  # of a weight
PREFIX = "words/"  # of its tensors' names


@dataclass(frozen=True)
class Words:
    """Multinomial logistic regression on TF-IDF of token ids and on a prompt's numbers.

    `keys` (terms,) rise; `rarity` (terms,) is each one's inverse document frequency; `weights` has
    shape (terms + numbers, buckets), `bias` (buckets,).
    """

    keys: Ints
    rarity: NDArray[np.float32]
    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def fit(cls, encoded: Encoded, true: Ints, buckets: int) -> Words:
        """Of prompts and the buckets that their answers fell into, two different ones at least."""
        import scipy.sparse as sparse
        from sklearn.linear_model import LogisticRegression

        found = [np.unique(_terms(ids)) for ids in encoded.ids]
        keys, rows = np.unique(np.concatenate(found), return_counts=True)
        often = rows >= _FEWEST
        keys, rows = keys[often], rows[often]
        rarity = (np.log((1 + len(found)) / (1 + rows)) + 1).astype(np.float32)
        each = [_weighted(ids, keys, rarity) for ids in encoded.ids]
        values = np.concatenate([value for _, value in each])
        places = np.concatenate([at for at, _ in each])
        ends = np.cumsum([0, *(len(at) for at, _ in each)])
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
            at, value = _weighted(ids, self.keys, self.rarity)
            odds[text] = value @ self.weights[at]
        numbers = encoded.about @ self.weights[terms:] + self.bias
        both = odds[encoded.place].astype(np.float64) + numbers
        likely = np.exp(both - both.max(axis=1, keepdims=True))
        found: Floats = likely / likely.sum(axis=1, keepdims=True)
        return found

    def tensors(self) -> dict[str, NDArray[Any]]:
        """What is kept of it, by name."""
        return {f"{PREFIX}{name}": value for name, value in vars(self).items()}

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, NDArray[Any]], *, numbers: int, buckets: int
    ) -> Words:
        """What `tensors` gave, of prompts with so many numbers beside their tokens.

        Raises:
            ValueError: they are others.
        """
        found = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
        terms = len(found["keys"]) if "keys" in found and found["keys"].ndim == 1 else 0
        wanted = {
            "keys": ((terms,), "int64"),
            "rarity": ((terms,), "float32"),
            "weights": ((terms + numbers, buckets), "float32"),
            "bias": ((buckets,), "float32"),
        }
        if not terms or {n: (v.shape, v.dtype.name) for n, v in found.items()} != wanted:
            raise ValueError("the words are of another network than predictor.json")
        numbers_of = (found["rarity"], found["weights"], found["bias"])
        if not all((np.abs(values) < _MOST).all() for values in numbers_of):
            raise ValueError("the words have weights that nobody learns")
        if not (np.diff(found["keys"]) > 0).all():
            raise ValueError("the words do not rise")
        return cls(**found)


def _terms(ids: Sequence[int]) -> Ints:
    """Keys of the tokens and of the pairs that stand side by side."""
    single = np.asarray(ids, dtype=np.int64)
    return np.concatenate([single, (single[:-1] + 1) * _PAIR + single[1:]])


def _weighted(
    ids: Sequence[int], keys: Ints, rarity: NDArray[np.float32]
) -> tuple[Ints, NDArray[np.float32]]:
    """Places in `keys` of a prompt's terms, and their TF-IDF: 1 + log(count), of length one."""
    terms, counts = np.unique(_terms(ids), return_counts=True)
    at = np.minimum(np.searchsorted(keys, terms), len(keys) - 1)
    known = keys[at] == terms
    at = at[known]
    value = ((1 + np.log(counts[known])) * rarity[at]).astype(np.float32)
    return at, value / max(float(np.linalg.norm(value)), 1e-9)
