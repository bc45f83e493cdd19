"""`slo-bench backends check`: what moved in a server is named, by its own Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slo_bench.harness.servers.launch import check_hooks as checking
from slo_bench.harness.servers.launch import environments
from slo_bench.harness.servers.launch.environments import Environment


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A server without vLLM: all of it has moved."""
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    script = programs / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    found = Environment(tmp_path / "environment", "vllm", "9.9", "cpu")
    monkeypatch.setattr(environments, "environment", lambda name: found)
    return found


def test_what_is_gone_is_named(fake, slo_bench):
    code, out, _ = slo_bench("backends", "check", "vllm")
    assert code == 1
    assert "vllm-9.9-cpu: the plugin does not fit version" in out
    assert "vllm.v1.core.sched.scheduler:Scheduler.schedule is gone" in out


def test_a_server_that_cannot_be_imported(fake, slo_bench, monkeypatch):
    monkeypatch.setitem(checking._CODE, "vllm", "import no_such_server")
    code, _, err = slo_bench("backends", "check", "vllm")
    assert code == 2
    assert "vllm-9.9-cpu cannot be imported: ModuleNotFoundError" in err


@pytest.mark.backends
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_the_plugin_fits_the_installed_server(backend, installed, slo_bench):
    name = installed(backend).name
    code, out, err = slo_bench("backends", "check", backend)
    assert code == 0, out + err
    assert f"{name}: all " in out
