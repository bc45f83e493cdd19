"""`slo-bench init`: the file is the suite's experiment, and every default that it shows is true."""

from __future__ import annotations

import re
import tomllib

import pytest

from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.config.setting import declared
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.suite_files import suites


@pytest.mark.parametrize("suite", ["quickstart", "ascendra", "prism", "uellm"])
def test_init_file_equals_the_experiment_of_its_suite(slo_bench, tmp_path, suite):
    code, out, err = slo_bench("init", "mine.toml", "--suite", suite)
    assert code == 0, err
    assert "slo-bench run mine.toml" in out
    written = tomllib.loads((tmp_path / "mine.toml").read_text())
    of_suite = tomllib.loads(suites()[suite].read_text())
    empty = {"client": {}, "server": {}}
    assert empty | written == empty | of_suite
    assert Experiment.load(tmp_path / "mine.toml").schema == Experiment.load(suites()[suite]).schema


def test_init_file_has_every_setting_with_its_default(slo_bench, tmp_path):
    assert slo_bench("init")[0] == 0
    text = (tmp_path / "experiment.toml").read_text()
    for path, setting in declared(ExperimentSchema).items():
        assert re.search(rf"^(# )?{path.rpartition('.')[2]} = ", text, re.MULTILINE), path
        assert setting.help.split()[0] in text
    # What is shown behind # can be set as it stands.
    shown = re.sub(r"^# (\w+ = (?!…))", r"\1", text, flags=re.MULTILINE)
    shown = shown.replace("chunk_tokens = [512, 2048]", "")
    (tmp_path / "all.toml").write_text(shown)
    everything, default = (
        Experiment.load(tmp_path / f).schema for f in ("all.toml", "experiment.toml")
    )
    assert everything == default


def test_init_refuses_to_overwrite_a_file(slo_bench, tmp_path):
    (tmp_path / "experiment.toml").write_text("mine")
    code, _, err = slo_bench("init")
    assert code == 2
    assert "experiment.toml exists" in err
    assert (tmp_path / "experiment.toml").read_text() == "mine"
    code, _, err = slo_bench("init", "b.toml", "--suite", "ascendar")
    assert code == 2
    assert "ascendra" in err
