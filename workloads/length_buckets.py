"""Buckets of answer lengths: [0, 8), [8, 16), [16, 32), …, [1024, 2048), and whatever is longer.

Source: UELLM, Eq. 3-1, which has no bucket for longer answers.
"""

from __future__ import annotations

from bisect import bisect_right

BUCKET_EDGES: tuple[int, ...] = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
OVERFLOW_END = 4096  # the last bucket is represented as if it doubled like the others
_ENDS = (*BUCKET_EDGES[1:], OVERFLOW_END)


def bucket_of(tokens: int) -> int:
    """The index of the bucket that holds a length of at least 0."""
    return bisect_right(BUCKET_EDGES, tokens) - 1


def bucket_middle_tokens(bucket: int) -> int:
    """The length that stands for a bucket (the representative value of Eq. 3-2)."""
    return (BUCKET_EDGES[bucket] + _ENDS[bucket]) // 2


def bucket_last_tokens(bucket: int) -> int:
    """The longest length in a bucket."""
    return _ENDS[bucket] - 1
