"""Settings of a capacity search that are not settings of the experiment."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...harness.experiments.config.setting import Several, setting

SEARCH = "Search"
SIMULATED_REQUESTS, REAL_REQUESTS = 2000, 300  # of a run, at least
SIMULATED_BUDGET = 120_000  # requests of a search
SIMULATED_BUDGET_HORIZONS = 300.0  # or those that arrive in so many horizons of a long SLO
REAL_BUDGET_S = 3600.0
SEEDS = 3


class CapacityOptions(BaseModel):
    """Settings of a capacity search. None: the default of `search_capacity`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Several[float] = setting(
        SEARCH,
        "Target attainment: share of requests that must meet their SLO. May be repeated.",
        (0.9, 0.99),
        option="--target",
        metavar="SHARE",
        repeated=True,
    )
    tolerance: float = setting(
        SEARCH,
        "Relative precision: stop when the interval is within ± this share of the estimate.",
        0.03,
        metavar="SHARE",
    )
    max_requests: int | None = setting(
        SEARCH,
        f"Maximum number of requests spent on one configuration. Default: {SIMULATED_BUDGET:,}, "
        "more for SLOs of minutes; on a real server no limit.",
    )
    max_time_s: float | None = setting(
        SEARCH,
        f"Maximum time spent on one configuration. Default: {REAL_BUDGET_S:g} on a real server.",
        unit="s",
    )
    warm_start: Path | None = setting(
        SEARCH,
        "Folder of an earlier search of a similar configuration; its result is the starting point.",
        metavar="DIR",
    )
