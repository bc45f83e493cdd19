"""`slo-bench backends check`: what moved in a server is named, by its own Python."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slo_bench.harness.servers.launch import check_hooks as checking
from slo_bench.harness.servers.launch.environments import Environment
from slo_bench.harness.servers.vllm.vllm_kind import VLLM
from slo_bench.workloads.errors import SloBenchError


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A server without vLLM: all of it has moved."""
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    script = programs / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    fake_environment = Environment(tmp_path / "environment", "vllm", "9.9", "cpu")
    monkeypatch.setattr(checking, "environment", lambda name: fake_environment)
    return fake_environment


def test_backends_check_names_missing_targets(fake, slo_bench):
    code, out, _ = slo_bench("backends", "check", "vllm")
    assert code == 1
    assert "vllm-9.9-cpu: the plugin does not fit version" in out
    assert "vllm.v1.core.sched.scheduler:Scheduler.schedule is gone" in out


def test_backends_check_of_a_server_that_cannot_be_imported(fake, slo_bench, monkeypatch):
    kind = dataclasses.replace(VLLM, hooks=ModuleType("no_such_server"))
    monkeypatch.setattr(Environment, "kind", kind)
    code, _, err = slo_bench("backends", "check", "vllm")
    assert code == 2
    assert "vllm-9.9-cpu cannot be imported: ModuleNotFoundError" in err


def test_backends_check_of_a_server_without_a_plugin(fake, slo_bench, monkeypatch):
    monkeypatch.setattr(Environment, "kind", dataclasses.replace(VLLM, hooks=None))
    code, _, err = slo_bench("backends", "check", "vllm")
    assert code == 2
    assert "no plugin runs in vLLM" in err


def test_backends_check_fetches_a_version_not_installed(fake, slo_bench, monkeypatch):
    def none(name):
        raise SloBenchError(f"{name} is not installed")

    def put(beside, version, folder):
        (folder / "vllm").mkdir()
        (folder / "vllm" / "__init__.py").write_text("")

    monkeypatch.setattr(checking, "environment", none)
    code, _, err = slo_bench("backends", "check", "vllm==9.8")
    assert code == 2
    assert "vllm==9.8 is not installed" in err
    monkeypatch.setattr(checking, "installed", lambda: [fake])
    monkeypatch.setattr(checking, "fetch_server", put)
    code, out, _ = slo_bench("backends", "check", "vllm==9.8")
    assert code == 1
    assert "vllm==9.8 with the packages of vllm-9.9-cpu: the plugin does not fit version 9.8" in out


# Of vLLM the newest release, which has no build for CPU, and the last but one; of SGLang the one
# before the newest. The installed ones are tested below.
@pytest.mark.backends
@pytest.mark.weekly
@pytest.mark.parametrize("server", ["vllm==0.33.0", "vllm==0.31.0", "sglang==0.5.22"])
def test_plugin_fits_other_releases(server, installed, slo_bench):
    installed(server.partition("==")[0])
    code, out, err = slo_bench("backends", "check", server)
    assert code == 0, out + err
    assert f"{server} with the packages of " in out


@pytest.mark.backends
@pytest.mark.weekly  # .ci/run checks them itself
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_plugin_fits_the_installed_server(backend, installed, slo_bench):
    name = installed(backend).name
    code, out, err = slo_bench("backends", "check", backend)
    assert code == 0, out + err
    assert f"{name}: all " in out
