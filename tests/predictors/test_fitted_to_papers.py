"""The list of constants fitted to papers agrees with the code and with the papers' pages."""

import re
from pathlib import Path

import pytest

from slo_bench.predictors import activation
from slo_bench.predictors.fitted_to_papers import FITTED_TO_PAPERS, fitted_to
from slo_bench.tuner.placement.topology import named_topology

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("constant", FITTED_TO_PAPERS, ids=lambda constant: constant.quantity)
def test_listed_constant_exists_in_its_file(constant):
    assert (ROOT / constant.where).is_file()
    assert (ROOT / "docs" / "papers" / f"{constant.paper}.md").is_file()


def test_listed_values_equal_those_of_the_code():
    extra_s = named_topology("uellm-table-2-1").devices[1].layer_extra_s
    assert [constant.value for constant in fitted_to("uellm")] == [pytest.approx(1000 * extra_s)]
    listed = {constant.value for constant in fitted_to("prism")}
    assert {activation.NAIVE_ENGINE_S, activation.LOAD_LINKS} < listed
    assert len(listed) == 5


def test_every_constant_of_the_activation_model_is_listed():
    """Each upper-case number of `predictors/activation.py` was fitted."""
    text = (ROOT / "predictors" / "activation.py").read_text()
    assert len(re.findall(r"^[A-Z_]+ = ", text, re.M)) == len(fitted_to("prism"))
