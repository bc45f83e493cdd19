"""Longest job first in static batches, by predicted output length.

Source: a baseline of UELLM (§3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.state import RequestState
from ..core.view import View
from .sjf import ShortestJobFirst


@dataclass(frozen=True)
class LongestJobFirst(ShortestJobFirst):
    """The `max_batch` requests with the longest predicted answers, of equals the oldest."""

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        longest_first = sorted(waiting, key=lambda r: -view.predict.output_tokens(r))
        return longest_first[: self.max_batch]
