"""The list of constants fitted to papers agrees with the code and with the papers' pages."""

import re
from pathlib import Path

import pytest

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.predictors import activation
from slo_bench.predictors.device_map import read_device_map
from slo_bench.predictors.fitted_to_papers import FITTED_TO_PAPERS, fitted_to
from slo_bench.tuner.placement.topology import named_topology

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("constant", FITTED_TO_PAPERS, ids=lambda constant: constant.quantity)
def test_listed_constant_exists_in_its_file(constant):
    assert (ROOT / constant.where).is_file()
    assert (ROOT / "docs" / "papers" / f"{constant.paper}.md").is_file()


def test_listed_values_equal_those_of_the_code():
    values = {constant.where: constant.value for constant in fitted_to("uellm")}
    for name in ("uellm-table-2-1", "uellm"):
        extra_s = named_topology(name).devices[1].layer_extra_s
        assert values[f"tuner/placement/topologies/{name}.toml"] == pytest.approx(1000 * extra_s)
    slower = read_device_map("uellm-even-s3").stages[1].layer_extra_s
    assert values["predictors/device_maps/uellm-even-s3.json"] == pytest.approx(1000 * slower)
    stressed = read_device_map("uellm-morphling-197s")
    assert values["predictors/device_maps/uellm-morphling-197s.json"] == stressed.ready_s


def test_uellm_suites_have_the_host_time_and_answers_that_are_listed():
    listed = {constant.quantity: constant.value for constant in fitted_to("uellm")}
    for name in ("uellm", "uellm-tuned", "uellm-deploy", "uellm-large-batches", "uellm-maps"):
        experiment = Experiment.suite(name)
        assert experiment.host_s[0] == pytest.approx(listed["Host time of a step"] * 1e-3)
        assert "lognormal(median=169,sigma=0.55," in experiment.output_tokens[0]
    listed = {constant.value for constant in fitted_to("prism")}
    assert {activation.NAIVE_ENGINE_S, activation.LOAD_LINKS} < listed
    assert len(listed) == 5


def test_every_constant_of_the_activation_model_is_listed():
    """Each upper-case number of `predictors/activation.py` was fitted."""
    text = (ROOT / "predictors" / "activation.py").read_text()
    assert len(re.findall(r"^[A-Z_]+ = ", text, re.M)) == len(fitted_to("prism"))
