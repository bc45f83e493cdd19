"""How those who measured closed loops sent their load, as far as their tables do not say.

InferenceX draws lengths evenly from 80 % to 100 % of the nominal ones and sends ten requests per
client (its published recipes). Of other tables only nominal lengths are known. Requests of exactly
equal lengths stay in step with each other for ever. The rows of SGLang 0.5.1 show that they did;
those of vLLM that they did not, for which lengths from 97 % on stand (both seen on the Qwen3-32B
rows of H100).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....predictors.model_spec import ModelSpec


@dataclass(frozen=True)
class Client:
    """The load generator of a closed loop.

    Attributes:
        shortest: the shortest length, as a share of the nominal one; lengths are drawn evenly.
        requests_each: requests of a client, one after the other; the first ones come together.
        delay_s: mean seconds between the end of an answer and the engine's having the next request.
        stagger_s: seconds between the first requests of two clients.
        kv_dtypes: KV cache format by GPU, where it is not 16-bit.
        async_scheduling: whether the next step is scheduled during the present one; None: by
            version.
    """

    shortest: float = 0.97
    requests_each: int = 10
    delay_s: float = 0.01
    stagger_s: float = 0.0005
    kv_dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    async_scheduling: bool | None = None

    def kv_dtype(self, gpu: str, model: ModelSpec) -> str:
        """KV cache format; latent attention keeps 16 bits on Hopper GPUs, which lack FP8 kernels
        for it.
        """
        hopper = gpu.startswith("h")
        return "bf16" if model.latent and hopper else self.kv_dtypes.get(gpu, "bf16")


INFERENCEX = "inferencex"
# KV formats are told by the rows whose TTFT shows how many requests found room.
_INFERENCEX = Client(
    shortest=0.8, kv_dtypes={"h200-141g": "fp8", "b200": "fp8"}, async_scheduling=True
)
_OTHER = Client()
_IN_STEP = Client(shortest=1.0)


def client_of(harness: str, engine: str, version: str) -> Client:
    """The client of a harness before an engine; what is usual for an unknown harness."""
    if harness == INFERENCEX:
        return _INFERENCEX
    in_step = harness and engine == "sglang" and version.startswith("0.5.1.")
    return _IN_STEP if in_step else _OTHER
