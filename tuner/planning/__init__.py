"""Which GPUs, how many and set how carry a load at the least cost."""

from .offers import Offer
from .search import DeploymentPlan, SizedOffer, TargetLoad, plan_cheapest

__all__ = ["DeploymentPlan", "Offer", "SizedOffer", "TargetLoad", "plan_cheapest"]
