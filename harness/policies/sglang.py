"""SGLang: radix prefix cache, longest cached prefix first, prefill before decode.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs"
(NeurIPS 2024), §3, and the defaults of the SGLang server.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.counters import OVERTAKES
from ..core.decisions import Limits
from ..core.policy import Key, Policy, parameter
from ..core.state import RequestState
from ..core.view import View


@dataclass(frozen=True)
class Sglang(Policy):
    """Requests whose prefix is cached go first (queues above 128: first come, first served).

    A request enters if its prompt fits together with `new_token_ratio` of all tokens that the batch
    could still produce. The server lets that ratio decay from 0.7 to 0.1 in the course of 600
    steps; here it has its final value. Under KV pressure the request with the fewest output tokens
    is retracted, of equals the one with the longest prompt.
    """

    queue_order = "prefix-cache"

    chunked_prefill_tokens: int = parameter(8192, 16, 131072, log=True)
    max_running_requests: int = parameter(256, 1, 8192, log=True)
    new_token_ratio: float = parameter(0.1, 0.0, 1.0)

    def mechanisms(self) -> dict[str, str]:
        return {OVERTAKES: "requests that began before older ones"}

    def limits(self, view: View) -> Limits:
        return Limits(self.chunked_prefill_tokens, self.max_running_requests, mixed_batches=False)

    def queue_key(self, r: RequestState, view: View) -> Key:
        return (-view.cached_tokens(r), r.arrival_s)

    def victim_key(self, r: RequestState, view: View) -> Key:
        return (view.emitted_tokens(r), -r.prompt_tokens)

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        tokens = self.new_token_ratio * (view.max_future_kv_tokens + r.max_output_tokens)
        return int(tokens) // view.block_size if view.n_running else 0
