"""What a gateway knows of a request from its body."""

from __future__ import annotations

import math

import pytest

from slo_bench.harness.core.wire import waited_s
from slo_bench.harness.servers.gateway.states import prompt_tokens, state_of


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": "a" * 41}, 11),
        ({"prompt": ["a" * 40, "b" * 40]}, 20),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"messages": [{"role": "user", "content": "a" * 8}, {"content": "b" * 4}]}, 3),
        ({"messages": [{"content": [{"type": "text", "text": "a" * 8}]}]}, 2),
        ({"input": "abcd"}, 1),
        ({"prompt": None}, 1),
        ({}, 1),
    ],
)
def test_prompt_tokens_are_counted_or_estimated(body, tokens):
    assert prompt_tokens(body) == tokens


def test_slo_bounds_count_from_the_arrival():
    wire = {"ttft_slo_s": 0.5, "deadline_in_s": 9.0, "waited_s": 2.0}
    r = state_of({"prompt": [1], "max_tokens": 7, "vllm_xargs": wire}, 3, 10.0)
    assert (r.id, r.arrival_s, r.output_tokens) == (3, 8.0, 7)
    assert (r.slo.ttft_s, r.slo.deadline_s, r.slo.tpot_s) == (0.5, 17.0, math.inf)
    assert state_of({"vllm_xargs": "no object"}, 1, 10.0).arrival_s == 10.0


@pytest.mark.parametrize("waited", [None, "2", True, -1.0, math.nan, math.inf])
def test_malformed_waited_s_counts_as_zero(waited):
    assert waited_s({"waited_s": waited}) == 0.0
