"""Several servers behind one OpenAI-compatible address, with a router between."""

from .running import GatewayPlan, serving, serving_apart

__all__ = ["GatewayPlan", "serving", "serving_apart"]
