"""Choose the victim whose preemption costs the fewest SLOs: requests that miss theirs anyway, then
those that can wait.

Source: Collocation, Algorithm 3 (priority by slack and cost of recomputation; requests about to
finish are spared), with its 1 / (slack + ε), which diverges and changes sign around zero, replaced
by classes and seconds.
"""

from __future__ import annotations

import math

from ...core.policy import Key
from ...core.state import RequestState
from ...core.view import View

_LOST, _CAN_WAIT, _MUST_GO_ON, _NEARLY_DONE = range(4)


class SpeedEstimate:
    """Present decode and prefill speed of an instance; computed once for all victims of a
    moment.
    """

    def __init__(self) -> None:
        self._moment: tuple[float, int] | None = None
        self.decode_s = 0.0  # one token
        self.prefill_s = 0.0  # one token

    def look(self, view: View, chunk_tokens: int) -> None:
        """Bring both up to the view's moment."""
        moment = view.now_s, view.n_running
        if moment == self._moment:
            return
        self._moment = moment
        step_s = view.predict.step_s
        self.decode_s = step_s(view.n_decoding, view.decode_kv_tokens, ())
        self.prefill_s = step_s(0, 0, ((0, chunk_tokens),)) / chunk_tokens


def keep_key(r: RequestState, view: View, pace: SpeedEstimate, nearly_done_tokens: int) -> Key:
    """Result of `Policy.victim_key`. All slack is in seconds, and no key divides by it. First
    requests that miss their SLO even if they stay (the longest to go first), then those that meet
    it even if they are prefilled again (the most slack first), then those that would not (the least
    harmed first), last those with at most `nearly_done_tokens` to go.
    """
    tokens = view.predict.output_tokens(r)
    emitted = view.emitted_tokens(r)
    left = max(0, tokens - emitted)
    if emitted and left <= nearly_done_tokens:
        return (_NEARLY_DONE, float(left))
    end_s = view.now_s + left * pace.decode_s
    if emitted:
        kv_tokens = r.prompt_tokens + emitted - 1
        spare_s = _last_token_due_s(r, tokens) - end_s
    else:
        kv_tokens = view.kv_tokens(r)
        prefill_s = max(0, r.target_tokens - kv_tokens) * pace.prefill_s
        spare_s = min(
            _last_token_due_s(r, tokens) - end_s - prefill_s,
            r.arrival_s + r.slo.ttft_s - view.now_s - prefill_s,
        )
    if spare_s < 0:
        return (_LOST, -float(left))
    again_s = spare_s - kv_tokens * pace.prefill_s
    return (_CAN_WAIT if again_s >= 0 else _MUST_GO_ON, -again_s)


def _last_token_due_s(r: RequestState, tokens: int) -> float:
    """When token number `tokens` must be out; infinite if never."""
    slo = r.slo
    due_s = min(r.arrival_s + slo.e2e_s, slo.deadline_s)
    if slo.tpot_s < math.inf:
        first_s = r.first_token_s
        if first_s != first_s:  # not known here
            first_s = r.arrival_s + slo.ttft_s
        due_s = min(due_s, first_s + slo.tpot_s * (tokens - 1))
    return due_s
