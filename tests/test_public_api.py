"""What `slo_bench` and `slo_bench.policy` offer, and that every name has an example which runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import slo_bench
from slo_bench import policy

EXPERIMENTS = {
    "CapacityOptions",
    "CapacityResult",
    "Experiment",
    "Request",
    "RunResult",
    "SloBenchError",
    "TuneSettings",
    "TargetLoad",
    "Workload",
    "__version__",
    "compare",
    "load_source",
    "parse_slo",
    "plan_cheapest",
    "PlanOptions",
    "plotly_figures",
    "policy",
    "read_results",
    "search_capacity",
    "suites",
    "tune",
    "write_csv",
    "write_report",
}
POLICIES = {
    "Action",
    "Admission",
    "Beside",
    "Bounds",
    "ClusterPolicy",
    "ClusterView",
    "Collocated",
    "EmbedView",
    "MultiModelCluster",
    "ServedModel",
    "RouteOutcome",
    "Key",
    "Timeout",
    "Limits",
    "Line",
    "Links",
    "Phase",
    "PhaseCapacity",
    "Placement",
    "Policy",
    "PreemptionMode",
    "Predictions",
    "Queue",
    "NextQueue",
    "Release",
    "RequestState",
    "Role",
    "Routed",
    "Router",
    "SharingPolicy",
    "Instance",
    "Slo",
    "StaticPolicy",
    "ModelInstance",
    "UNLIMITED",
    "View",
    "ReleaseReason",
    "parameter",
}
NO_EXAMPLE = {"__version__", "policy"}
NO_DOCSTRING = {*NO_EXAMPLE, "Key", "UNLIMITED"}  # a type and a number


def names_in_examples(module: ModuleType) -> set[str]:
    """The names that the examples of a module's docstring use."""
    assert module.__doc__ is not None
    return {
        node.id
        for example in doctest.DocTestParser().get_examples(module.__doc__)
        for node in ast.walk(ast.parse(textwrap.dedent(example.source)))
        if isinstance(node, ast.Name)
    }


def test_public_names_are_those_of_the_list():
    assert set(policy.__all__) == POLICIES
    assert set(slo_bench.__all__) == EXPERIMENTS | POLICIES
    assert set(slo_bench.__all__) <= set(dir(slo_bench))


@pytest.mark.parametrize(
    ("module", "names"), [(slo_bench, EXPERIMENTS), (policy, POLICIES)], ids=["top", "policy"]
)
def test_public_names_have_docstring_and_example(module, names):
    undocumented = [n for n in names - NO_DOCSTRING if not inspect.getdoc(getattr(module, n))]
    assert not undocumented
    assert names - names_in_examples(module) - NO_EXAMPLE <= {"CapacityResult"}  # what is returned


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policy_names_are_exported_at_the_top_level(name):
    assert getattr(slo_bench, name) is getattr(policy, name)


@pytest.mark.slow
@pytest.mark.parametrize("module", [slo_bench, policy], ids=["top", "policy"])
def test_docstring_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(module, extraglobs={"folder": tmp_path})
    assert found.attempted > 10
    assert not found.failed


def test_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = slo_bench.nonsense
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = policy.nonsense


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import slo_bench", {"numpy", "pandas", "pydantic", "optuna"}),
        ("from slo_bench.policy import Policy, View, parameter", {"pandas", "pydantic", "optuna"}),
    ],
    ids=["bare import", "policy"],
)
def test_import_brings_no_heavy_packages(statement, unwanted):
    """A policy of one instance is imported inside a server, which has none of them."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not unwanted & set(ran.stdout.split())


@pytest.mark.parametrize("folder", ["docs", "examples"])
def test_pages_and_examples_import_public_names_only(folder):
    root = Path(slo_bench.__file__).parent
    pages = [p for p in (root / folder).rglob("*") if p.suffix in (".md", ".py")]
    if folder == "docs":
        pages += [root / "README.md", root / "CONTRIBUTING.md"]
    deep = [
        f"{page.relative_to(root)}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if line.strip().startswith(("from slo_bench.", "import slo_bench."))
        and not line.strip().startswith("from slo_bench.policy import")
    ]
    assert not deep
