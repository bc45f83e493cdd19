"""What bounds a server: KV cache, prompts, decoding, or more load than it can serve."""

from __future__ import annotations

from .placement import Placement
from .roofline import StepTime

KV_BOUND, OVERLOADED = "kv-bound", "overloaded"
PREFILL_BOUND, DECODE_BOUND = "prefill-bound", "decode-bound"
_WAITING = 0.5  # of the time in the system
_SLOWED = 1.5  # times the step that decodes alone


def regime_of(
    placement: Placement,
    step_time: StepTime,
    *,
    clients: int | None,
    running: float,
    prompt_tokens: float,
    output_tokens: float,
    ttft_s: float,
    tpot_s: float,
    e2e_s: float,
) -> str:
    """The regime of one instance, by its prediction and its inputs (means over requests).

    KV-bound: a closed loop with more `clients` than fit. Overloaded: an open loop (`clients` None)
    whose requests wait longer than they are served. Prefill-bound: steps take 1.5 times what
    decoding `running` requests alone would.
    """
    if clients is not None and clients * (prompt_tokens + output_tokens) > placement.kv_tokens:
        return KV_BOUND
    if clients is None and ttft_s > _WAITING * e2e_s:
        return OVERLOADED
    together = max(1, round(running))
    kv_tokens = round(together * (prompt_tokens + output_tokens / 2))
    alone_s = step_time.step_s(together, kv_tokens, ())
    return PREFILL_BOUND if tpot_s > _SLOWED * alone_s else DECODE_BOUND
