"""A level whose requests were computed on KV that had been given up must not be used."""

from __future__ import annotations

from slo_bench.harness.experiments.backends.launched import _expired_problem
from slo_bench.harness.servers.server_kinds import server_kind

LINE = 'vllm:nixl_num_kv_expired_reqs_total{{engine="0"}} {}\n'


def test_expired_kv_is_summed_over_all_servers():
    names = server_kind("vllm").metrics
    before = [names.totals(LINE.format(1.0)), names.totals("vllm:generation_tokens_total 9\n")]
    after = [names.totals(LINE.format(n)) for n in (3.0, 1.0)]
    assert _expired_problem(names, before, before) is None
    problem = _expired_problem(names, before, after)
    assert problem == "the KV of 3 prompts expired before a decode instance fetched it"
