"""Which GPUs, how many and set how carry a load at the least cost."""

from .offers import Offer
from .search import Carried, Planned, Wanted, plan_cheapest

__all__ = ["Carried", "Offer", "Planned", "Wanted", "plan_cheapest"]
