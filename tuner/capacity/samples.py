"""The result of one run at one rate, from which a capacity search concludes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...harness.results.stationarity import RunBatches


@dataclass(frozen=True, kw_only=True)
class LevelSample(RunBatches):
    """Result of one run at one rate. `wall_s` is the duration of the run.

    `refused`: requests that the server answers with an error whatever the rate is (too long, for
    example), and `refused_because` what it says of most of them.
    """

    rate_rps: float
    seed: int
    requests: int  # all that were sent
    wall_s: float = 0.0
    invalid_because: str | None = None
    refused: int = 0
    refused_because: str = ""

    @property
    def valid(self) -> bool:
        """Whether anything can be concluded: not where the client was late."""
        return self.invalid_because is None


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
