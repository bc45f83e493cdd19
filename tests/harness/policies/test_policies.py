"""What every policy keeps to: frozen parameters within bounds, a named source, light imports."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys

import pytest

from slo_bench.harness import policies
from slo_bench.harness.core.policy import Bounds, Policy, StaticPolicy
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.workloads.errors import SloBenchError

ALL = [m.name for m in pkgutil.walk_packages(policies.__path__, policies.__name__ + ".")]
POLICIES = [
    value
    for name in ALL
    for value in vars(importlib.import_module(name)).values()
    if isinstance(value, type)
    and issubclass(value, Policy | StaticPolicy)
    and value.__module__ == name
]


MODULES = sorted({policy.__module__ for policy in POLICIES})
# Fields that no user sets: the cluster or the placement does.
OF_THE_CONTROLLER = {"worst_batch_tokens", "layers", "store_s_per_token"}


def test_every_stock_system_has_a_policy_of_this_folder():
    assert {type(s.policy) for s in SYSTEMS.values()} <= set(POLICIES)


@pytest.mark.parametrize("module", MODULES)
def test_policy_docstring_names_its_source(module):
    text = importlib.import_module(module).__doc__
    assert "Source: " in text


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.__name__)
def test_policy_is_a_frozen_dataclass(policy):
    assert policy.__doc__
    assert policy.__dataclass_params__.frozen
    default = policy()
    name = dataclasses.fields(default)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(default, name, getattr(default, name))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.__name__)
def test_policy_parameters_have_ranges_that_work(policy):
    """Every field is a parameter with a range, its default inside; the ends of the range work."""
    default = policy()
    bounds = policy.bounds()
    assert set(bounds) | OF_THE_CONTROLLER >= {f.name for f in dataclasses.fields(default)}
    for name, b in bounds.items():
        value = getattr(default, name)
        b.check(name, value)
        if b.choices:
            ends = b.choices
        elif b.file:
            ends = ("",)
        else:
            assert b.low < b.high
            assert b.low > 0 or not b.log
            ends = (type(value)(b.low), type(value)(b.high))
        for end in ends:
            assert getattr(default.with_parameters(**{name: end}), name) == end


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.__name__)
def test_bad_parameters_are_refused_by_name(policy):
    """Beyond either end (negative weights, wrong signs), no number, a list, half of a whole one."""
    for name, b in policy.bounds().items():
        bad = [None, [], ()]
        if b.choices:
            bad += ["neither", -7]
        elif not b.file:
            bad += ["", "many", float("nan"), float("inf"), -float("inf"), b.low - 1, b.high * 2]
            bad += [b.low + 0.5] if b.whole else []
        for value in bad:
            with pytest.raises(SloBenchError, match=rf"{policy.__name__}\.{name} must be"):
                policy(**{name: value})


def test_bounds_may_be_open_on_one_side():
    Bounds(low=0).check("x", 10**9)
    with pytest.raises(SloBenchError, match="x must be from 0 to None but is -1"):
        Bounds(low=0).check("x", -1)


# Third-party modules but numpy cannot be imported; then everything that a server's process needs.
LIGHT = """
import importlib, pkgutil, sys
before = set(sys.modules)

class OnlyNumpy:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "slo_bench"):
            raise ImportError(f"{name} is not allowed here")

sys.meta_path.insert(0, OnlyNumpy())
import slo_bench.harness.core, slo_bench.harness.policies
for package in (slo_bench.harness.core, slo_bench.harness.policies):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
allowed = ("slo_bench.workloads", "slo_bench.predictors", "slo_bench.harness.core",
           "slo_bench.harness.policies")
packages = ("slo_bench", "slo_bench.harness")
for name in sorted(set(sys.modules) - before):
    top = name.partition(".")[0]
    own = name in packages or name.startswith(allowed)
    if not (own or top == "numpy" or top in sys.stdlib_module_names):
        print(name)
"""


def test_core_and_policies_need_only_numpy():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
