"""What a server had cached that the workload does not share."""

import numpy as np
import pytest

from slo_bench.harness.load_generator.http import HttpOptions
from slo_bench.harness.load_generator.http.columns import RequestColumns
from slo_bench.harness.load_generator.warm_cache import (
    CacheCounters,
    given_prompts,
    shared_tokens,
    warm_cache_share,
)

OPTIONS = HttpOptions()


def columns(n, *, prompt=-1, cached=-1):
    made = RequestColumns.empty(n)
    made.sent_s[:] = 0.0
    made.prompt_tokens[:] = prompt
    made.cached_tokens[:] = cached
    return made


def test_blocks_of_several_requests_are_shared_and_those_of_one_are_not(workload):
    blocks = [(1, 2), (1, 3), (4, 5)]
    shared = shared_tokens(workload(3, prefix_blocks=blocks, prefix_block_size=4), OPTIONS)
    assert shared.tolist() == [4, 4, 0]


def test_of_continued_and_given_prompts_all_may_be_shared(workload):
    asked = workload(3, follows=np.array([-1, 0, -1]), texts=[None, None, "x"])
    assert shared_tokens(asked, OPTIONS).tolist() == [0, 8, 8]
    assert given_prompts(asked, OPTIONS).tolist() == [False, False, True]
    assert given_prompts(asked, HttpOptions(body={"prompt": "x"})).all()


def test_usage_gives_the_share_beyond_the_workload_and_the_chat_template(workload):
    assert warm_cache_share(
        workload(4), OPTIONS, columns(4, prompt=8, cached=6), CacheCounters()
    ) == pytest.approx(0.75)
    template = columns(4, prompt=20, cached=12)  # 12 tokens are not the workload's
    assert warm_cache_share(workload(4), OPTIONS, template, CacheCounters()) == 0.0


def test_metrics_give_the_share_where_answers_do_not(workload):
    before = CacheCounters.read(['vllm:prefix_cache_hits_total{engine="0"} 100\n'])
    after = CacheCounters.read(['vllm:prefix_cache_hits_total{engine="0"} 124\n'])
    share = warm_cache_share(workload(4), OPTIONS, columns(4), after.since(before))
    assert share == pytest.approx(24 / 32)
    assert before.since(after).cached_tokens is None  # the server began anew
    rate = CacheCounters.read(["sglang:cache_hit_rate 0.5\n"])
    assert warm_cache_share(workload(4), OPTIONS, columns(4), rate.since(rate)) == 0.5


def test_nothing_is_known_of_a_silent_server_or_of_several_answers_to_a_prompt(workload):
    assert warm_cache_share(workload(4), OPTIONS, columns(4), CacheCounters()) is None
    several = HttpOptions(body={"n": 2})
    known = columns(4, prompt=8, cached=6)
    assert warm_cache_share(workload(4), several, known, CacheCounters()) is None
