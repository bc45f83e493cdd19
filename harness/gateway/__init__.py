"""Several servers behind one OpenAI-compatible address, with a router between."""

from .running import Plan, serving

__all__ = ["Plan", "serving"]
