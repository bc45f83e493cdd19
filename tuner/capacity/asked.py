"""What a capacity search is asked, beside the experiment."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...harness.experiments.config.setting import Several, setting

SEARCH = "How it is searched"
SIMULATED_REQUESTS, REAL_REQUESTS = 2000, 300  # of a run, at least
SIMULATED_BUDGET = 120_000  # requests of a search
REAL_BUDGET_S = 3600.0
SEEDS = 3


class CapacityOptions(BaseModel):
    """What is searched for, where the experiment does not say. None: see `search_capacity`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Several[float] = setting(
        SEARCH,
        "Share of requests in SLO. May be repeated.",
        (0.9, 0.99),
        option="--target",
        metavar="SHARE",
        repeated=True,
    )
    tolerance: float = setting(
        SEARCH, "Stop when the interval is ± that share of the estimate.", 0.03, metavar="SHARE"
    )
    max_requests: int | None = setting(
        SEARCH,
        f"Spend no more on one configuration. Default: {SIMULATED_BUDGET:,}, on a real server no "
        "limit.",
    )
    max_time_s: float | None = setting(
        SEARCH,
        f"Run no longer on one configuration. Default: {REAL_BUDGET_S:g} on a real server.",
        unit="s",
    )
    warm_start: Path | None = setting(
        SEARCH, "Begin where an earlier search of a similar configuration ended.", metavar="DIR"
    )
