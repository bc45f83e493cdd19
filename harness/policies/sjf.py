"""Shortest job first in static batches, by predicted output length.

Source: a baseline of UELLM (§3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.counters import OVERTAKES
from ..core.policy import StaticPolicy, parameter
from ..core.state import RequestState
from ..core.view import View


@dataclass(frozen=True)
class ShortestJobFirst(StaticPolicy):
    """The `max_batch` requests with the shortest predicted answers, of equals the oldest."""

    uses_predicted_lengths: ClassVar[bool] = True

    max_batch: int = parameter(32, 1, 4096, log=True)

    def mechanisms(self) -> dict[str, str]:
        return {OVERTAKES: "requests that began before older ones"}

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        return sorted(waiting, key=view.predict.output_tokens)[: self.max_batch]
