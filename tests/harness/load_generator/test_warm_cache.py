"""What a server had cached that the workload does not share."""

import numpy as np
import pytest

from slo_bench.harness.load_generator.http import HttpOptions
from slo_bench.harness.load_generator.http.http_options import PromptFormat
from slo_bench.harness.load_generator.http.request_columns import RequestColumns
from slo_bench.harness.load_generator.warm_cache import (
    CacheCounters,
    given_prompts,
    repeated_prompts,
    shared_tokens,
    warm_cache_share,
)
from slo_bench.harness.servers.server_kinds import metrics_by_server

OPTIONS = HttpOptions()
SERVERS = metrics_by_server()


def columns(n, *, prompt=-1, cached=-1):
    request_columns = RequestColumns.empty(n)
    request_columns.sent_s[:] = 0.0
    request_columns.prompt_tokens[:] = prompt
    request_columns.cached_tokens[:] = cached
    return request_columns


def test_blocks_of_several_requests_are_shared_and_those_of_one_are_not(workload):
    blocks = [(1, 2), (1, 3), (4, 5)]
    shared = shared_tokens(workload(3, prefix_blocks=blocks, prefix_block_size=4), OPTIONS)
    assert shared.tolist() == [4, 4, 0]


def test_of_continued_and_given_prompts_all_may_be_shared(workload):
    load = workload(3, follows=np.array([-1, 0, -1]), texts=[None, None, "x"])
    assert shared_tokens(load, OPTIONS).tolist() == [0, 8, 8]
    assert given_prompts(load, OPTIONS).tolist() == [False, False, True]
    assert given_prompts(load, HttpOptions(body={"prompt": "x"})).all()


def test_prompts_that_come_again_in_a_run_are_counted(workload):
    texts = ["x", "y", "x", None, None, "x"]
    bodies = [None, None, {"messages": [1]}, {"messages": [1]}, {"messages": [1]}, None]
    load = workload(6, texts=texts, bodies=bodies)
    assert repeated_prompts(load, OPTIONS) == 2  # of rows 3 and 0
    assert repeated_prompts(workload(6), OPTIONS) == 0
    turns = workload(4, texts=["x", "go on", "y", "go on"], follows=np.array([-1, 0, -1, 2]))
    assert repeated_prompts(turns, OPTIONS) == 0  # each continues another answer


def test_usage_gives_the_share_beyond_the_workload_and_the_chat_template(workload):
    assert warm_cache_share(
        workload(4), OPTIONS, columns(4, prompt=8, cached=6), CacheCounters()
    ) == pytest.approx(0.75)
    template = columns(4, prompt=20, cached=12)  # 12 tokens are not the workload's
    assert warm_cache_share(workload(4), OPTIONS, template, CacheCounters()) == 0.0


def test_metrics_give_the_share_where_answers_do_not(workload):
    before = CacheCounters.read(
        ['vllm:prefix_cache_hits_total{engine="0"} 100\n'], metrics_by_server()
    )
    after = CacheCounters.read(
        ['vllm:prefix_cache_hits_total{engine="0"} 124\n'], metrics_by_server()
    )
    share = warm_cache_share(workload(4), OPTIONS, columns(4), after.since(before))
    assert share == pytest.approx(24 / 32)
    assert before.since(after).cached_tokens is None  # the server began anew


def test_metrics_count_a_token_once_under_two_names_and_in_repeated_lookups(workload):
    page = "".join(
        f"vllm:{gpu}prefix_cache_{name}_total {tokens}\n"
        for gpu in ("", "gpu_")
        for name, tokens in (("hits", 32), ("queries", 128))
    )
    counters = CacheCounters.read([page], SERVERS)
    assert (counters.cached_tokens, counters.looked_up_tokens) == (32, 128)
    assert warm_cache_share(workload(4), OPTIONS, columns(4), counters) == 0.25
    template = columns(4, prompt=16)  # 8 of 16 tokens are all prompts'
    assert warm_cache_share(workload(4), OPTIONS, template, counters) == 0.0


def test_metrics_say_nothing_of_a_workload_that_shares_prompts(workload):
    load = workload(2, prefix_blocks=[(1, 2), (1, 3)], prefix_block_size=4)
    assert warm_cache_share(load, OPTIONS, columns(2), CacheCounters(cached_tokens=99)) is None


def test_an_answer_without_a_cached_count_beside_others_has_cached_nothing(workload):
    some = columns(4, prompt=8)
    some.cached_tokens[0] = 8
    assert warm_cache_share(workload(4), OPTIONS, some, CacheCounters()) == 0.25


def test_texts_may_begin_with_the_same_words_by_chance(workload):
    texts = HttpOptions(prompt_format=PromptFormat.TEXT)
    begin = columns(4, prompt=8, cached=3)
    assert warm_cache_share(workload(4), texts, begin, CacheCounters()) == 0.0


def test_nothing_is_known_of_a_silent_server_or_of_several_answers_to_a_prompt(workload):
    assert warm_cache_share(workload(4), OPTIONS, columns(4), CacheCounters()) is None
    several = HttpOptions(body={"n": 2})
    cached_columns = columns(4, prompt=8, cached=6)
    assert warm_cache_share(workload(4), several, cached_columns, CacheCounters()) is None
