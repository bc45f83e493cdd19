"""How many tokens' KV must fit beside the layers for a workload to be served."""

from __future__ import annotations

import numpy as np

from ...predictors.specs import ModelSpec
from ...workloads.base import TraceSource
from ...workloads.source import load_source

DRAWN = 2_000  # requests
_BLOCK = 16  # KV is held in blocks; a request may leave one partly empty


def kv_tokens_of(workload: str, model: ModelSpec, batch: int, seed: int) -> int:
    """Tokens of the longest of 2,000 requests (a trace: of all), or of `batch` mean ones if more.

    Requests beyond the model's context are left out: no map serves them.

    Raises:
        SloBenchError: there is no such workload, or a file cannot be read.
    """
    source = load_source(workload)
    if isinstance(source, TraceSource) or source.has_arrivals:
        made = source.make(seed=seed)
    else:
        made = source.make(rate_rps=None if source.closed_loop else 1.0, requests=DRAWN, seed=seed)
    tokens = np.asarray(made.prompt_tokens) + np.asarray(made.output_tokens)
    tokens = tokens[tokens <= model.context_tokens]
    if not len(tokens):
        return model.context_tokens
    return int(max(tokens.max(), batch * tokens.mean())) + _BLOCK
