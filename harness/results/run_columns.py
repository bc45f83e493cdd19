"""Columns of the tables of a run folder. Needs no pandas: what starts a run knows them, too."""

from __future__ import annotations

from collections.abc import Mapping

from ...workloads.request import SLO_COLUMNS

TEXT_COLUMNS = ("cell", "system", "backend", "workload", "model", "gpu", "step_time")
"""Columns of cells.csv that hold words. Sweep axes are kept as the words in the file, too."""

REASON_COLUMN = "invalid_because"
"""Why a measured cell must not be used; only cells on real servers have it."""

FAULT_COLUMN = "fault_detail"
"""What was said of a failed request; only cells on real servers have it."""

TOKENIZER_COLUMN = "prompt_tokenizer"
"""Folder of the tokenizer of generated prompts; only cells on real servers have it."""

API_COLUMN = "api"
"""API that requests were sent to, as chosen or by a probe; only cells on real servers have it."""

WARM_CACHE_COLUMN = "warm_cache_share"
"""Share of prompt tokens that a server had cached before though the workload does not share them;
only cells on real servers have it."""

NUMBER_COLUMNS = (
    "gpus",
    "rate_rps",
    "seed",
    "requests",
    "attainment",
    "goodput_rps",
    *(
        f"{latency}_{statistic}_s"
        for latency in ("ttft", "tpot")
        for statistic in ("p50", "p90", "p99", "mean")
    ),
    "makespan_s",
    "throughput_rps",
    "output_tokens_per_s",
    "cost_usd_per_hour",
)
"""Number columns the report cannot do without; any other that parses as numbers is welcome."""

LEAD_COLUMNS = (*TEXT_COLUMNS[:6], "gpus", "rate_rps", "replay_speed", "load_factor", "seed")
"""Columns before `requests`; any other column there is a sweep axis."""

REQUEST_COLUMNS = (
    "arrival_s",
    *SLO_COLUMNS.values(),
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "outcome",
    "output_tokens",
    "slo_met",
)
"""The columns of a request file that the report needs; the others are never parsed."""

REQUEST_TYPE_COLUMN = "request_type"
"""1 for a request that embeds texts, and has no first token; runs without such lack the column."""

OPTIONAL_COLUMNS: Mapping[str, float | str] = {
    REQUEST_TYPE_COLUMN: 0.0,
    "role": "",
    "queued_s": float("nan"),
    "transfer_s": 0.0,
    "untimed_tokens": 1.0,
}
"""Only runs that need them have these; `role` is that of the instance that served, `queued_s` when
the request had come to the instance where it first entered a batch: by default when it arrived;
`transfer_s` the time between two instances; `untimed_tokens` output tokens that have no part in
TPOT."""

TIMESERIES_COLUMNS = ("time_s", "metric", "entity", "value")

TIMELINE_COLUMNS = ("time_s", "waiting", "running", "kv_cache_usage")
