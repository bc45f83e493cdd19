"""Earliest deadline first; who cannot be in time any more is dropped before it begins.

Source: dropping late work is what Clockwork does (Gujarati et al., OSDI 2020, §4.4), here in
iterations of vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.policy import knob
from .edf import EarliestDeadlineFirst
from .shared.timeouts import DropsHopeless


@dataclass(frozen=True)
class EdfDrop(DropsHopeless, EarliestDeadlineFirst):
    """A request leaves when even an empty server could no longer prefill it by the moment it is
    due.

    `caution` scales the predicted prefill time: above 1 drops earlier, 0 drops at that moment.
    """

    caution: float = knob(1.0, 0.0, 10.0)
