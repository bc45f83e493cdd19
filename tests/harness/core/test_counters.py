"""Counters of mechanisms: declared by policies, counted by hooks and by engines."""

import numpy as np
import pytest

from reference.settings import BESIDE, SEVERAL, TALKS
from slo_bench import Experiment
from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.records.request_records import Outcome, Records
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.results.mechanisms import overtook
from slo_bench.workloads.errors import UnknownNameError


def test_undeclared_counter_is_an_error():
    counters = Counters({"offloads": "…"})
    counters.add("offloads")
    counters.add("offloads")
    assert counters == {"offloads": 2}
    with pytest.raises(UnknownNameError, match="unknown mechanism 'offload'"):
        counters.add("offload")


def test_overtakes_count_requests_scheduled_before_older_ones():
    records = Records.empty(5)
    records.queued_s[:] = [0.0, 1.0, 2.0, 3.0, 4.0]
    records.first_scheduled_s[:] = [5.0, 4.0, 5.0, 1.0, np.nan]
    records.instance[:] = [0, 0, 0, 1, 0]
    records.outcome[:] = Outcome.FINISHED
    assert overtook(records).tolist() == [False, True, False, False, False]


def test_counts_of_an_own_policy_are_columns(tmp_path):
    (tmp_path / "counts.py").write_text(
        "from dataclasses import dataclass\n"
        "from slo_bench.policy import Policy\n\n"
        "@dataclass(frozen=True)\n"
        "class Counts(Policy):\n"
        "    def mechanisms(self):\n"
        "        return {'even': 'answers with an even number of tokens'}\n\n"
        "    def on_finished(self, r, view):\n"
        "        if r.output_tokens % 2 == 0:\n"
        "            view.counters.add('even', r)\n"
    )
    experiment = Experiment(
        systems=[str(tmp_path / "counts.py"), "vllm"], rates=[4.0], requests=60, seeds=1
    )
    result = experiment.run(tmp_path / "run")
    counts_row, vllm = result.rows()
    even = (result.requests(counts_row["cell"])["output_tokens"] % 2 == 0).sum()
    assert counts_row["count_even"] == even > 0
    assert vllm.get("count_even") is None


@pytest.mark.parametrize("name", SYSTEMS)
def test_counter_names_are_valid_column_names(name):
    for column, description in SYSTEMS[name].counters().items():
        assert column.startswith("count_")
        assert column.isidentifier()
        assert column == column.lower()
        assert description


ONE = {"slo": "ttft=1,tpot=0.15,e2e=30"}
UNDER_PRESSURE = [
    ("static-partition", 30.0, SEVERAL, {"quota_hits"}),
    ("qlm", 4.0, SEVERAL, {"model_swaps", "overtakes"}),
    ("ascendra", 36.0, ONE | {"instances": 3}, {"tickets", "offloads", "rescued", "overtakes"}),
    ("llumnix", 14.0, ONE | {"instances": 2, "num_gpu_blocks": 1500}, {"migrations"}),
    ("mooncake", 6.0, TALKS | {"instances": 2}, {"handovers", "store_hits"}),
    ("banaserve", 40.0, ONE | {"instances": 4}, {"handovers", "queue_routes"}),
    ("adaptivellm", 12.0, ONE | {"num_gpu_blocks": 1200}, {"swaps_chosen", "overtakes"}),
    ("collocation", 14.0, BESIDE | {"slo": "ttft=1; embed:e2e=3"}, {"deferrals", "rejections"}),
    ("edf-drop", 12.0, ONE | {"num_gpu_blocks": 1200}, {"drops"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate", "settings", "acting"), UNDER_PRESSURE)
def test_mechanism_counters_under_pressure_agree_with_records(
    tmp_path, name, rate, settings, acting
):
    settings = {"workload": "azure-conv"} | settings
    result = Experiment(systems=[name], rates=[rate], requests=300, seeds=1, **settings).run(
        tmp_path / "run"
    )
    [row] = result.rows()
    assert not {counter for counter in acting if not row[f"count_{counter}"]}
    requests = result.requests(row["cell"])
    if "drops" in acting:
        assert row["count_drops"] == (requests["outcome"] == "dropped").sum()
    if "offloads" in acting:
        moved = requests[requests["queued_s"] > requests["arrival_s"]]
        assert row["count_offloads"] == len(moved)
        in_time = moved["first_token_s"] - moved["arrival_s"] <= moved["ttft_slo_s"]
        assert row["count_rescued"] == in_time.sum()
