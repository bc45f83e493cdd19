"""DistServe: prompts on some instances, answers on others, KV goes over between them.

Source: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving" (OSDI 2024), §3 and §4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shared.disaggregated import Apart


@dataclass(frozen=True)
class DistServe(Apart):
    """First come, first served everywhere; each request goes where the fewest are (§4.3).

    Deviates: every instance schedules as vLLM does, where the paper batches prompts up to a length
    that saturates the GPU. All instances are placed alike.
    """
