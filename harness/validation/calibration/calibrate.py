"""Calibrates a profile: factors on its linear layers, learned from logs of a real run.

A log tells when each request had its first and its last token. Replayed with the clock set to
these, the batches in between are known, and so is what their steps took together: linear equations
for the factors. A few batches are not those of the run, so a robust loss is minimised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....predictors.profiles.build_model import linear_curve
from ....predictors.profiles.calibration import Calibration, hats
from ....predictors.profiles.formulas import TABLE, available
from ....predictors.profiles.profile_format import Profile
from ....predictors.profiles.step_time_table import Curve
from ....workloads.arrays import Floats
from ....workloads.errors import SloBenchError
from ...policies.systems import DEFAULT_SYSTEM
from ...results.engine_logs import EngineSettings, RealLog
from ...results.request_blocks import HASH_IDS
from ..replay.log_replay import METRICS, Replay, Validation, replay_of, validate, with_log_link
from ..replay.snapped_replay import Snapped, Span, snapped_replay

Progress = Callable[[str], None]

# Tokens of a step at which factors are learned: sizes of CUDA graphs, then of chunks.
KNOTS = (1.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
_MIN_SPANS = 20
# Weight of a time between two events: clocks of a log, and steps that are not linear layers.
_CLOCK_S, _SHARE = 0.003, 0.03
_SMOOTH = 0.05  # standard deviation of the difference between neighbouring factors
# Share of disagreements among the events of a replay from which its batches are doubtful, and from
# which they are those of another run.
_DOUBTFUL, _UNLIKE = 0.25, 0.75
# The search for the number of KV blocks: shares of the best one so far, then single blocks.
_BLOCK_STEPS = ((0.03, 12), (0.01, 2), (0.003, 3))


@dataclass(frozen=True)
class Calibrated:
    """A profile with its calibration, and what there is to say about it."""

    profile: Profile
    calibration: Calibration
    notes: tuple[str, ...]


def calibrate(
    logs: Sequence[RealLog],
    profile: Profile,
    engine: str = DEFAULT_SYSTEM,
    *,
    overrides: EngineSettings | None = None,
    host_s: float = 0.0,
    progress: Progress = lambda line: None,
) -> Calibrated:
    """Learn the factors of `profile` from `logs` of the machine; earlier factors are replaced, and
    the profile uses its tables from then on.

    Arguments are those of `validate`. Where a log does not tell its number of KV blocks, it is the
    one whose replay agrees best with the log.

    Raises:
        SloBenchError: the profile has no tables, or a replay does not come near its log.
    """
    bare = tables_only(profile)
    for log in logs:
        bare = with_log_link(bare, log)
    settings = overrides or EngineSettings()
    with_settings: list[tuple[RealLog, EngineSettings]] = []
    notes: list[str] = []
    for log in logs:
        progress(f"replaying {log.name}")
        log_blocks = settings.num_gpu_blocks or log.engine.num_gpu_blocks
        if log_blocks is None:
            log_blocks = _blocks(log, bare, engine, settings, host_s, progress)
            if log_blocks is not None:
                notes.append(f"{log.name} does not tell its KV blocks; {log_blocks:,} agree best")
        with_settings.append((log, dataclasses.replace(settings, num_gpu_blocks=log_blocks)))

    def equations(factored: Profile) -> tuple[_Equations, float]:
        parts, disagreements, events = [], 0, 0
        for log, log_settings in with_settings:
            replay = replay_of(log, factored, engine, overrides=log_settings, host_s=host_s)
            snapped = snapped_replay(log, replay)
            disagreements += snapped.disagreements
            events += snapped.events
            parts.append(_equations(snapped.spans, replay, bare, factored))
        return _joined(parts), disagreements / events

    best, disagree = equations(bare)
    factors = best.solved()
    again, less = equations(with_factors(bare, KNOTS, factors.tolist()))
    if less < disagree:
        best, disagree = again, less
        factors = best.solved()
    if disagree > _DOUBTFUL:
        doubt = (
            f"{100 * disagree:.0f} % of the first and last tokens come in another order in the "
            "simulation than in the log: check the engine's settings (meta.json, or options such "
            f"as --num-gpu-blocks), {HASH_IDS} beside the log, and the model"
        )
        if disagree > _UNLIKE:
            raise SloBenchError(doubt)
        notes.append(doubt)
    progress("computing the errors")
    blocks = {log_settings.num_gpu_blocks for _, log_settings in with_settings}
    learned = Calibration(
        origin=tuple("/".join(Path(log.name).parts[-3:]) for log in logs),
        tokens=KNOTS,
        factors=tuple(round(float(f), 4) for f in factors),
        requests=sum(len(log) for log in logs),
        steps=best.steps,
        digests=tuple(log.digest for log in logs),
        num_gpu_blocks=(blocks.pop() or 0) if len(blocks) == 1 else 0,
        held_out_percent=round(100 * best.held_out(), 2),
    )
    result = dataclasses.replace(bare, calibration=learned)
    before, after = (
        _mean_errors(
            [
                validate(log, p, engine, overrides=log_settings, host_s=host_s)
                for log, log_settings in with_settings
            ]
        )
        for p in (bare, result)
    )
    learned = dataclasses.replace(learned, before_percent=before, after_percent=after)
    if abs(after["e2e"]) > max(1.0, abs(before["e2e"])):
        notes.append(
            "the factors bring the simulation no nearer to the run: its engine's settings are "
            "probably others than those simulated (meta.json, or options)"
        )
    return Calibrated(dataclasses.replace(result, calibration=learned), learned, tuple(notes))


def tables_only(profile: Profile) -> Profile:
    """The profile without a calibration, and with step times from its tables.

    Raises:
        SloBenchError: it has no tables of linear layers and attention.
    """
    if TABLE not in available(profile):
        raise SloBenchError(
            f"the profile of {profile.label} has no tables of linear layers and attention; only "
            f"those are calibrated (it has: {', '.join(available(profile)) or 'nothing'})"
        )
    return dataclasses.replace(profile, calibration=None, best="")


def with_factors(profile: Profile, tokens: tuple[float, ...], factors: Sequence[float]) -> Profile:
    """The profile with these factors of steps of so many tokens."""
    learned = Calibration(origin=(), tokens=tokens, factors=tuple(factors))
    return dataclasses.replace(profile, calibration=learned)


def _mean_errors(validations: Sequence[Validation]) -> dict[str, float]:
    """Error of the mean of each metric over all requests, in percent."""
    errors = {}
    for metric in METRICS:
        real, simulated = (
            np.concatenate([getattr(validation, name)[metric] for validation in validations])
            for name in ("real", "simulated")
        )
        errors[metric] = round(100 * float(np.nanmean(simulated) / np.nanmean(real) - 1), 2)
    return errors


# ---------------------------------------------------------------- equations


@dataclass(frozen=True)
class _Equations:
    """A row a span: `rest_s` + `linear_s` · factors = `real_s`."""

    linear_s: Floats  # [span, knot]
    rest_s: Floats
    real_s: Floats
    steps: int

    def rows(self, chosen: slice) -> _Equations:
        return _Equations(
            self.linear_s[chosen], self.rest_s[chosen], self.real_s[chosen], self.steps
        )

    def solved(self) -> Floats:
        """Factors: least squares with Cauchy's loss, near to each other where little is known."""
        from scipy.optimize import least_squares

        n = len(KNOTS)
        weight = 1 / (_CLOCK_S + _SHARE * self.real_s)
        differences = np.diff(np.eye(n), axis=0) / _SMOOTH

        def residuals(factors: Floats) -> Floats:
            off_s = self.linear_s @ factors + self.rest_s - self.real_s
            return np.concatenate([weight * off_s, differences @ factors])

        solution = least_squares(residuals, np.ones(n), loss="cauchy", bounds=(0.2, 5.0))
        return np.asarray(solution.x, dtype=np.float64)

    def held_out(self) -> float:
        """How far half of the spans is off with the factors of the other half; the larger one."""
        half = len(self.real_s) // 2
        halves = self.rows(slice(None, half)), self.rows(slice(half, None))
        off = []
        for fitted, others in (halves, halves[::-1]):
            ratio = (others.linear_s @ fitted.solved() + others.rest_s) / others.real_s
            off.append(abs(float(np.median(ratio)) - 1))
        return max(off)


def _equations(
    spans: Sequence[Span], replay: Replay, bare: Profile, factored: Profile
) -> _Equations:
    """The spans of one replay, whose predictions are those of `factored`."""
    if len(spans) < _MIN_SPANS:
        raise SloBenchError(
            f"the log has {len(spans)} times between first and last tokens that can be used; a "
            f"calibration needs {_MIN_SPANS}, of some dozens of requests"
        )
    curve = linear_curve(bare)
    weights = hats(KNOTS, np.maximum(1.0, curve.counts))
    parts = [Curve(curve.counts, curve.seconds * weights[:, k]) for k in range(len(KNOTS))]
    seconds_by_tokens: dict[int, Floats] = {}

    def linear_s(tokens: int) -> Floats:
        if tokens not in seconds_by_tokens:
            size = replay.host.graph_size(tokens)
            seconds_by_tokens[tokens] = np.array([part(size) for part in parts])
        return seconds_by_tokens[tokens]

    total = np.array([sum(linear_s(n) for n in span.tokens) for span in spans])
    present = factored.calibration
    factors = np.ones(len(KNOTS)) if present is None else np.array(present.factors)
    predicted_s = np.array([span.predicted_s for span in spans])
    real_s = np.array([span.real_s for span in spans])
    steps = sum(len(span.tokens) for span in spans)
    return _Equations(total, predicted_s - total @ factors, real_s, steps)


def _joined(parts: Sequence[_Equations]) -> _Equations:
    linear_s = np.concatenate([part.linear_s for part in parts])
    rest_s = np.concatenate([part.rest_s for part in parts])
    real_s = np.concatenate([part.real_s for part in parts])
    return _Equations(linear_s, rest_s, real_s, sum(part.steps for part in parts))


# ---------------------------------------------------------------- KV blocks


def _blocks(
    log: RealLog,
    profile: Profile,
    engine: str,
    settings: EngineSettings,
    host_s: float,
    progress: Progress,
) -> int | None:
    """The number of KV blocks, as the engine counts them, whose replay agrees best with the log.

    One block more or less makes another victim of a preemption, so the number is sharp where
    blocks ran out. None where they did not: twice the estimate gives the same replay.
    """
    replay = replay_of(log, profile, engine, overrides=settings, host_s=host_s)
    estimate = replay.settings.num_gpu_blocks
    assert estimate is not None
    least = int((log.prompt_tokens + log.output_tokens).max()) // replay.placement.block_size + 2
    tried: dict[int, Snapped] = {}

    def disagreements(blocks: int) -> float:
        if blocks < least:
            return np.inf
        if blocks not in tried:
            progress(f"{log.name}: {blocks:,} KV blocks")
            candidate = dataclasses.replace(settings, num_gpu_blocks=blocks)
            fewest = min((snapped.disagreements for snapped in tried.values()), default=np.inf)
            with_blocks = replay_of(log, profile, engine, overrides=candidate, host_s=host_s)
            tried[blocks] = snapped_replay(log, with_blocks, fewest)
        return tried[blocks].disagreements

    def better(best: int, others: Sequence[int]) -> int:
        return min((best, *others), key=disagreements)

    events = snapped_replay(log, replay).events
    if disagreements(estimate) == disagreements(2 * estimate) <= _DOUBTFUL * events:
        return None
    best = estimate
    for share, reach in _BLOCK_STEPS:
        shares = [k * share for k in range(-reach, reach + 1) if k]
        best = better(best, [round(best * (1 + s)) for s in sorted(shares, key=abs)])
    while True:
        nearest = better(best, [best + k for k in (1, -1, 2, -2, 3, -3, 4, -4)])
        if nearest == best:
            return best
        best = nearest
