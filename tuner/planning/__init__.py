"""Planning: the cheapest GPUs, their number, parallelism and settings that carry a load."""

from .offers import Offer
from .plan_search import (
    DeploymentPlan,
    PlanFigures,
    PlanOptions,
    SizedOffer,
    TargetLoad,
    plan_cheapest,
)
from .prices import PriceList, default_prices, read_prices

__all__ = [
    "DeploymentPlan",
    "Offer",
    "PlanFigures",
    "PlanOptions",
    "PriceList",
    "SizedOffer",
    "TargetLoad",
    "default_prices",
    "plan_cheapest",
    "read_prices",
]
