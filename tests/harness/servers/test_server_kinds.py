"""The registry of servers, and that nothing but their rooms and it names a server."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

import slo_bench
from slo_bench.harness.servers import server_kinds as registry
from slo_bench.harness.servers.server_kinds import LAUNCHED, SERVERS, server_kind, servers_with
from slo_bench.predictors.operators.server_version import NEWEST
from slo_bench.workloads.errors import SloBenchError

ROOT = Path(slo_bench.__file__).parent
# All that is known of a server, and what runs inside; policies that are named as a server is; and
# what was measured of one.
OF_SERVERS = (
    *("harness/servers/vllm", "harness/servers/sglang", "harness/servers/torch"),
    *("harness/policies", "harness/validation/accuracy", "predictors/operators"),
)
ALLOWED = {
    "harness/servers/server_kinds.py": "the registry",
    "harness/servers/mock/mock_answers.py": "metrics that the mock server has as vLLM",
    "harness/experiments/config/tables.py": "the result format of `vllm bench serve`",
    "harness/load_generator/listed_models.py": "what SGLang calls a model's folder",
    "workloads/readers/formats.py": "a trace format",
    "workloads/extras.py": "extras of the package",
}
SYSTEMS_BY_DEFAULT = {"harness/experiments/config/schema.py", "cli/commands/sensitivity.py"}


def test_files_that_name_a_server_are_its_rooms_and_few_others():
    def names_one(path: Path) -> bool:
        source = path.read_text("utf-8")
        if not re.search(r"[\"'](vllm|sglang)[\"':]", source):  # parsing takes longer
            return False
        literals = (
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        return any(text in LAUNCHED or text.startswith(("vllm:", "sglang:")) for text in literals)

    folders = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {path.relative_to(ROOT).as_posix() for path in files if names_one(path)}
    elsewhere = {path for path in named if not path.startswith(OF_SERVERS)}
    assert elsewhere == set(ALLOWED) | SYSTEMS_BY_DEFAULT
    assert len(ALLOWED) <= 6


def test_simulated_servers_are_of_the_versions_that_are_installed():
    for name in LAUNCHED:
        assert server_kind(name).builds["cuda"].version.startswith(NEWEST[name])


def test_modules_that_kinds_name_are_there():
    for kind in registry.server_kinds().values():
        points = [kind.plugin.value] if kind.plugin else []
        for point in filter(None, (*points, kind.introduce)):
            assert find_spec(point.partition(":")[0]), point


def test_servers_with_an_attribute_are_those_whose_kind_has_it():
    assert servers_with("speculative_args") == ("vllm",)
    assert servers_with("kv_offload_args") == ("vllm", "sglang")
    assert servers_with("executes_controllers") == ("torch",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:KIND", "cannot be loaded: ModuleNotFoundError"),
        ("json:NOTHING", "cannot be loaded: AttributeError"),
        ("json:dumps", "json:dumps is not the ServerKind of new but <function"),
        ("slo_bench.harness.servers.vllm.vllm_kind:VLLM", "is not the ServerKind of new"),
    ],
)
def test_entry_point_that_is_no_kind_of_its_name_is_refused(monkeypatch, value, message):
    entry = EntryPoint("new", value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setitem(registry._ENTRIES, "new", entry)
    with pytest.raises(SloBenchError, match=message):
        server_kind("new", ("new",))


def test_unknown_server_is_refused_with_the_names_of_the_known():
    with pytest.raises(SloBenchError, match="unknown backend 'none'; known: sglang, torch, vllm"):
        server_kind("none")
    with pytest.raises(SloBenchError, match="unknown backend 'torch'"):
        server_kind(SERVERS[-1], LAUNCHED)


BROKEN = """
import sys
from slo_bench.harness.servers.launch.server_kind import ServerKind

if __name__ == "leaves":
    sys.exit(3)
KIND = ServerKind(name="bare", title="Bare")
"""
ENTRIES = {  # entry of the group: what is said of it
    "left = leaves:KIND": "server left (leaves:KIND) cannot be loaded: SystemExit: 3",
    "bare = bare:KIND": "bare:KIND has no builds, so that it cannot be started",
    "twice = bare:KIND": "several packages add server twice: bare:KIND, leaves:KIND",
    "vllm = bare:KIND": "server vllm (bare:KIND) is left out: the name is one of slo-bench's",
    "simulated = bare:KIND": "server simulated (bare:KIND) is left out: the name is one of "
    "slo-bench's",
}


def test_broken_servers_of_other_packages_are_named_and_left_out_elsewhere(tmp_path):
    for module in ("leaves", "bare"):
        (tmp_path / f"{module}.py").write_text(BROKEN)
    for name, entries in {"a": ENTRIES, "b": ["twice = leaves:KIND"]}.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(["[slo_bench.servers]", *entries])
        (info / "entry_points.txt").write_text(lines)
    code = (
        "import json\n"
        "from slo_bench.harness.policies.systems import SYSTEMS\n"
        "from slo_bench.harness.servers import server_kinds as registry\n"
        "from slo_bench.harness.servers.launch.compatibility import compatibility_of\n"
        "print(json.dumps([registry.server_problems(), list(registry.server_kinds()),\n"
        "    list(compatibility_of(SYSTEMS['edf']))]))\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout
    problems, kinds, backends = json.loads(printed)
    assert sorted(problems) == sorted(ENTRIES.values())
    assert kinds == ["vllm", "sglang", "torch"]
    assert backends == ["simulated", *kinds]
