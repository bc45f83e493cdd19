"""How a trained predictor errs, by the bucket of the true length.

`confusion.toml` holds what LoRA on all-MiniLM-L6-v2 told of prompts that were kept back from its
training, written by `scripts/pack_confusion.py`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import numpy as np

from .distribution import Floats

_PRIOR = 10.0  # errors that each bucket borrows from those of all buckets


@cache
def measured_confusion() -> Floats:
    """Answers by the bucket of their length (row) and of the median that was told (column)."""
    text = files(__package__).joinpath("confusion.toml").read_text("utf-8")
    return np.array(tomllib.loads(text)["confusion"], dtype=np.float64)


@cache
def error_shares() -> Floats:
    """Shares of the buckets that a wrong prediction names, by the true one.

    Shape (buckets, buckets); rows sum to 1, the diagonal is 0. Few long answers were kept back, so
    each row also has ten errors that are as far off as those of all buckets.
    """
    counts = measured_confusion()
    size = len(counts)
    np.fill_diagonal(wrong := counts.copy(), 0)
    by_distance = [np.trace(wrong, offset=off) for off in range(1 - size, size)]
    far = np.array([by_distance[size - 1 - row : 2 * size - 1 - row] for row in range(size)])
    errors = wrong + _PRIOR * far / far.sum(axis=1, keepdims=True)
    found: Floats = errors / errors.sum(axis=1, keepdims=True)
    return found
