"""Options of vLLM for speculative decoding (`vllm.config.SpeculativeConfig`, 0.27 and 0.32)."""

from __future__ import annotations

import json
from math import inf

from ....predictors.speculation import Speculation
from ....workloads.errors import SloBenchError

_MOST_SEQS = 1 << 20  # more than any batch


def speculative_args(speculation: Speculation | None) -> list[str]:
    """Words of vLLM's command line. The acceptance is the server's own.

    Raises:
        SloBenchError: EAGLE without the folder of its head.
    """
    if speculation is None:
        return []
    tokens, method = speculation.tokens, speculation.method
    config: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if method.startswith("eagle"):
        if speculation.head is None:
            raise SloBenchError(
                f"a server needs the checkpoint of the {method} head: {method}=FOLDER:{tokens}"
            )
        config["model"] = speculation.head
    elif method not in ("ngram", "mtp"):
        config |= {"method": "draft_model", "model": method}
    if speculation.most_seqs != inf:
        most = int(speculation.most_seqs)
        ranges = [[1, most, tokens]] if most else []
        config["num_speculative_tokens_per_batch_size"] = [*ranges, [most + 1, _MOST_SEQS, 0]]
    return [f"--speculative-config={json.dumps(config)}"]
