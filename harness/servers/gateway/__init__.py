"""Several servers behind one OpenAI-compatible address, with a router between."""

from .running_gateway import GatewayPlan, mechanism_counts, serving, serving_apart

__all__ = ["GatewayPlan", "mechanism_counts", "serving", "serving_apart"]
