"""Load of a real server from its metrics, between two readings.

In the terms of U = C/Cmax + M/Mmax (`policies.load_aware`): Cmax is the most tokens a second that
any of the equal servers has computed between two looks, M/Mmax the share of KV blocks in use
(weights, which are the same everywhere, are left out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# `prometheus_client` reads every sample: 26 ms in place of 0.6 ms for 720 lines, which a gateway
# would spend every second and server while it passes on tokens.
_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)(\{.*\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# Tokens computed, not found in a cache; without that metric all tokens are counted.
_COMPUTED = 'source="local_compute"'
_PROMPTS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_ANSWERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_KV_SHARE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")


@dataclass
class Fastest:
    """The most tokens a second seen so far, of servers that are alike."""

    tokens_per_s: float = 0.0

    @property
    def s_per_token(self) -> float:
        """Compute time of a token at that speed; 0 as long as nothing was seen."""
        return 1 / self.tokens_per_s if self.tokens_per_s else 0.0


class ServerLoadMeter:
    """One server. Before two looks its load is 0."""

    def __init__(self, fastest: Fastest) -> None:
        self.kv_cache_usage = 0.0
        self.answer_tokens_per_s = 0.0
        self.kv_tokens = 0  # that its KV cache holds; 0: unknown
        self._fastest = fastest
        self._seen: tuple[float, float, float] | None = None  # when, prompt and answer tokens

    @property
    def s_per_token(self) -> float:
        """Return seconds per token of the fastest server."""
        return self._fastest.s_per_token

    def look(self, text: str, now_s: float) -> None:
        """Its metrics, in Prometheus' format, as they are now."""
        sums: dict[str, float] = {}
        computed: float | None = None
        for name, labels, value in _SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "vllm:prompt_tokens_by_source_total" and _COMPUTED in labels:
                computed = (computed or 0.0) + float(value)
            elif name == "vllm:cache_config_info":
                known = dict(_LABEL.findall(labels))
                sizes = known.get("num_gpu_blocks", ""), known.get("block_size", "")
                if all(size.isdecimal() for size in sizes):
                    self.kv_tokens = int(sizes[0]) * int(sizes[1])
        if "sglang:max_total_num_tokens" in sums:
            self.kv_tokens = int(sums["sglang:max_total_num_tokens"])
        self.kv_cache_usage = _first(sums, _KV_SHARE)
        prompts = _first(sums, _PROMPTS) if computed is None else computed
        self._moved(now_s, prompts, _first(sums, _ANSWERS))

    def _moved(self, now_s: float, prompts: float, answers: float) -> None:
        seen, self._seen = self._seen, (now_s, prompts, answers)
        if seen is None or now_s <= seen[0] or prompts < seen[1] or answers < seen[2]:
            return  # the first look, or the server has begun anew
        span_s = now_s - seen[0]
        self.answer_tokens_per_s = (answers - seen[2]) / span_s
        speed = (prompts - seen[1]) / span_s + self.answer_tokens_per_s
        self._fastest.tokens_per_s = max(self._fastest.tokens_per_s, speed)


def _first(sums: dict[str, float], names: tuple[str, ...]) -> float:
    return next((sums[name] for name in names if name in sums), 0.0)
