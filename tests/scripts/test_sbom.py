"""The SBOM of a release, and the versions that the checks and the container take."""

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture
def release(sbom, tmp_path):
    """A function of components that makes the SBOM and a wheel; arguments of the script."""

    def make(*components, without=""):
        bom = {"components": list(components)}
        (tmp_path / "x.cdx.json").write_text(json.dumps(bom))
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
            for path, *_ in sbom.PARTS:
                if path != without:
                    content = (ROOT / path).read_bytes()[:1000]
                    wheel.writestr(f"{sbom.PACKAGE}/{path}", content)
        return [str(tmp_path / "x.cdx.json"), str(tmp_path / "x.whl")]

    return make


def component(name, *licences):
    return {"name": name, "licenses": [{"license": {"id": licence}} for licence in licences]}


def test_sbom_gets_the_parts_of_others_in_the_wheel(sbom, release, capsys):
    arguments = release(component("numpy", "BSD-3-Clause"), component("pip", "MIT"))
    assert sbom.main(arguments) == 0
    components = json.loads(Path(arguments[0]).read_text())["components"]
    plotly = next(entry for entry in components if entry["name"].startswith("plotly.js"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", plotly["version"])
    assert components[0]["name"] == "numpy"
    assert "4 components in x.cdx.json, all with a licence" in capsys.readouterr().out


@pytest.mark.parametrize("licences", [(), ("GPL-3.0-only",), ("Proprietary",), ("MIT", "AGPL-3.0")])
def test_sbom_refuses_a_component_without_a_free_licence(sbom, release, licences, capsys):
    assert sbom.main(release(component("odd", *licences))) == 1
    assert "odd: " in capsys.readouterr().out


def test_sbom_needs_every_declared_part_in_the_wheel(sbom, release):
    with pytest.raises(KeyError):
        sbom.main(release(without=sbom.PARTS[1][0]))


def test_every_requirement_of_the_checks_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()[1:]
    versions = dict(line.split("==") for line in lines)
    versions = {canonicalize_name(name): version for name, version in versions.items()}
    for requirement in map(Requirement, texts):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier
