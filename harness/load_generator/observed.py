"""What a running server's metrics tell: its load, and the times of its steps.

Metrics have no steps, but windows between two readings have means of them. Of a window with mean
batch n, the sum of inter-token latencies is n times the time of steps that only decode, and those
of steps that compute a prompt for the sequences that decode meanwhile: with P prompts of f seconds
each, a step that only decodes takes (sum - P n f) / (count - P n). A prompt's own step takes f. The
formula that step logs are fitted to (`predictors.profiles.whole_steps`) is linear in a batch's
sums, so the windows' means obey it as steps do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ...predictors.model_spec import ModelSpec
from ...predictors.placement import Placement
from ...predictors.profiles.profile_format import MeasuredDevice, Profile, Source
from ...predictors.profiles.whole_steps import LEAST_STEPS, LoggedStep, made_of, profile_of_steps
from ...predictors.specs import gpu
from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError
from ...workloads.lengths import Quantiles, mean_tokens
from ...workloads.prefixes import BLOCK_SIZE
from .server_metrics import HISTOGRAMS, NAMES, HistogramCounts, MetricsSnapshot

_NOTHING = HistogramCounts(0.0, 0.0)
_FULL_KV = 0.9  # from this share on, requests may wait for KV instead of for a place in the batch
_CHANCE = 3.0  # standard deviations, above which arrivals are burstier than Poisson's
_LEAST_REQUESTS = 30
_PARTS = 10
_MOST_OF_A_ROW = 1 << 20  # blocks
_MEMORY_SHARE = 0.9
_BLOCK_BYTES = 1 << 20  # more, as blocks are whole
_ANY_GPU = "h100-80g"  # on which a forward pass needs as much beside the weights


@dataclass(frozen=True)
class Window:
    """What happened between two readings."""

    before: MetricsSnapshot
    after: MetricsSnapshot

    @property
    def span_s(self) -> float:
        """Length of the window in seconds."""
        return self.after.time_s - self.before.time_s

    def grown(self, name: str) -> float:
        """By how much a figure grew; 0 where the server has none."""
        return self.after.figures.get(name, 0.0) - self.before.figures.get(name, 0.0)

    def mean(self, name: str) -> float:
        """Mean of a gauge at its two ends."""
        return 0.5 * (self.before.figures.get(name, 0.0) + self.after.figures.get(name, 0.0))

    def counts(self, name: str) -> HistogramCounts:
        """What was added to a histogram."""
        before, after = (s.histograms.get(name, _NOTHING) for s in (self.before, self.after))
        return after - before

    @property
    def arrivals(self) -> float:
        """Requests that ended, and those that the server has more of."""
        held = self.grown("running") + self.grown("waiting")
        ended = self.counts("e2e").count if "e2e" in self.after.histograms else self.grown("ended")
        return max(0.0, ended + held)

    @property
    def kv_usage(self) -> float:
        """Mean share of the KV cache in use."""
        return 0.5 * ((self.before.kv_usage or 0.0) + (self.after.kv_usage or 0.0))


@dataclass(frozen=True)
class ObservedServer:
    """A server as it was seen over some windows; `notes` say what could not be seen."""

    windows: tuple[Window, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> MetricsSnapshot:
        """The last snapshot of the server's metrics."""
        return self.windows[-1].after

    @property
    def span_s(self) -> float:
        """Length of all windows together, in seconds."""
        return sum(window.span_s for window in self.windows)

    def total(self, name: str) -> float:
        """Growth of a counter over all windows."""
        return sum(window.grown(name) for window in self.windows)

    @cached_property
    def requests(self) -> float:
        """Number of requests that arrived in all windows."""
        return sum(window.arrivals for window in self.windows)

    @property
    def arrival_rps(self) -> float:
        """Mean arrival rate in requests per second."""
        return self.requests / self.span_s

    def mean_s(self, name: str) -> float:
        """Mean of a histogram of seconds; NaN: nothing was observed."""
        counts = self.counts(name)
        return counts.total / counts.count if counts.count else math.nan

    def counts(self, name: str) -> HistogramCounts:
        """What was added to a histogram over all windows."""
        parts = [window.counts(name) for window in self.windows]
        bounds = sorted({le for part in parts for le, _ in part.buckets})
        sums = {le: sum(dict(part.buckets).get(le, 0.0) for part in parts) for le in bounds}
        return HistogramCounts(
            sum(part.total for part in parts),
            sum(part.count for part in parts),
            tuple(sums.items()),
        )

    def mean(self, name: str) -> float:
        """Mean of a gauge over time."""
        return sum(w.mean(name) * w.span_s for w in self.windows) / self.span_s

    def peak(self, name: str) -> float:
        """Largest reading of a gauge."""
        return max(w.after.figures.get(name, 0.0) for w in self.windows)

    @property
    def kv_usage(self) -> tuple[float, float]:
        """Mean and peak share of the KV cache in use."""
        mean = sum(window.kv_usage * window.span_s for window in self.windows) / self.span_s
        return mean, max(window.after.kv_usage or 0.0 for window in self.windows)

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens that the prefix cache held; None: the server does not tell."""
        prompts = self.total("prompt_tokens")
        if not prompts or "cached_tokens" not in self.last.figures:
            return None
        return min(1.0, self.total("cached_tokens") / prompts)

    @cached_property
    def burstiness(self) -> float:
        """Coefficient of variation of the gaps between arrivals; 1: Poisson's.

        The variance of arrivals in a window over their mean is, over long windows, the square of
        it (D. R. Cox, Renewal Theory, 1962). The variance is that of neighbouring windows (J. von
        Neumann, 1941), so that a rate that drifts is no burstiness. Where chance may have made it,
        it is 1.
        """
        counts = np.array([window.arrivals for window in self.windows])
        if len(counts) < 3 or not counts.mean():
            return 1.0
        dispersion = float((np.diff(counts) ** 2).mean() / 2 / counts.mean())
        by_chance = 1 + _CHANCE * math.sqrt(3 / (len(counts) - 1))
        return math.sqrt(dispersion) if dispersion > by_chance else 1.0

    @property
    def most_sequences(self) -> int | None:
        """The batch's limit, seen where requests waited beside free KV cache; None: never."""
        full = [
            snapshot.figures.get("running", 0.0)
            for snapshot in (window.after for window in self.windows)
            if snapshot.figures.get("waiting", 0.0) > 0 and (snapshot.kv_usage or 0.0) < _FULL_KV
        ]
        return int(max(full)) if full and max(full) >= self.peak("running") else None

    def lengths(self, name: str) -> Quantiles:
        """Lengths of requests that ended: of prompts (`name` "prompt") or answers ("output").

        Between the bounds of a histogram they are spread evenly by their logarithm, then scaled to
        the mean, which is exact. Without a histogram all have the mean.
        """
        counts = self.counts(f"{name}_length")
        if not counts.count or not counts.buckets:
            requests = self.counts("ttft" if name == "prompt" else "e2e").count
            mean = max(1.0, self.total(f"{name}_tokens") / max(requests, 1.0))
            return Quantiles((0.0, 1.0), (mean, mean))
        bounds = [(0.0, 0.0), *counts.buckets]
        knots: list[tuple[float, float]] = []  # probability, tokens
        for (low, below), (high, up_to) in pairwise(bounds):
            if up_to <= below:
                continue
            top = high if math.isfinite(high) else 2 * max(low, 1.0)
            if not knots:
                knots.append((0.0, max(1.0, low)))
            knots.append((up_to / counts.count, max(1.0, top)))
        mean_length = counts.total / counts.count
        quantiles = Quantiles((*(p for p, _ in knots[:-1]), 1.0), tuple(t for _, t in knots))
        for _ in range(4):  # where short ones are cut at one token, the mean stays a little off
            factor = mean_length / mean_tokens(quantiles, 2000)
            quantiles = Quantiles(
                quantiles.probabilities, tuple(max(1.0, factor * t) for t in quantiles.tokens)
            )
        return quantiles

    @cached_property
    def steps(self) -> list[LoggedStep]:
        """Mean steps of the windows: those that only decode, and those that compute a prompt."""
        mean_steps: list[LoggedStep] = []
        for window in self.windows:
            itl, prompts = window.counts("itl"), window.counts("ttft").count
            running = window.mean("running")
            kv_tokens = window.kv_usage * self.last.kv_tokens
            prefill_s = _prefill_s(window)
            beside = prompts * running
            if math.isnan(prefill_s):
                prefill_s, beside = 0.0, 0.0
            if itl.count > 2 * beside and running >= 0.5:
                decode_s = (itl.total - beside * prefill_s) / (itl.count - beside)
                sequences = max(1, round(running))
                if decode_s > 0:
                    mean_steps.append(LoggedStep(sequences, round(kv_tokens), (), decode_s))
            computed = window.grown("prompt_tokens") - window.grown("cached_tokens")
            if prompts > 0 and prefill_s > 0 and computed >= prompts:
                chunk = (0, round(computed / prompts))
                mean_steps.append(LoggedStep(round(running), round(kv_tokens), (chunk,), prefill_s))
        return mean_steps

    def step_errors(self) -> Floats:
        """Logarithms of seen over fitted step times of each tenth of the time that was seen, by a
        fit to the other nine; empty where these are too few.
        """
        errors: list[float] = []
        parts = np.array_split(np.arange(len(self.steps)), _PARTS)
        for part in parts:
            left_out = set(part.tolist())
            rest = [step for index, step in enumerate(self.steps) if index not in left_out]
            if len(rest) < LEAST_STEPS or not left_out:
                return np.empty(0)
            fitted = _fit(rest, "")
            costs = made_of(fitted.fits[fitted.best].coefficients)
            part_steps = [self.steps[index] for index in part.tolist()]
            predicted_s = sum(
                costs.step_s(s.decode_seqs, s.decode_kv_tokens, s.chunks) for s in part_steps
            )
            errors.append(math.log(sum(step.duration_s for step in part_steps) / predicted_s))
        return np.array(errors)

    @property
    def shared_tokens(self) -> int:
        """Tokens at the beginning of all prompts that would make as many hits in a prefix cache as
        were seen; whole blocks.
        """
        mean = mean_tokens(self.lengths("prompt"))
        return int((self.cached_share or 0.0) * mean) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def load(self) -> dict[str, Any]:
        """Settings of an experiment whose requests are like those that were seen.

        Lengths are those of the histograms, prompt and answer on their own.
        """
        prompt, output = (self.lengths(side) for side in ("prompt", "output"))
        burst, shared = self.burstiness, self.shared_tokens
        settings: dict[str, Any] = {
            "workload": ("synthetic",),
            "prompt_tokens": (_spec(_less(prompt, shared)),),
            "output_tokens": (_spec(output),),
            "arrivals": ("poisson" if burst == 1 else f"gamma(cv={burst:.3g})",),
            "rates": (self.arrival_rps,),
        }
        if shared:
            settings["sessions"] = (f"sessions(turns=1, system_prompt_tokens={shared})",)
        return settings

    def trace(self, seed: int = 0) -> list[dict[str, Any]]:
        """The requests that were seen, as lines of a trace, at times drawn in their windows."""
        rng = np.random.default_rng(seed)
        begins = [window.before.time_s for window in self.windows]
        times_s = np.concatenate(
            [
                begin + window.span_s * rng.random(round(window.arrivals))
                for begin, window in zip(begins, self.windows, strict=True)
            ]
        )
        times_s = np.sort(times_s - begins[0])
        prompt, output = (
            self.lengths(side).at(rng.random(len(times_s))) for side in ("prompt", "output")
        )
        shared = self.shared_tokens // BLOCK_SIZE
        rows: list[dict[str, Any]] = []
        for row, (time_s, n, m) in enumerate(zip(times_s.tolist(), prompt, output, strict=True)):
            lengths = {"prompt_tokens": int(n), "output_tokens": int(m)}
            request = {"arrival_s": round(time_s, 6), **lengths}
            if shared:
                first_block = shared + row * _MOST_OF_A_ROW
                blocks = range(-(-int(n) // BLOCK_SIZE))
                request["hash_ids"] = [b if b < shared else first_block + b for b in blocks]
            rows.append(request)
        return rows

    def profile(self, spec: ModelSpec, model_file: str) -> Profile:
        """Step times fitted to the windows.

        The device is what was seen of it: it holds the weights and the KV cache, and reads and
        computes at least as fast as in these steps.

        Raises:
            SloBenchError: too few windows had requests.
        """
        fitted = _fit(self.steps, self.last.model)
        kv_bytes = self.last.kv_tokens * spec.kv_bytes_per_token(fitted.kv_dtype)
        weights = spec.weight_bytes(fitted.weight_dtype)
        reserve = Placement(spec, gpu(_ANY_GPU)).reserve_bytes_per_gpu
        fastest_s = min(step.duration_s for step in self.steps)
        tokens_per_s = (self.total("prompt_tokens") + self.total("output_tokens")) / self.span_s
        device = MeasuredDevice(
            memory_bytes=float(weights + kv_bytes + reserve) / _MEMORY_SHARE + _BLOCK_BYTES,
            kv_bytes=float(kv_bytes),
            bandwidth_bytes_per_s=weights / fastest_s,
            flops=2 * spec.parameters * tokens_per_s,
        )
        return dataclasses.replace(fitted, model=spec.name, model_file=model_file, device=device)


def _less(lengths: Quantiles, tokens: int) -> Quantiles:
    """Lengths without their first `tokens`, where they have as many."""
    if not tokens:
        return lengths
    return Quantiles(lengths.probabilities, tuple(max(1.0, t - tokens) for t in lengths.tokens))


def _spec(lengths: Quantiles) -> str:
    """The distribution as text `quantiles(…)`, a source of lengths for a workload."""
    knots = {
        f"{p:.6g}": f"{t:.6g}" for p, t in zip(lengths.probabilities, lengths.tokens, strict=True)
    }
    return f"quantiles({', '.join(f'{p}={t}' for p, t in knots.items())})"


def _prefill_s(window: Window) -> float:
    """Mean time from a prompt's start in the engine to its first token; NaN: unknown."""
    prefill = window.counts("prefill")
    if prefill.count:
        return prefill.total / prefill.count
    ttft, queue = window.counts("ttft"), window.counts("queue")
    if not ttft.count:
        return math.nan
    waited_s = queue.total / queue.count if queue.count else 0.0
    return max(0.0, ttft.total / ttft.count - waited_s) or math.nan


def _fit(steps: Sequence[LoggedStep], model: str) -> Profile:
    if len(steps) < LEAST_STEPS:
        raise SloBenchError(
            f"only {len(steps)} times of steps were seen, {LEAST_STEPS} are needed: watch longer "
            "(--duration), more often (--interval), or while the server has requests"
        )
    source = Source("metrics of a running server", f"{len(steps)} times from windows")
    return profile_of_steps(steps, model=model or "observed", gpu="observed", source=source)


def observed(snapshots: Sequence[MetricsSnapshot], lost: Sequence[str] = ()) -> ObservedServer:
    """What the readings tell; `lost` says of each that was none why.

    Raises:
        SloBenchError: too little happened between them, or the server has no counters of requests.
    """
    whole = _whole(snapshots)
    lost = [*lost, *["some metrics were missing"] * (len(snapshots) - len(whole))]
    snapshots = whole
    windows: list[Window] = []
    restarts = 0
    for before, after in pairwise(snapshots):
        window = Window(before, after)
        back = any(after.figures.get(k, 0.0) < v for k, v in before.figures.items() if k in _COUNTS)
        restarts += back
        if window.span_s > 0 and not back:
            windows.append(window)
    if not windows:
        raise SloBenchError("two readings at least are needed; watch longer (--duration)")
    notes = []
    if restarts:
        notes.append(f"the server was started anew {restarts} times; what it did then is left out")
    if lost:
        why = "; ".join(dict.fromkeys(lost))
        total = len(whole) + len(lost)
        notes.append(f"{len(lost)} of {total} readings are left out: {why}")
    if absent := _absent(snapshots[-1]):
        notes.append(f"the server does not tell {', '.join(absent)}: what rests on them is missing")
    if (ranks := snapshots[-1].ranks) > 1:
        notes.append(
            f"{ranks} data-parallel ranks are taken together, as one server with the KV cache and "
            "the batch of all"
        )
    server = ObservedServer(tuple(windows), ())
    if server.requests < _LEAST_REQUESTS:
        raise SloBenchError(
            f"{server.requests:.0f} requests arrived within {server.span_s:.0f} s, "
            f"{_LEAST_REQUESTS} are needed: watch longer (--duration), or while there is load"
        )
    if not server.counts("prompt_length").buckets:
        notes.append(
            "the server has no histograms of lengths (SGLang: --collect-tokens-histogram): all "
            "prompts and answers are taken to be of mean length"
        )
    if server.cached_share is None:
        notes.append(
            f"the server does not tell hits of its prefix cache ({NAMES['cached_tokens'][0]}): it "
            "is simulated without any"
        )
    if not server.last.kv_tokens:
        notes.append("the server does not tell the size of its KV cache")
    return dataclasses.replace(server, notes=tuple(notes))


_COUNTS = ("prompt_tokens", "output_tokens")
_NEEDED_FIGURES = (*_COUNTS, "running", "waiting")
_NEEDED_HISTOGRAMS = ("ttft", "itl", "e2e")


def _whole(snapshots: Sequence[MetricsSnapshot]) -> list[MetricsSnapshot]:
    """The readings that lack nothing that one before had: some counters begin with a request.

    Raises:
        SloBenchError: the server does not count its requests.
    """
    whole: list[MetricsSnapshot] = []
    present: set[str] = set()
    for shot in snapshots:
        names = {n for n in (*_NEEDED_FIGURES, "ended") if n in shot.figures}
        names |= {n for n in _NEEDED_HISTOGRAMS if n in shot.histograms}
        if present <= names:
            present = names
            whole.append(shot)
    if not present & {"e2e", "ended"}:
        raise SloBenchError(
            "the server does not count the requests that ended: its metrics have neither "
            f"{' nor '.join((*HISTOGRAMS['e2e'], *NAMES['ended']))}; no request may have ended yet"
        )
    return whole


def _absent(shot: MetricsSnapshot) -> list[str]:
    """Metrics that are needed and not there, by the first of their names."""
    absent = [NAMES[name][0] for name in _NEEDED_FIGURES if name not in shot.figures]
    return absent + [HISTOGRAMS[name][0] for name in _NEEDED_HISTOGRAMS
                     if name not in shot.histograms]  # fmt: skip
