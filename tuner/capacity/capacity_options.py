"""Settings of a capacity search that are not settings of the experiment."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...harness.experiments.config.setting import Several, setting

SEARCH = "Search"
SIMULATED_REQUESTS, REAL_REQUESTS = 2000, 300  # of a run, at least
SIMULATED_BUDGET = 120_000  # requests of a search
SIMULATED_BUDGET_HORIZONS = 300.0  # or those that arrive in so many horizons of a long SLO
# Seconds for a target on a real server; for long answers so many of their mean times in
# the system, up to an hour.
REAL_BUDGET_S, REAL_BUDGET_HORIZONS, REAL_MOST_S = 210.0, 300.0, 3600.0
REAL_TARGETS, REAL_TOLERANCE = (0.9,), 0.05
REAL_LEAST = 100  # requests of a run that brackets, on a real server
# Horizons of the SLO, or mean times in the system, that a run near the capacity lasts.
SIMULATED_HORIZONS, REAL_HORIZONS = 60.0, 20.0
SEEDS, REAL_SEEDS = 3, 1  # a server makes one run after another, each where it tells most


class CapacityOptions(BaseModel):
    """Settings of a capacity search. None: the default of `search_capacity`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Several[float] = setting(
        SEARCH,
        "Target attainment: share of requests that must meet their SLO. May be repeated. Default: "
        "0.9 and 0.99; on a real server 0.9.",
        (0.9, 0.99),
        option="--target",
        metavar="SHARE",
        repeated=True,
    )
    tolerance: float = setting(
        SEARCH,
        "Relative precision: stop when the interval is within ± this share of the estimate. "
        f"Default: 0.03; on a real server {REAL_TOLERANCE:g}.",
        0.03,
        metavar="SHARE",
    )
    max_requests: int | None = setting(
        SEARCH,
        "Maximum number of requests spent on one target of a configuration. Default: "
        f"{SIMULATED_BUDGET:,}, more for SLOs of minutes; on a real server no limit.",
    )
    max_time_s: float | None = setting(
        SEARCH,
        "Maximum time spent on one target of a configuration. Default: "
        f"{REAL_BUDGET_S:g} on a real server, more where answers take longer than "
        f"{REAL_BUDGET_S / REAL_BUDGET_HORIZONS:g} s.",
        unit="s",
    )
    warm_start: Path | None = setting(
        SEARCH,
        "Folder of an earlier search of a similar configuration; its result is the starting point.",
        metavar="DIR",
    )

    @property
    def has_budget(self) -> bool:
        """Whether a maximum of requests or of time is set."""
        return self.max_requests is not None or self.max_time_s is not None
