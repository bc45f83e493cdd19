"""SLO-DBS: the variant of SLO-ODBS that looks at SLOs only (w2 = 0).

Source: UELLM, §3.4.3, which swaps the names of its two variants; they are used here as the
abbreviations read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import parameter
from .slo_odbs import SloOdbs


@dataclass(frozen=True)
class SloDbs(SloOdbs):
    """Algorithm 3-1 with the term T_l alone."""

    output_weight: float = parameter(0.0, choices=(0.0,))
