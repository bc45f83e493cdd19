"""What a calibrated profile says of itself, and how its factors act on other step times."""

from __future__ import annotations

import pytest

from slo_bench.predictors.placement import Placement
from slo_bench.predictors.profiles.calibration import Calibration
from slo_bench.predictors.profiles.scope import Scope, verdict
from slo_bench.predictors.profiles.whole_steps import made_of
from slo_bench.predictors.scaled import calibrated
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time

SCOPE = Scope("vllm-0.19", "2026-10-01", (2.0, 8.0), (50.0, 900.0), None, (1.0, 40.0))


def test_use_within_the_scope_has_no_line():
    assert SCOPE.beyond({"rate_rps": (2.0, 8.5), "output_tokens": (1.0, 9e9)}, "vllm-0.19") == []


def test_each_use_beyond_the_scope_is_named_beside_it():
    uses = {"rate_rps": (1.0, 4.0), "prompt_tokens": (60.0, 4000.0), "concurrency": (2.0, 50.0)}
    assert SCOPE.beyond(uses, "vllm-0.11") == [
        "vllm-0.11 (vllm-0.19)",
        "1 to 4 req/s (2 to 8)",
        "prompts of 60 to 4,000 tokens (50 to 900)",
        "2 to 50 requests at once (1 to 40)",
    ]


@pytest.mark.parametrize(
    ("errors", "begin"),
    [
        ({"ttft": 1.21, "tpot": 0.4}, "good to ± 1.3 % (TTFT), ± 0.4 % (TPOT) for these loads (2"),
        ({"ttft": 41.0}, "not to be relied on, off by up to ± 41 % (TTFT)"),
        ({}, "how good it is was not judged"),
        ({"steps": 0.5}, "how good it is was not judged"),
    ],
)
def test_verdict_says_the_errors_and_the_loads(errors, begin):
    assert verdict(errors, SCOPE).startswith(begin)


@pytest.mark.parametrize("rates", [[8.0, 2.0], [-1.0, 2.0], [1.0], "ab"])
def test_scope_of_no_range_is_refused(rates):
    with pytest.raises(ValueError, match=r"rate_rps|unpack|convert"):
        Scope.read({"rate_rps": rates})


def test_scope_of_an_unknown_server_is_refused():
    with pytest.raises(ValueError, match="server of the scope: unknown engine 'foo'"):
        Scope.read({"server": "foo-1"})


def test_factors_act_on_whole_steps_where_there_are_no_tables():
    factors = Calibration((), (1.0, 512.0), (1.5, 0.5))
    for bare in (
        step_time(Placement(model("llama-3.1-8b"), gpu("a100-80g"))).model,
        made_of({"decode_s": 0.01, "prefill_s": 0.02}),
    ):
        scaled = calibrated(bare, factors)
        assert scaled.step_s(1, 16, ()) == pytest.approx(1.5 * bare.step_s(1, 16, ()))
        assert scaled.span_s(1, 16, 5) == pytest.approx(1.5 * bare.span_s(1, 16, 5))
        chunk = [(0, 512)]
        assert scaled.step_s(0, 0, chunk) == pytest.approx(0.5 * bare.step_s(0, 0, chunk))
        assert scaled.steps_within(1, 16, scaled.span_s(1, 16, 7)) == 7
        assert calibrated(bare, Calibration((), (1.0,), (1.0,))) is bare
