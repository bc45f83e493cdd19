"""Tuning: the best parameters, instances, placement and server settings for an objective.

>>> from slo_bench import Experiment
>>> from slo_bench.tuner.search.settings import TuneSettings
>>> from slo_bench.tuner.search.tuning_run import tune
>>> found = tune(Experiment(systems="sarathi"), TuneSettings(trials=20))  # doctest: +SKIP

Optuna proposes configurations, stores the trials and computes the importance of each dimension. The
project's own capacity search and runs at a rate evaluate a configuration.
"""
