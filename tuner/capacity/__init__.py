"""The capacity of a system: the highest rate at which its requests meet their objectives."""

from __future__ import annotations

from .search import Budget, Capacity, CapacitySearch, SearchOptions, find_capacity

__all__ = ["Budget", "Capacity", "CapacitySearch", "SearchOptions", "find_capacity"]
