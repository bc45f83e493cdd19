"""What one instance carries if it only prefills, and if it only decodes: the load of each phase.

Source: Zhong et al., "DistServe" (OSDI 2024), §3.1 (Eq. 1: time to first token of a queue of
prompts), §3.2 (batch of a decode instance) and §4.1 (goodput of one instance for each phase,
and Algorithm 1: parallelism and number of instances of each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ...predictors.placement import Placement
from ...predictors.roofline import StepTime
from ...workloads.request import RequestType
from ...workloads.workload import Workload

_BATCH_TOKENS = 2048  # of short prompts that are prefilled together
_MOST_SEQUENCES = 256  # in a decode batch
_MOST_PROMPTS = 500  # whose time is computed
_TIE = 1e-9


@dataclass(frozen=True)
class PhaseSplit:
    """Instances of each phase and their tensor-parallel degrees."""

    prefill_instances: int
    decode_instances: int
    prefill_tp: int
    decode_tp: int


@dataclass(frozen=True)
class PhaseCapacity:
    """Requests a second that one instance is estimated to carry within the SLO; `others` are those
    of instances with other tensor-parallel degrees. A phase whose SLO is out of reach, whatever the
    load (`in_slo`: prefill, decode), counts at full use.
    """

    prefill_rps: float
    decode_rps: float
    tp: int = 1
    in_slo: tuple[bool, bool] = (True, True)
    others: tuple[PhaseCapacity, ...] = ()

    def prefill_instances(self, instances: int) -> int:
        """How many of `instances` (2 or more) prefill where the slower phase carries the most."""
        alike = self.split(instances, self.tp, self.tp)
        assert alike is not None
        return alike.prefill_instances

    def split(self, instances: int, prefill_tp: int = 0, decode_tp: int = 0) -> PhaseSplit | None:
        """The split of the GPUs of `instances` at which the slower phase carries the most; splits
        with an SLO out of reach come last, and of equal ones that with this `tp` is first. A degree
        that is not 0 is kept. None: there is no such split.
        """
        gpus, best, best_score = instances * self.tp, None, (-1, 0.0)
        degrees = (self, *self.others)
        prefills = [degree for degree in degrees if prefill_tp in (0, degree.tp)]
        decodes = [degree for degree in degrees if decode_tp in (0, degree.tp)]
        for prefill, decode in product(prefills, decodes):
            within = prefill.in_slo[0] + decode.in_slo[1]
            for n_prefill in range(1, (gpus - decode.tp) // prefill.tp + 1):
                n_decode, rest = divmod(gpus - n_prefill * prefill.tp, decode.tp)
                rps = min(n_prefill * prefill.prefill_rps, n_decode * decode.decode_rps)
                if not rest and (within, rps) > (best_score[0], best_score[1] * (1 + _TIE)):
                    best_score = within, rps
                    best = PhaseSplit(n_prefill, n_decode, prefill.tp, decode.tp)
        return best


def phase_capacity(
    workload: Workload, placement: Placement, step_time: StepTime
) -> PhaseCapacity | None:
    """Capacity of one instance in each phase, from the lengths and SLOs of `workload`; None without
    a request that generates.

    A prefill instance is a queue (the paper's Eq. 1, with the spread of prompts) in which 90 % of
    the requests meet the TTFT, the paper's goal; waits are taken to be exponential. A decode
    instance runs the largest batch that fits into its KV memory and whose step meets the TPOT.
    Where an SLO is out of reach, or there is none, the phase counts at full use. Hits of a prefix
    cache and transfers of KV are not counted.
    """
    rows = np.flatnonzero(workload.request_type == RequestType.GENERATE)[:_MOST_PROMPTS]
    if not len(rows):
        return None
    prompts = workload.prompt_tokens[rows]
    prefill_s = np.array([_prefill_s(int(tokens), step_time) for tokens in prompts])
    kv_tokens = float(prompts.mean() + workload.output_tokens[rows].mean() / 2)
    max_sequences = max(1, min(_MOST_SEQUENCES, int(placement.kv_tokens / kv_tokens)))
    ttft_s, tpot_s = _typical(workload.ttft_slo_s[rows]), _typical(workload.tpot_slo_s[rows])
    return PhaseCapacity(
        _queue_rps(prefill_s, ttft_s),
        _decode_tokens_per_s(kv_tokens, max_sequences, tpot_s, step_time)
        / float(workload.output_tokens[rows].mean()),
        placement.tp,
        (
            bool(prefill_s.mean() < ttft_s),
            step_time.step_s(1, round(kv_tokens), ()) <= tpot_s,
        ),
    )


def _typical(bounds_s: NDArray[np.float64]) -> float:
    """Median of the bounds of an SLO; infinite where most requests have none."""
    return float(np.sort(bounds_s)[len(bounds_s) // 2])


def _prefill_s(prompt_tokens: int, step_time: StepTime) -> float:
    """Seconds of a prompt, in a batch with others of its length where it is short."""
    prompts = max(1, _BATCH_TOKENS // prompt_tokens)
    return step_time.step_s(0, 0, ((0, prompt_tokens),) * prompts) / prompts


def _queue_rps(service_s: NDArray[np.float64], ttft_s: float) -> float:
    """Rate at which mean service and the 90 % quantile of waits together take `ttft_s`; the mean
    wait is that of Pollaczek and Khinchine.
    """
    mean_s = float(service_s.mean())
    wait_s = (ttft_s - mean_s) / math.log(10)
    if wait_s <= 0 or math.isinf(wait_s):
        return 1 / mean_s
    return 2 * wait_s / (float((service_s**2).mean()) + 2 * mean_s * wait_s)


def _decode_tokens_per_s(
    kv_tokens: float, max_sequences: int, tpot_s: float, step_time: StepTime
) -> float:
    """Output tokens a second of the largest batch whose step meets `tpot_s`."""

    def step_s(sequences: int) -> float:
        return step_time.step_s(sequences, round(sequences * kv_tokens), ())

    sequences = max_sequences
    if step_s(1) <= tpot_s:
        low, high = 1, max_sequences
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if step_s(middle) <= tpot_s else (low, middle - 1)
        sequences = low
    return sequences / step_s(sequences)
