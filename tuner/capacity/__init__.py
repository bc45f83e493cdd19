"""The capacity of a system: the highest rate at which its requests meet their objectives.

>>> from slo_bench import Experiment
>>> from slo_bench.tuner.capacity.folder import search_capacity
>>> search_capacity(Experiment(systems="sarathi", seeds=5)).rows()  # doctest: +SKIP

`search.find_capacity` searches anything that can be offered a rate (`samples.LevelRunner`).
"""
