"""The result of one run at one rate, from which a capacity search concludes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

from ...harness.results.stationarity import RunBatches, requests_in
from ...workloads.errors import SloBenchError


@dataclass(frozen=True, kw_only=True)
class LevelSample(RunBatches):
    """Result of one run under one load. `wall_s` is the duration of the run.

    `control`: for each batch, the misses of the control variate (`control.py`) above those
    expected; empty without one. `rate_rps` is 0 where arrivals have no rate. `refused`: requests
    that the server answers with an error whatever the rate is (too long, for example), and
    `refused_because` what it says of most of them; `failed` and `failed_because` likewise those
    that failed in another way than by overload. `surplus_outputs`: answers with more tokens than
    requested.
    """

    rate_rps: float
    seed: int
    requests: int  # all that were sent
    wall_s: float = 0.0
    invalid_because: str | None = None
    refused: int = 0
    refused_because: str = ""
    failed: int = 0
    failed_because: str = ""
    surplus_outputs: int = 0
    control: tuple[float, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether anything can be concluded: not where the client was late."""
        return self.invalid_because is None

    @property
    def requests_to_settle(self) -> int:
        """Requests of a run at this rate that can be taken for the long run."""
        return requests_in(1.05 * self.settle_s, self.rate_rps, self.horizon_s)


def faults_of(samples: Sequence[LevelSample]) -> dict[str, Any]:
    """`failed` and `surplus_outputs` of all samples, `failed_because` of the commonest fault."""
    faults = Counter[str]()
    for sample in samples:
        faults[sample.failed_because] += sample.failed
    commonest, failed = faults.most_common(1)[0] if faults else ("", 0)
    return {
        "failed": faults.total(),
        "failed_because": commonest if failed else "",
        "surplus_outputs": sum(sample.surplus_outputs for sample in samples),
    }


def check_refused(samples: Sequence[LevelSample], targets: Sequence[float]) -> None:
    """Raise where so many requests are refused at any rate that no target can be met.

    Raises:
        SloBenchError: the refused share, by the low end of its 95 % interval, is more than a target
            leaves.
    """
    refused = sum(sample.refused for sample in samples)
    requests = sum(sample.requests for sample in samples)
    if not refused or wilson_interval(refused / requests, requests)[0] <= 1 - min(targets):
        return
    why = next(sample.refused_because for sample in reversed(samples) if sample.refused)
    raise SloBenchError(
        f"the server refuses {refused:,} of {requests:,} requests at any rate ({why}): no rate "
        "meets the target; give requests that it serves, for example shorter ones, or begin in a "
        "new folder once the server takes them"
    )


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of `n` independent requests."""
    z2 = NormalDist().inv_cdf(0.975) ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def sample_from_plain(plain: Mapping[str, Any]) -> LevelSample:
    """The inverse of `vars(sample)`, from JSON, which has lists in place of tuples."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return LevelSample(**fields)


class LevelRunner(Protocol):
    """Runs a load at a given rate: a simulator, a server, or a formula."""

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """Offer `requests` requests at `rate_rps`, starting with nothing in the system.

        Runs with different seeds must be independent of each other.
        """
        ...
