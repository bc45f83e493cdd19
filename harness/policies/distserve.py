"""DistServe: prompts on some instances, answers on others, KV goes over between them.

Source: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving" (OSDI 2024), §3 and §4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.policy import knob
from .vllm import Vllm


@dataclass(frozen=True)
class DistServe(Vllm):
    """First come, first served everywhere; each request goes where the fewest are (§4.3).

    Deviates: every instance schedules as vLLM does, where the paper batches prompts up to a length
    that saturates the GPU. Numbers of instances are knobs: the paper's search for them, and for
    the parallelism of each kind, is not part of it. All instances are placed alike.
    """

    prefill_instances: int = knob(1, 1, 64)
    decode_instances: int = knob(1, 1, 64)
