"""Why the best system won: where the time of requests went with it and with the runner-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...harness.results.read_run import RunResults, read_requests, read_timeseries
from ...workloads.parsing import finite
from ..figures.details import CAUSES, PHASES, counted, latencies_s, mechanism, missed_by, phases_s
from ..figures.facets import facets_of
from ..figures.figure import percent_text, rate_text, seconds_text
from ..figures.levels import TARGETS, has_slo, highest_rate, series_names

MOST = 6
"""Facets that a page or a terminal tells of; JSON has all."""

_DECIDES: Mapping[str, tuple[str, ...]] = {
    "TTFT": ("waiting", "prefill"),
    "TPOT": ("transfer", "decode"),
}
"""Phases that make a bound be missed; those of the other causes are all."""

_MCNEMAR = 3.84  # 95 % quantile of chi-squared with one degree of freedom

_BY_ROLE = ("compute", "kv_cache_usage", "waiting")


@dataclass(frozen=True)
class Side:
    """One of the two systems at that rate.

    Attributes:
        attainment: share of all requests in their SLO.
        phase_s: mean seconds by `PHASES` of the requests that only the winner served in time and
            both finished.
        roles: means over instances and time, by role: `compute`, `kv_cache_usage` (shares) and
            `waiting` (requests of an instance). Empty without several instances.
    """

    name: str
    attainment: float
    phase_s: Mapping[str, float]
    roles: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Reason:
    """The best system of a facet against the next, at the rate at which they differ most.

    Attributes:
        requests: of all seeds.
        only_winner: requests in their SLO with the winner alone.
        only_runner_up: requests in their SLO with the runner-up alone.
        as_high: whether both carry the same highest tested rate at 90 % in SLO.
        causes: why the runner-up missed those of `only_winner`, by `CAUSES`.
    """

    facet: str
    rate_rps: float
    winner: Side
    runner_up: Side
    requests: int
    only_winner: int
    only_runner_up: int
    as_high: bool
    causes: Mapping[str, int]

    @property
    def cause(self) -> str:
        """The most frequent of `causes`."""
        return max(self.causes, key=lambda cause: self.causes[cause])

    @property
    def phase(self) -> str | None:
        """The phase that took the runner-up most time more, of those that decide the cause; None
        if none took more.
        """
        more = {
            phase: self.runner_up.phase_s[phase] - self.winner.phase_s[phase]
            for phase in _DECIDES.get(self.cause, PHASES)
        }
        slowest = max(more, key=lambda phase: more[phase])
        return slowest if more[slowest] > 0 else None

    @property
    def by_chance(self) -> bool:
        """Whether both could be as good: McNemar's test of the pairs, at 5 %."""
        won, lost = self.only_winner, self.only_runner_up
        return (won - lost) ** 2 < _MCNEMAR * (won + lost)

    @property
    def is_tie(self) -> bool:
        """Whether neither is shown to be the better one."""
        return self.by_chance or self.as_high

    @property
    def sentences(self) -> str:
        """What was found, for people."""
        best, next_, n = self.winner, self.runner_up, self.only_winner
        parts = [
            f"At {rate_text(self.rate_rps)} req/s {best.name} keeps "
            f"{percent_text(best.attainment)} in SLO, {next_.name} "
            f"{percent_text(next_.attainment)}. {n:,} of {self.requests:,} requests are in time "
            f"with {best.name} alone, {self.only_runner_up:,} with {next_.name} alone. Of the "
            f"{n:,}, {next_.name} missed: {_counts_text(self.causes)}."
        ]
        if self.by_chance:
            parts.append("The difference may be chance.")
        if np.isfinite(list(best.phase_s.values())).all():
            times = ", ".join(
                f"{phase} {seconds_text(long_s)} ({seconds_text(best.phase_s[phase])})"
                for phase, long_s in next_.phase_s.items()
                if long_s or best.phase_s[phase]
            )
            text = f"Mean times of those with {next_.name} (with {best.name}): {times}"
            if self.phase is not None:
                text += f"; what makes the difference is {self.phase}"
            parts.append(f"{text}.")
        parts += [_roles_text(side) for side in (next_, best) if side.roles]
        return " ".join(parts)


def _counts_text(causes: Mapping[str, int]) -> str:
    order = sorted((c for c in causes if causes[c]), key=lambda cause: -causes[cause])
    return ", ".join(f"{cause} {causes[cause]:,}" for cause in order)


def _roles_text(side: Side) -> str:
    uses = [
        f"{f'{role}: ' * (len(side.roles) > 1)}{percent_text(use['compute'])} of their arithmetic, "
        f"{percent_text(use['kv_cache_usage'])} of KV memory, {rate_text(use['waiting'])} waiting"
        for role, use in side.roles.items()
    ]
    return f"Instances of {side.name} use, on average: {'; '.join(uses)}."


def reasons(runs: Sequence[RunResults], cells: pd.DataFrame) -> list[Reason]:
    """One for each facet in which the best of two or more systems keeps more requests in their SLO.

    Cells are compared request by request, where both systems had the same arrivals. `cells` are
    those of `levels.combine`; none without records of requests or without an SLO.
    """
    if not has_slo(cells):
        return []
    all_reasons = []
    for facet in facets_of(cells):
        facet_cells = cells[(cells["facet"] == facet) & cells["valid"]]
        names = series_names(facet_cells)[:2]
        if len(names) == 2 and (reason := _reason(facet, runs, facet_cells, *names)) is not None:
            all_reasons.append(reason)
    return all_reasons


def _reason(
    facet: str, runs: Sequence[RunResults], cells: pd.DataFrame, best: str, next_: str
) -> Reason | None:
    means = cells.groupby(["series", "level_rps"])["attainment"].mean()
    ahead = (means[best] - means[next_]).dropna()
    if ahead.empty or ahead.max() <= 0:
        return None
    rate = float(ahead.idxmax())
    at_rate = cells[cells["level_rps"] == rate].drop_duplicates(["series", "seed"])
    at_rate = at_rate.set_index("seed")
    system_cells = {name: at_rate[at_rate["series"] == name] for name in (best, next_)}
    only = {best: 0, next_: 0}
    causes = dict.fromkeys(CAUSES, 0)
    phases = {best: [np.empty((0, len(PHASES)))], next_: [np.empty((0, len(PHASES)))]}
    total = 0
    for seed in system_cells[best].index.intersection(system_cells[next_].index):
        rows = {name: system_cells[name].loc[seed] for name in system_cells}
        if not all(runs[int(row["folder"])].keeps_requests for row in rows.values()):
            continue
        tables = {name: _requests(runs, row) for name, row in rows.items()}
        if not _same(tables[best], tables[next_]):
            continue
        met = {name: (table["slo_met"] == 1).to_numpy() for name, table in tables.items()}
        won = met[best] & ~met[next_]
        only[best] += int(won.sum())
        only[next_] += int((met[next_] & ~met[best]).sum())
        total += len(won)
        for cause, missed in missed_by(tables[next_], *latencies_s(tables[next_])).items():
            causes[cause] += int((missed & won).sum())
        both = won & (tables[next_]["outcome"] == "finished").to_numpy()
        for name, table in tables.items():
            phases[name].append(phases_s(table[both]))
    if not only[best]:
        return None
    winner, runner_up = (
        Side(
            name,
            float(means[name][rate]),
            _mean_phases(np.concatenate(phases[name])),
            _roles(runs, system_cells[name].iloc[0]),
        )
        for name in (best, next_)
    )
    highest = {highest_rate(cells[cells["series"] == n], TARGETS[0]).rate_rps for n in only}
    as_high = len(highest) == 1 and cells["level_rps"].nunique() > 1
    return Reason(facet, rate, winner, runner_up, total, only[best], only[next_], as_high, causes)


def _requests(runs: Sequence[RunResults], row: pd.Series[Any]) -> pd.DataFrame:
    requests = read_requests(runs[int(row["folder"])].path, str(row["cell"]))
    return counted(requests, int(row["requests"]))


def _same(table: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether both tables are of the same requests."""
    if len(table) != len(other):
        return False
    times_s, others_s = table["arrival_s"].to_numpy(), other["arrival_s"].to_numpy()
    return bool(np.allclose(times_s, others_s, rtol=0, atol=1e-6))


def _mean_phases(times_s: np.ndarray) -> dict[str, float]:
    means = times_s.mean(axis=0) if len(times_s) else np.full(len(PHASES), np.nan)
    return dict(zip(PHASES, means.tolist(), strict=True))


def _roles(runs: Sequence[RunResults], row: pd.Series[Any]) -> dict[str, dict[str, float]]:
    """Mean of each metric by role, for the run of one seed."""
    timeseries = read_timeseries(runs[int(row["folder"])].path, str(row["cell"]))
    apart = mechanism(timeseries).apart
    if not all(metric in apart for metric in _BY_ROLE):
        return {}
    by_role: dict[str, dict[str, float]] = {}
    for metric in _BY_ROLE:
        values: dict[str, list[float]] = {}
        for entity, (_, value) in apart[metric].items():
            values.setdefault(entity.rpartition(" ")[0], []).append(float(value.mean()))
        for role, means in values.items():
            by_role.setdefault(role, {})[metric] = sum(means) / len(means)
    return {role: metrics for role, metrics in by_role.items() if len(metrics) == len(_BY_ROLE)}


def shown(all_reasons: Sequence[Reason]) -> list[tuple[str, str]]:
    """Facet and sentences of the first of them."""
    return [(reason.facet, reason.sentences) for reason in all_reasons[:MOST]]


def reason_json(reason: Reason) -> dict[str, Any]:
    """All of it as plain values, and the sentences."""
    fields = dataclasses.asdict(reason)
    for side in ("winner", "runner_up"):
        fields[side]["phase_s"] = {p: finite(s) for p, s in fields[side]["phase_s"].items()}
    return (
        fields
        | {"cause": reason.cause, "phase": reason.phase, "by_chance": reason.by_chance}
        | {"why": reason.sentences}
    )
