"""What a client tells a server of ours about a request, beyond the fields of the OpenAI API.

The names are flat and the values plain, because vLLM takes nothing nested in `vllm_xargs`; SGLang
gets the same in `custom_params`. Servers without our plugin leave them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...workloads.request import NEVER_S, Request, Slo

VLLM_FIELD = "vllm_xargs"
SGLANG_FIELD = "custom_params"

# In `kv_transfer_params` of vLLM, where prefill and decode are split: the name of the transfer,
# This server writes its KV to the shared folder, or reads it from there.
STORE_KV = "slo_bench_store"
LOAD_KV = "slo_bench_load"

# A request that a policy lets go ends with status 503, or an error in its stream, that begins with:
REJECTED = "slo_bench: rejected"
DROPPED = "slo_bench: dropped"
# A request about which a policy raised an error ends with status 500, likewise:
FAILED = "slo_bench: the policy failed"
# A request returned to its controller ends with status 503; our gateway reroutes it.
OFFLOADED = "slo_bench: offloaded"

# How long ago a request had arrived when it was sent to this server, in seconds.
WAITED_FIELD = "waited_s"

# The larger, the more urgent. The field of the OpenAI bodies orders vLLM's own queue the other way.
PRIORITY_FIELD = "priority"
_MOST_URGENT = 2**31

_BOUNDS = ("ttft_slo_s", "tpot_slo_s", "e2e_slo_s", "deadline_in_s")

_LENGTH_FIELDS = ("predicted_output_tokens", "predicted_output_tokens_p90")

Wire = dict[str, str | int | float]


class PredictedLength(NamedTuple):
    """How long an answer will be, as the client predicts it: tokens that half of such answers do
    not exceed, and nine in ten.
    """

    median: int
    p90: int

    def to_wire(self) -> Wire:
        """Wire format of the request, added to the values of `to_wire` of the base class."""
        return dict(zip(_LENGTH_FIELDS, self, strict=True))


def to_wire(request: Request) -> Wire:
    """Wire format of the request, added to the values of `to_wire` of the base class."""
    slo = request.slo
    bounds = (slo.ttft_s, slo.tpot_s, slo.e2e_s, slo.deadline_s - request.arrival_s)
    wire: Wire = {"row": request.id, "max_output_tokens": request.max_output_tokens}
    if request.class_name:
        wire["class_name"] = request.class_name
    if request.priority:
        wire[PRIORITY_FIELD] = request.priority
    for name, seconds in zip(_BOUNDS, bounds, strict=True):
        if math.isfinite(seconds):
            wire[name] = seconds
    return wire


def slo_from_wire(wire: Mapping[str, Any], arrival_s: float) -> Slo:
    """The bounds of a request that arrived at `arrival_s` on the server's clock.

    What is absent, or no number, asks nothing.
    """
    ttft_s, tpot_s, e2e_s, deadline_in_s = (_seconds(wire.get(name)) for name in _BOUNDS)
    return Slo(ttft_s, tpot_s, e2e_s, arrival_s + deadline_in_s)


def waited_s(wire: Mapping[str, Any]) -> float:
    """How long before it was sent to this server a request had arrived; 0 if nothing is said."""
    wait_s = _seconds(wire.get(WAITED_FIELD), 0.0)
    return wait_s if 0 < wait_s < math.inf else 0.0


def priority_from_wire(wire: Mapping[str, Any]) -> int:
    """The priority of a request; 0 if nothing is said, or no such number."""
    priority = _seconds(wire.get(PRIORITY_FIELD), 0.0)
    return int(priority) if abs(priority) < _MOST_URGENT else 0


def predicted_length_from_wire(wire: Mapping[str, Any]) -> PredictedLength | None:
    """What the client predicts; None: nothing, or no such numbers."""
    median, p90 = (_seconds(wire.get(name), 0.0) for name in _LENGTH_FIELDS)
    if not 1 <= median < math.inf:
        return None
    return PredictedLength(int(median), int(p90) if median <= p90 < math.inf else int(median))


def _seconds(value: object, otherwise: float = NEVER_S) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    return otherwise
