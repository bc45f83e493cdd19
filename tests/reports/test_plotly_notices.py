"""The notices of what plotly's bundle contains: complete, of its version, and in every copy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from slo_bench.reports.pages.document import asset, plotly_version
from slo_bench.reports.pages.run_page import write_report

ROOT = Path(__file__).parents[2]
BUNDLE, NOTICES = str(asset("plotly-basic.min.js")), str(asset("plotly-basic.LICENSE"))
_PACKAGE = re.compile(r"^(@?[\w./-]+) (\d[\d.]+)\n((?:  .+\n)+)", re.M)
PACKAGES = {name: (version, notice) for name, version, notice in _PACKAGE.findall(NOTICES)}


def test_notices_are_of_the_bundles_version_and_years():
    banner = BUNDLE[: BUNDLE.index("*/")]
    assert PACKAGES["plotly.js"][0] == plotly_version()
    for line in re.findall(r"(?:Copyright|Licensed|All rights).+", banner):
        assert line.rstrip(".") in NOTICES


def test_notices_name_every_package_of_the_bundles_comments():
    (comment,) = re.findall(r"/\*! Bundled license information:(.+?)\n\*/", BUNDLE, re.S)
    packages = re.findall(r"^((?:@[\w-]+/)?[\w.-]+)/\S+:$", comment, re.M)
    assert packages
    assert {*packages} <= PACKAGES.keys()
    for holder in re.findall(r"(?:\(c\)|@copyright \d+) (\w+ \w+)", comment):
        assert holder in NOTICES


def test_bundle_has_no_other_comment_that_claims_rights():
    rest = BUNDLE[BUNDLE.index("*/") : BUNDLE.index("/*! Bundled license information")]
    assert not re.search(r"@license|@preserve|/\*!|copyright \(c\)", rest, re.I)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_a_holder_and_a_licence_whose_text_is_there(package):
    *holders, licence = PACKAGES[package][1].splitlines()
    assert holders
    assert f"TEXT: {licence.removeprefix('  Licence: ')}\n" in NOTICES


@pytest.mark.parametrize(("plotly", "held"), [("inline", True), ("file", True), ("cdn", False)])
def test_page_that_holds_plotly_holds_its_notices(plotly, held, make_run, tmp_path):
    run = make_run(rates=(1.0,), seeds=1, requests=20)
    text = write_report([run], tmp_path / "page.html", plotly=plotly).read_text("utf-8")
    assert (f"<!--\n{NOTICES}-->" in text) is held


def test_wheel_has_the_notices():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "reports/pages/assets/plotly-basic.LICENSE" in project["license-files"]
    assert "-->" not in NOTICES
