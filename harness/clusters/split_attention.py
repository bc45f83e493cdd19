"""Attention whose keys and values lie on two devices: split by heads, or along the sequence.

Source: BanaServe (docs/papers.md), Eq. 4-4 to 4-8, which mix the two.

Shapes: q is (heads, queries, dim); k and v are (heads, keys, dim); all queries see all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the keys, and the log of the sum of exponentials of its scores."""

    out: Array  # (heads, queries, dim)
    log_sum: Array  # (heads, queries)


def attend(q: Array, k: Array, v: Array) -> Part:
    """softmax(q k^T / sqrt(dim)) v, head by head; over no keys: nothing, with log-sum -inf."""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - safe)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_sum = (np.log(total) + safe)[..., 0]
    return Part(weights @ v / np.where(total > 0, total, 1.0), log_sum)


def joined_heads(here: Array, there: Array) -> Array:
    """Outputs of two disjoint sets of heads: put side by side, nothing is summed."""
    return np.concatenate([here, there], axis=0)


def joined_sequence(here: Part, there: Part) -> Array:
    """Outputs of the same heads over two disjoint sets of keys: each weighs what its scores sum to.

    That needs both log-sums, where Eq. 4-6 sends the first only.
    """
    log_sum = np.logaddexp(here.log_sum, there.log_sum)
    return (
        here.out * np.exp(here.log_sum - log_sum)[..., None]
        + there.out * np.exp(there.log_sum - log_sum)[..., None]
    )
