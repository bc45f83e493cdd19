"""Calibrates a profile on logs of a real server: step times, front end and KV blocks.

Factors on step times follow from the times between events of a log (`equations`), the front end
from what a client's first tokens came later than the engine's (`fitted_front_end`). Both are
learned from each half of every log in time, too, and judged on the other half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ....predictors.operators.front_end import FrontEnd, front_end
from ....predictors.operators.server_version import NEWEST, UNKNOWN, ServerVersion, version_numbers
from ....predictors.profiles.calibration import Calibration
from ....predictors.profiles.formulas import TABLE, available
from ....predictors.profiles.profile_format import Profile
from ....predictors.profiles.scope import Range, Scope
from ....predictors.scaled import calibrated
from ....workloads.arrays import Floats, Mask
from ....workloads.errors import SloBenchError
from ...policies.systems import DEFAULT_SYSTEM, system
from ...results.engine_logs import EngineSettings, RealLog
from ...results.request_blocks import HASH_IDS
from ..replay.log_replay import (
    METRICS,
    NO_BLOCKS,
    Replay,
    as_measured,
    latencies_of,
    merged,
    replay_of,
    simulated_again,
    statistics,
    with_log_link,
)
from ..replay.snapped_replay import Snapped, snapped_replay
from .equations import KNOTS, Equations, at_bounds, equations, factors_of
from .fitted_front_end import Waited, fitted_front_end

Progress = Callable[[str], None]

# Settings of an engine that logs of one profile have in common.
_OF_ALL = ("model", "tp", "server", "version", "system", "eager")

# Share of disagreements among the events of a replay from which its batches are doubtful, and from
# which they are those of another run.
_DOUBTFUL, _UNLIKE = 0.25, 0.75
# The search for the number of KV blocks: shares of the best one so far, then single blocks.
_BLOCK_STEPS = ((0.03, 12), (0.01, 2), (0.003, 3))
_FEWEST = 0.64  # of the estimate, where the search begins
# The front end decides which step a request enters, and so the equations: both in turn.
_ROUNDS, _NEAR, _NEAR_S, _WORSE = 8, 0.002, 2e-4, 0.02
_FIRST_S = (0.0, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3)  # latencies to begin with
_PROMPTS = np.array([1, 2000])  # tokens, at which front ends are compared
_LEAST_SPANS = 10  # of a half
_LEAST_JUDGED, _LEAST_OF_P99 = 10, 100  # requests of a half


@dataclass(frozen=True)
class Calibrated:
    """A profile with its calibration, and what there is to say about it."""

    profile: Profile
    calibration: Calibration
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Recorded:
    """A log, and what it is simulated with before anything is learned."""

    log: RealLog
    replay: Replay
    num_gpu_blocks: int = 0  # told by the log, or found; 0: an estimate

    def with_learned(self, learned: _Learned) -> Replay:
        """What it is simulated with afterwards."""
        timed, replay = self.replay.step_time, self.replay
        model = calibrated(timed.model, factors_of(learned.factors.tolist()))
        passed = learned.front_end if self.log.of_client else None
        return dataclasses.replace(
            replay, step_time=dataclasses.replace(timed, model=model), front_end=passed
        )

    def latencies(self, replay: Replay) -> dict[str, Floats]:
        """Simulated seconds of each request by metric."""
        return as_measured(self.log, simulated_again(replay).records)

    @property
    def half_s(self) -> float:
        """The middle of its first and last tokens; the halves are before and from then on."""
        return float(np.median(np.concatenate([self.log.first_s, self.log.last_s])))

    def half(self, late: bool | None, metric: str = "ttft") -> Mask:
        """Its requests whose metric was complete in one half; None: all."""
        if late is None:
            return np.ones(len(self.log), dtype=np.bool_)
        complete_s = self.log.first_s if metric == "ttft" else self.log.last_s
        return np.asarray((complete_s >= self.half_s) == late)


class _Learned(NamedTuple):
    factors: Floats
    front_end: FrontEnd | None

    def is_near(self, other: _Learned) -> bool:
        """Whether another round would find the same."""
        if np.abs(self.factors - other.factors).max() > _NEAR:
            return False
        if self.front_end is None or other.front_end is None:
            return True
        off_s = self.front_end.passing_s(_PROMPTS) - other.front_end.passing_s(_PROMPTS)
        return bool(np.abs(off_s).max() < _NEAR_S)


def calibrate(
    logs: Sequence[RealLog],
    profile: Profile,
    engine: str = DEFAULT_SYSTEM,
    *,
    overrides: EngineSettings | None = None,
    host_s: float = 0.0,
    day: str = "",
    progress: Progress = lambda line: None,
) -> Calibrated:
    """Learn from `logs` of a machine what `profile` lacks; what it had learned is replaced, and a
    profile with tables uses them from then on.

    Factors on linear layers (without tables: on steps); the front end, where logs are those of
    clients; the number of KV blocks, where a log does not tell it and blocks ran out: the one whose
    replay agrees best. Arguments are those of a validation; `day` goes into the profile's scope.

    Raises:
        SloBenchError: the profile has no step times, logs are of different servers, or a replay
            does not come near its log.
    """
    settings = overrides or EngineSettings()
    if system(engine).cluster is None:
        logs = [part for log in logs for part in log.by_instance()]
    engines = [merged(log.engine, settings) for log in logs]
    for name in _OF_ALL:
        values = sorted({str(getattr(engine_settings, name)) for engine_settings in engines})
        if len(values) > 1:
            raise SloBenchError(
                f"the logs differ in {name} ({', '.join(values)}), and a profile is of one server; "
                "choose one with --cell, or give its file"
            )
    server = server_of(engines[0])
    bare = dataclasses.replace(uncalibrated(profile), scope=Scope(server_text(server)))
    for log in logs:
        bare = with_log_link(bare, log)
    notes: list[str] = []
    recorded = [_recorded(log, bare, engine, settings, host_s, notes, progress) for log in logs]
    of_client = any(log.of_client for log in logs)
    begin = _Learned(np.ones(len(KNOTS)), front_end(server) if of_client else None)
    spans, disagreeing = _first(recorded, begin)
    latest = learned = _learned(recorded, spans, begin, begin, None, progress)
    for _ in range(_ROUNDS):
        again, fewer = _equations_of(recorded, latest)
        if fewer > disagreeing + _WORSE:
            break
        previous, latest = latest, _learned(recorded, again, begin, latest, None, progress)
        if fewer <= disagreeing:
            spans, disagreeing, learned = again, fewer, latest
        if latest.is_near(previous):
            break
    notes += _doubts(disagreeing)
    progress("judging each half by the other")
    before, after = (_mean_errors(recorded, part) for part in (begin, learned))
    blocks = {entry.num_gpu_blocks for entry in recorded}
    sizes = {entry.replay.settings.block_size or 0 for entry in recorded}
    calibration = Calibration(
        origin=tuple("/".join(Path(log.name).parts[-3:]) for log in logs),
        tokens=KNOTS,
        factors=tuple(round(float(f), 4) for f in learned.factors),
        requests=sum(len(log) for log in logs),
        steps=spans.steps,
        digests=tuple(log.digest for log in logs),
        num_gpu_blocks=blocks.pop() if len(blocks) == 1 else 0,
        block_size=sizes.pop() if len(sizes) == 1 else 0,
        before_percent=before,
        after_percent=after,
        held_out_percent=_held_out(recorded, spans, begin, learned, progress),
    )
    notes += at_bounds(calibration)
    if abs(after["e2e"]) > max(1.0, abs(before["e2e"])):
        notes.append(
            "what was learned brings the simulation no nearer to the run: its engine's settings "
            "are probably others than those simulated (meta.json, or options)"
        )
    if not of_client:
        notes.append(
            "times are the engine's own: the front end before it is not learned, and not simulated "
            "with this profile"
        )
    result = dataclasses.replace(
        bare,
        calibration=calibration,
        front_end=learned.front_end,
        scope=dataclasses.replace(scope_of(logs), server=server_text(server), date=day),
    )
    return Calibrated(result, calibration, tuple(dict.fromkeys(notes)))  # several logs, one note


def uncalibrated(profile: Profile) -> Profile:
    """The profile without what it has learned, and with step times from its tables, if any.

    Raises:
        SloBenchError: it has no step times.
    """
    formulas = available(profile)
    if not formulas:
        raise SloBenchError(
            f"the profile of {profile.label} has no step times to calibrate: neither tables of "
            "linear layers and attention nor a fit"
        )
    best = "" if TABLE in formulas else profile.best
    return dataclasses.replace(profile, calibration=None, front_end=None, scope=None, best=best)


def with_factors(profile: Profile, tokens: tuple[float, ...], factors: Sequence[float]) -> Profile:
    """The profile with these factors of steps of so many tokens."""
    learned = Calibration(origin=(), tokens=tokens, factors=tuple(factors))
    return dataclasses.replace(profile, calibration=learned)


def server_of(settings: EngineSettings) -> ServerVersion:
    """The server of a log; an unknown version is the newest."""
    usual = ServerVersion()
    engine = settings.server if settings.server in NEWEST else usual.engine
    version = settings.version or ""
    known_version = version_numbers(version) != UNKNOWN
    return ServerVersion(engine or usual.engine, version if known_version else "")


def server_text(server: ServerVersion) -> str:
    """The server as `ServerVersion.parse` reads it."""
    return f"{server.engine}-{server.version}" if server.version else server.engine


def scope_of(logs: Sequence[RealLog]) -> Scope:
    """The loads of the logs, an instance's; lengths from the 1st to the 99th percentile."""

    def lengths(name: str) -> Range:
        tokens = np.concatenate([getattr(log, name) for log in logs])
        low, high = np.quantile(tokens, (0.01, 0.99))
        return float(np.floor(low)), float(np.ceil(high))

    spans_s = [float(np.ptp(log.arrival_s)) for log in logs]
    rates_rps = [
        float(f"{(len(log) - 1) / span_s:.3g}")
        for log, span_s in zip(logs, spans_s, strict=True)
        if span_s > 0
    ]
    in_flight = [_in_flight(log) for log in logs]
    return Scope(
        rate_rps=(min(rates_rps), max(rates_rps)) if rates_rps else None,
        prompt_tokens=lengths("prompt_tokens"),
        output_tokens=lengths("output_tokens"),
        concurrency=(
            float(min(count.min() for count in in_flight)),
            float(max(count.max() for count in in_flight)),
        ),
    )


def _in_flight(log: RealLog) -> Floats:
    """Requests in flight when each arrives, itself included."""
    ended = np.searchsorted(np.sort(log.last_s), log.arrival_s, side="right")
    return np.arange(1.0, len(log) + 1) - ended


def _recorded(
    log: RealLog,
    bare: Profile,
    engine: str,
    settings: EngineSettings,
    host_s: float,
    notes: list[str],
    progress: Progress,
) -> _Recorded:
    progress(f"replaying {log.name}")
    replay = replay_of(log, bare, engine, overrides=settings, host_s=host_s)
    notes += [note for note in replay.notes if not note.startswith(NO_BLOCKS)]  # they are searched
    if (replay.settings.instances or 1) > 1:
        raise SloBenchError(
            f"{log.name} is of {replay.settings.instances} instances, and its requests do not tell "
            "theirs apart (instance); calibrate on the log of one"
        )
    if log.of_client:
        passed = front_end(server_of(replay.settings))
        replay = dataclasses.replace(replay, front_end=passed)
    blocks = settings.num_gpu_blocks or log.engine.num_gpu_blocks
    if blocks is None and (blocks := _blocks(log, replay, progress)) is not None:
        notes.append(f"{log.name} does not tell its KV blocks; {blocks:,} agree best")
        replay = replay.with_blocks(blocks)
    return _Recorded(log, replay, blocks or 0)


def _equations_of(recorded: Sequence[_Recorded], learned: _Learned) -> tuple[Equations, float]:
    """Equations of all logs, and the share of events that disagree."""
    parts, disagreements, events = [], 0, 0
    for entry in recorded:
        log, replay = entry.log, entry.with_learned(learned)
        snapped = snapped_replay(log, replay)
        disagreements += snapped.disagreements
        events += snapped.events
        model, of_client = entry.replay.step_time.model, log.of_client
        parts.append(
            equations(
                snapped.spans, model, learned.factors, half_s=entry.half_s, of_client=of_client
            )
        )
    return Equations.joined(parts), disagreements / events


def _first(recorded: Sequence[_Recorded], begin: _Learned) -> tuple[Equations, float]:
    """Equations with the latency of the front end with which fewest events disagree."""
    if begin.front_end is None:
        return _equations_of(recorded, begin)
    tried = [
        _equations_of(
            recorded,
            begin._replace(front_end=dataclasses.replace(begin.front_end, latency_s=latency_s)),
        )
        for latency_s in _FIRST_S
    ]
    return min(tried, key=lambda pair: pair[1])


def _learned(
    recorded: Sequence[_Recorded],
    spans: Equations,
    begin: _Learned,
    latest: _Learned,
    late: bool | None,
    progress: Progress,
) -> _Learned:
    """What one half of the logs tells; with None all of them.

    `begin` is what stands where they tell nothing, `latest` what was learned before.
    """
    factors = (spans if late is None else spans.rows(spans.late == late)).solved()
    if begin.front_end is None:
        return _Learned(factors, None)
    progress("learning the front end")
    of_clients = [entry for entry in recorded if entry.log.of_client]

    def waited(queued: FrontEnd) -> list[Waited]:
        return [
            Waited(
                entry.log.prompt_tokens.astype(np.float64),
                latencies_of(entry.log)["ttft"],
                entry.latencies(entry.with_learned(_Learned(factors, queued)))["ttft"],
            )
            for entry in of_clients
        ]

    chosen = [entry.half(late) for entry in of_clients]
    first_s = None if latest.front_end is None else latest.front_end.request_s
    return _Learned(factors, fitted_front_end(begin.front_end, waited, chosen, first_s))


def _doubts(disagreeing: float) -> list[str]:
    """What a share of disagreeing events says of the replay.

    Raises:
        SloBenchError: it is another run.
    """
    doubt = (
        f"{100 * disagreeing:.0f} % of the first and last tokens come in another order in the "
        "simulation than in the log: check the engine's settings (meta.json, or options such "
        f"as --num-gpu-blocks), {HASH_IDS} beside the log, and the model"
    )
    if disagreeing > _UNLIKE:
        raise SloBenchError(doubt)
    return [doubt] if disagreeing > _DOUBTFUL else []


def _mean_errors(recorded: Sequence[_Recorded], learned: _Learned) -> dict[str, float]:
    """Error of the mean of each metric over all requests, in percent."""
    measured = [latencies_of(entry.log) for entry in recorded]
    predicted = [entry.latencies(entry.with_learned(learned)) for entry in recorded]
    errors = {}
    for metric in METRICS:
        real, simulated = (
            np.concatenate([seconds[metric] for seconds in logs]) for logs in (measured, predicted)
        )
        errors[metric] = round(100 * float(np.nanmean(simulated) / np.nanmean(real) - 1), 2)
    return errors


def _held_out(
    recorded: Sequence[_Recorded],
    spans: Equations,
    begin: _Learned,
    whole: _Learned,
    progress: Progress,
) -> dict[str, float]:
    """The largest error of each metric on either half of a log by what the other halves tell, in
    percent: of mean, p50, p90, and of p99 with 100 requests; empty where halves are too short.
    """
    if min((spans.late == late).sum() for late in (False, True)) < _LEAST_SPANS:
        return {}
    worst: dict[str, float] = {}
    for late in (False, True):
        learned = _learned(recorded, spans, begin, whole, not late, progress)
        for entry in recorded:
            real, simulated = latencies_of(entry.log), entry.latencies(entry.with_learned(learned))
            for metric in METRICS:
                judged = entry.half(late, metric)
                if judged.sum() < _LEAST_JUDGED:
                    continue
                figures = statistics(simulated[metric][judged])
                for name, real_s in statistics(real[metric][judged]).items():
                    if real_s > 0 and (name != "p99" or judged.sum() >= _LEAST_OF_P99):
                        off = 100 * abs(figures[name] / real_s - 1)
                        worst[metric] = max(worst.get(metric, 0.0), round(off, 2))
    return worst


# ---------------------------------------------------------------- KV blocks


def _blocks(log: RealLog, replay: Replay, progress: Progress) -> int | None:
    """The number of KV blocks, as the engine counts them, whose replay agrees best with the log.

    One block more or less makes another victim of a preemption, so the number is sharp where
    blocks ran out. None where they did not: twice the estimate gives as good a replay.
    """
    estimate = replay.settings.num_gpu_blocks
    assert estimate is not None
    least = int((log.prompt_tokens + log.output_tokens).max()) // replay.placement.block_size + 2
    tried: dict[int, Snapped] = {}

    def disagreements(blocks: int) -> float:
        if blocks < least:
            return np.inf
        if blocks not in tried:
            progress(f"{log.name}: {blocks:,} KV blocks")
            fewest = min((snapped.disagreements for snapped in tried.values()), default=np.inf)
            tried[blocks] = snapped_replay(log, replay.with_blocks(blocks), fewest)
        return tried[blocks].disagreements

    def better(best: int, others: Sequence[int]) -> int:
        return min((best, *others), key=disagreements)

    events = snapped_replay(log, replay).events
    roomy = disagreements(2 * estimate)
    if disagreements(estimate) == roomy and (
        roomy <= _DOUBTFUL * events or disagreements(round(_FEWEST * estimate)) == roomy
    ):
        return None
    best = estimate
    for share, reach in _BLOCK_STEPS:
        shares = [k * share for k in range(-reach, reach + 1) if k]
        best = better(best, [round(best * (1 + s)) for s in sorted(shares, key=abs)])
    while True:
        nearest = better(best, [best + k for k in (1, -1, 2, -2, 3, -3, 4, -4)])
        if nearest == best:
            return best if disagreements(best) < roomy else None
        best = nearest
