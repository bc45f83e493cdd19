"""Tuning: which parameters, instances, placement and server settings serve an objective best?

>>> from slo_bench import Experiment
>>> from slo_bench.tuner.search.settings import TuneSettings
>>> from slo_bench.tuner.search.tune import tune
>>> found = tune(Experiment(systems="sarathi"), TuneSettings(trials=20))  # doctest: +SKIP

Optuna proposes configurations, keeps them in its storage and weighs what mattered; what a
configuration is worth is found by the project's own capacity search and levels.
"""
