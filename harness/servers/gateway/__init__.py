"""Several servers behind one OpenAI-compatible address, with a router between."""

from .running import Plan, serving, serving_apart

__all__ = ["Plan", "serving", "serving_apart"]
