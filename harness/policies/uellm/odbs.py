"""ODBS: the variant of SLO-ODBS that looks at predicted answers only (w1 = 0).

Source: UELLM, §3.4.3, which swaps the names of its two variants; they are used here as the
abbreviations read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import parameter
from .slo_odbs import SloOdbs


@dataclass(frozen=True)
class Odbs(SloOdbs):
    """Algorithm 3-1 with T_o alone, on requests sorted by predicted answer.

    Line 1 would sort by SLO here too, which groups no lengths: the authors' code sorts by the
    weighted sum, which is the length where w1 = 0. The batch built first, of the shortest answers,
    goes first.
    """

    slo_weight: float = parameter(0.0, choices=(0.0,))
    sort_by: str = parameter("weighted", choices=("weighted", "slo"))
    batch_order: str = parameter("built", choices=("built", "tightest-slo"))
