"""Planning: the cheapest GPUs, their number, parallelism and settings that carry a load."""

from .offers import Offer
from .search import DeploymentPlan, SizedOffer, TargetLoad, plan_cheapest

__all__ = ["DeploymentPlan", "Offer", "SizedOffer", "TargetLoad", "plan_cheapest"]
