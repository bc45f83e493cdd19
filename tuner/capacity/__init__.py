"""The capacity of a system: the highest rate at which its requests meet their objectives.

>>> from slo_bench import Experiment
>>> from slo_bench.tuner.capacity.folder import search_capacity
>>> search_capacity(Experiment(systems="sarathi", seeds=5)).rows()  # doctest: +SKIP

`find_capacity` searches anything that can be offered a rate (`LevelRunner`).
"""

from __future__ import annotations

from .options import Budget, Capacity, CapacitySearch, SearchOptions
from .samples import LevelRunner, LevelSample, sample_of
from .search import find_capacity

__all__ = [
    "Budget",
    "Capacity",
    "CapacitySearch",
    "LevelRunner",
    "LevelSample",
    "SearchOptions",
    "find_capacity",
    "sample_of",
]
