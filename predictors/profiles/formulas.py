"""Step times that a profile stands for: its tables, or one of the formulas fitted to them.

Formulas are linear in their coefficients, and so can be fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...predictors import stretches
from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError, UnknownNameError
from ..operators.assembly import NEWEST_SERVER, OPERATORS, default_step_time
from ..operators.server_version import ServerVersion
from ..placement import Placement
from ..profiles import whole_steps
from ..roofline import Coefficients, OperatorRoofline, StepTime, Work
from ..scaled import calibrated
from ..step_time import StepTimeModel, work
from .build_model import default_host, table_step_time
from .observations import Observations, placement_of
from .profile_format import Profile
from .step_time_table import Host


@dataclass(frozen=True)
class Formula:
    """Names of the coefficients, what each multiplies, and the model they make.

    `whole`: fitted to whole steps, in which the host's share is; no more is added for it.
    """

    title: str
    coefficients: tuple[str, ...]
    terms: Callable[[Profile, Observations], Floats]  # [row, coefficient], seconds
    step_time: Callable[[Profile, Mapping[str, float], Host], StepTime]
    whole: bool = False


# -------------------------------------------------------------------- nine terms

_NINE = ("c0", "c1", "c2", "c2_mixed", "c3", "c4", "c5_s", "c6_s", "c7_s", "c8_s")


def _nine_terms(profile: Profile, steps: Observations) -> Floats:
    peak = work(placement_of(profile))
    read_s = np.full(len(steps), peak.weight_read_s)
    compute_s = peak.linear_s_per_token * steps.tokens
    kv_s = peak.kv_read_s_per_token * steps.kv_tokens
    mixed = steps.chunks > 0
    return np.column_stack(
        [
            np.maximum(read_s, compute_s),
            np.minimum(read_s, compute_s),
            np.where(mixed, 0.0, kv_s),
            np.where(mixed, kv_s, 0.0),
            peak.attention_s_per_pair * steps.pairs,
            peak.kv_read_s_per_token * steps.prefill_kv_tokens,
            steps.tokens,
            steps.sequences + steps.chunks,
            mixed.astype(np.float64),
            np.ones(len(steps)),
        ]
    )


def _nine(profile: Profile, coefficients: Mapping[str, float], host: Host) -> StepTime:
    values = dict(coefficients)
    # A step with prefill is too large for a CUDA graph, all but always.
    values["c7_s"] += host.launch_s
    return OperatorRoofline.of(
        Coefficients(**{name: values[name] for name in _NINE}),
        work(placement_of(profile)),
        host.step_s,
    )


# -------------------------------------------------------------------- Ascendra's five


@dataclass(frozen=True)
class AscendraStepTime(stretches.EvenSpans):
    """t = C1 (tM + tF) + C2 max(tM, tF) + C3 tM + C4 tF + C5, with tM the time of all bytes and tF
    that of all operations at the hardware's peak (Ascendra, §4 and appendix A).

    FLOPs count a multiplication and an addition; chunks attend causally to themselves.
    """

    peak: Work
    c1: float
    c2: float
    c3: float
    c4: float
    c5_s: float
    host: Host

    def seconds(self, memory_s: float, compute_s: float) -> float:
        """Seconds of a step with this byte time and operation time."""
        larger_s = memory_s if memory_s >= compute_s else compute_s
        return (
            self.c1 * (memory_s + compute_s)
            + self.c2 * larger_s
            + self.c3 * memory_s
            + self.c4 * compute_s
            + self.c5_s
            + self.host.step_s
        )

    def sides_s(
        self, seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> tuple[float, float]:
        """Byte and operation time of a step."""
        peak = self.peak
        memory_s = peak.weight_read_s + peak.kv_read_s_per_token * kv_tokens
        compute_s = peak.linear_s_per_token * seqs + peak.attention_s_per_pair * kv_tokens
        for context, tokens in chunks:
            memory_s += peak.kv_read_s_per_token * (context + tokens)
            compute_s += peak.linear_s_per_token * tokens
            compute_s += peak.attention_s_per_pair * tokens * (context + 0.5 * tokens)
        return memory_s, compute_s

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        step_s = self.seconds(*self.sides_s(decode_seqs, decode_kv_tokens, chunks))
        return step_s + self.host.launch_s if chunks else step_s

    def _stretches(self, seqs: int, kv_tokens: int) -> Iterator[stretches.Stretch]:
        """Bytes and operations both grow evenly; the larger may change once."""
        memory_growth_s = self.peak.kv_read_s_per_token * seqs
        compute_growth_s = self.peak.attention_s_per_pair * seqs
        while True:
            memory_s, compute_s = self.sides_s(seqs, kv_tokens, ())
            first_s = self.seconds(memory_s, compute_s)
            by_memory = memory_s > compute_s or (
                memory_s == compute_s and memory_growth_s >= compute_growth_s
            )
            growth_s = (
                (self.c1 + self.c3) * memory_growth_s
                + (self.c1 + self.c4) * compute_growth_s
                + self.c2 * (memory_growth_s if by_memory else compute_growth_s)
            )
            lead_s = abs(memory_s - compute_s)
            gain_s = memory_growth_s - compute_growth_s
            if by_memory:
                gain_s = -gain_s
            here = int(lead_s / gain_s) + 1 if gain_s > 0 else stretches.ENDLESS
            yield here, first_s, growth_s
            kv_tokens += here * seqs


def ascendra_terms(memory_s: Floats, compute_s: Floats) -> Floats:
    """What C1 to C5 multiply, [row, coefficient], from the byte and operation time of each step."""
    both, larger = memory_s + compute_s, np.maximum(memory_s, compute_s)
    return np.column_stack([both, larger, memory_s, compute_s, np.ones(len(memory_s))])


def _ascendra_terms(profile: Profile, steps: Observations) -> Floats:
    peak = work(placement_of(profile))
    kv_tokens = steps.kv_tokens + steps.prefill_kv_tokens
    return ascendra_terms(
        peak.weight_read_s + peak.kv_read_s_per_token * kv_tokens,
        peak.linear_s_per_token * steps.tokens
        + peak.attention_s_per_pair * (steps.kv_tokens + steps.pairs),
    )


def _ascendra(profile: Profile, coefficients: Mapping[str, float], host: Host) -> StepTime:
    return AscendraStepTime(work(placement_of(profile)), host=host, **coefficients)


# -------------------------------------------------------------------- DistServe's two phases


@dataclass(frozen=True)
class PhasedStepTime(stretches.EvenSpans):
    """Prefill a + b Σl + c Σl²; decode a + b · KV tokens + c · sequences (DistServe, appendix A).

    Decode has two sets of coefficients, for batches up to `large_from` sequences and above. A
    chunk after a context of k tokens costs what the squares say: (k + l)² - k². Both phases in a
    step: their sum less the smaller constant, for the weights are read once.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    large_from: float
    host: Host

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        a, b, c = self.small if decode_seqs < self.large_from else self.large
        decode_s = a + b * decode_kv_tokens + c * decode_seqs if decode_seqs else 0.0
        if not chunks:
            return decode_s + self.host.step_s
        pa, pb, pc = self.prefill
        prefill_s = pa
        for context, tokens in chunks:
            prefill_s += pb * tokens + pc * tokens * (2 * context + tokens)
        once_s = min(a, pa) if decode_seqs else 0.0
        return decode_s + prefill_s - once_s + self.host.step_s + self.host.launch_s

    def _growth_s(self, seqs: int) -> float:
        return (self.small if seqs < self.large_from else self.large)[1] * seqs


_PHASES = tuple(f"{phase}_{name}" for phase in ("prefill", "small", "large") for name in "abc")


def _phase_terms(profile: Profile, steps: Observations) -> Floats:
    """One set for decode: the table's rows do not say where a kernel changes."""
    prefill, decode = steps.chunks > 0, (steps.sequences > 0) & (steps.chunks == 0)
    squares = steps.chunks * steps.chunk_tokens * (2 * steps.context_tokens + steps.chunk_tokens)
    zero = np.zeros(len(steps))
    return np.column_stack(
        [
            prefill,
            np.where(prefill, steps.chunks * steps.chunk_tokens, 0.0),
            np.where(prefill, squares, 0.0),
            decode,
            steps.kv_tokens,
            steps.sequences,
            *(zero, zero, zero),
        ]
    )


def _phased(profile: Profile, coefficients: Mapping[str, float], host: Host) -> StepTime:
    def three(phase: str) -> tuple[float, float, float]:
        return coefficients[f"{phase}_a"], coefficients[f"{phase}_b"], coefficients[f"{phase}_c"]

    large_from = coefficients.get("large_from", float("inf"))
    return PhasedStepTime(three("prefill"), three("small"), three("large"), large_from, host)


FORMULAS = {
    "nine": Formula(
        "nine roofline terms (docs/measurements/step-time.md)", _NINE, _nine_terms, _nine
    ),
    "ascendra": Formula(
        "Ascendra's five coefficients",
        ("c1", "c2", "c3", "c4", "c5_s"),
        _ascendra_terms,
        _ascendra,
    ),
    whole_steps.NAME: Formula(
        "sums over the batch, fitted to the steps of a server",
        whole_steps.COEFFICIENTS,
        lambda profile, steps: whole_steps.terms(steps),
        lambda profile, coefficients, host: whole_steps.made_of(coefficients),
        whole=True,
    ),
    "distserve": Formula("DistServe's two phases", _PHASES, _phase_terms, _phased),
}


TABLE = "table"


def available(profile: Profile) -> tuple[str, ...]:
    """The formulas that the profile can be used with; tables first."""
    tables = (TABLE,) if {"linear", "attention"} <= set(profile.tables) else ()
    without_tables = (OPERATORS,) if profile.best == OPERATORS else ()
    return (*tables, *profile.fits, *without_tables)


def is_whole(profile: Profile) -> bool:
    """Are its step times of whole steps, the host's share included?"""
    formulas = available(profile)
    chosen = profile.best or (formulas[0] if formulas else TABLE)
    return chosen in FORMULAS and FORMULAS[chosen].whole


def profiled_step_time(
    profile: Profile,
    host: Host | None = None,
    formula: str | None = None,
    placement: Placement | None = None,
) -> StepTimeModel:
    """Step times from the profile, by `formula` or else by its best one; with its calibration.

    Operators are those of `placement`, or of the profile's model on its GPU; their host times are
    those of the profile's server, unless `host` adds some to a step.

    Raises:
        SloBenchError: it has no such formula, or none at all.
    """
    formulas = available(profile)
    if not formulas:
        raise SloBenchError(
            f"the profile of {profile.label} gives no step times yet: it needs tables of linear "
            "layers and attention (`slo-bench profile import … --add`) or a fit (`slo-bench "
            "profile fit`)"
        )
    chosen = formula or profile.best or formulas[0]
    if chosen not in formulas:
        raise UnknownNameError(f"formula in the profile of {profile.label}", chosen, formulas)
    host = default_host() if host is None else host
    step_time: StepTime
    projects = ", ".join(dict.fromkeys(source.project for source in profile.sources))
    if chosen == TABLE:
        step_time = table_step_time(profile, host)
    elif chosen == OPERATORS:
        server = NEWEST_SERVER
        if profile.scope is not None and profile.scope.server:
            server = ServerVersion.parse(profile.scope.server)
        placement = placement or placement_of(profile)
        timed = default_step_time(placement, server, host_s=host.step_s or None)
        step_time, projects = timed.model, timed.provenance
    else:
        step_time = FORMULAS[chosen].step_time(profile, profile.fits[chosen].coefficients, host)
    provenance = f"profile: {profile.label}, {chosen} ({projects})"
    if profile.calibration is not None:
        provenance += f", calibrated on {', '.join(profile.calibration.origin)}"
        if TABLE not in formulas:  # whose calibration is in the linear layers already
            step_time = calibrated(step_time, profile.calibration)
    return StepTimeModel(step_time, fitted=True, provenance=provenance)
