"""The page's table of fits beside operators is what the code computes."""

from pathlib import Path

import pytest

from slo_bench.predictors.operators.assembly import operator_step_time
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import fitted_pairs, step_time

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "step-time.md"
DECODES = ((1, 1000, ()), (32, 32_000, ()), (128, 128_000, ()), (32, 256_000, ()))
PROMPTS = ((0, 0, ((0, 512),)), (0, 0, ((0, 2048),)))


@pytest.mark.parametrize("pair", fitted_pairs(), ids=lambda pair: pair.label)
def test_table_of_fits_beside_operators_is_computed(pair):
    placement = Placement(model(pair.model), gpu(pair.gpu), tp=pair.tp)
    fit, operators = step_time(placement, 0.0), operator_step_time(placement, host_s=0.0)
    percents = [
        round(100 * (fit.model.step_s(*step) / operators.model.step_s(*step) - 1))
        for step in (*DECODES, *PROMPTS)
    ]
    cells = [f"{percent:+d} %".replace("-", "−") if percent else "0 %" for percent in percents]
    assert f"| {pair.label} | {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8")
