"""Whether a system looks at predicted lengths is what users are told: it must be true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slo_bench.harness.core.policy import StaticPolicy
from slo_bench.harness.core.predictions import ModelledPredictions
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.workloads.workload import Workload

# What must be set for it to look.
PARAMETERS = {"prism-queue": {"victim": "slack"}}


def crowd(n=60):
    """More than memory holds, with every kind of SLO."""
    rng = np.random.default_rng(3)
    return Workload(
        np.arange(n) * 0.5,
        rng.integers(8, 60, n),
        rng.integers(2, 90, n),
        e2e_slo_s=rng.uniform(20, 200, n),
    )


@pytest.mark.parametrize("name", [n for n, s in SYSTEMS.items() if s.sharing is None])
def test_systems_that_declare_predicted_lengths_read_them(name, serve, monkeypatch):
    calls = []
    for hook in ("output_tokens", "output_tokens_p90"):
        original = getattr(ModelledPredictions, hook)
        monkeypatch.setattr(
            ModelledPredictions,
            hook,
            lambda self, r, original=original: calls.append(r) or original(self, r),
        )
    system = SYSTEMS[name].with_parameters(**PARAMETERS.get(name, {}))
    if system.cluster is not None:
        system = dataclasses.replace(system, cluster=None)
    reserves = isinstance(system.policy, StaticPolicy)
    serve(crowd(), system, num_gpu_blocks=40 if not reserves else 200)
    assert bool(calls) == system.policy.uses_predicted_lengths
