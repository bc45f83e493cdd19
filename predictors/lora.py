"""Low-rank adapters beside one model (Hu et al. 2021, LoRA): bytes, loading and step time.

An adapter of rank r adds B A to each matrix of a layer, A of r rows and B of r columns, in 16 bits.
All adapters are in host memory; some have slots on the GPU, as vLLM's `--max-loras` (S-LoRA, Sheng
et al. 2023, keeps them in host memory likewise).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..workloads.errors import SloBenchError
from .dtypes import SIXTEEN_BIT_BYTES
from .model_spec import ModelSpec
from .profiles.step_time_table import TableStepTime
from .roofline import OperatorRoofline
from .specs import GpuSpec, LinkSpec
from .step_time import StepTimeModel


@dataclass(frozen=True)
class Lora:
    """`slots` adapters of one `rank` on the GPUs of an instance of `model`, which share each.

    Raises:
        SloBenchError: the model is not a dense decoder.
    """

    model: ModelSpec
    slots: int
    rank: int
    gpus: int

    def __post_init__(self) -> None:
        if not self.model.is_plain or self.model.kind != "decoder":
            raise SloBenchError(
                f"adapters are simulated for dense decoders, not for {self.model.name}; leave "
                "max_loras out"
            )

    @property
    def parameters(self) -> int:
        """Parameters of one adapter: of all matrices of all layers."""
        m = self.model
        attention = 2 * m.hidden + 2 * m.query_width + 2 * (m.hidden + m.kv_width)
        mlp = m.traits.mlp_matrices * (m.hidden + m.intermediate)
        return m.layers * self.rank * (attention + mlp)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of one adapter on each GPU."""
        return round(self.parameters * SIXTEEN_BIT_BYTES / self.gpus)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots on each GPU, which its KV cache lacks."""
        return self.slots * self.adapter_bytes

    def load_s(self, host_link: LinkSpec) -> float:
        """Seconds to copy an adapter from host memory into a slot, all GPUs at once."""
        return host_link.transfer_s(self.adapter_bytes)

    def slower(self, step_times: StepTimeModel, gpu: GpuSpec) -> StepTimeModel:
        """Step times with adapters: every step reads all slots.

        That is too much where a step has fewer adapters, and leaves out the launches of their
        kernels; multiplications are small beside the reading.

        Raises:
            SloBenchError: step times of this kind cannot take adapters.
        """
        read_s = self.slot_bytes / gpu.bandwidth_bytes_per_s
        model = step_times.model
        if isinstance(model, OperatorRoofline):
            slower = replace(
                model, memory_s=model.memory_s + read_s, compute_s=model.compute_s + read_s
            )
            return replace(step_times, model=slower)
        if type(model) is TableStepTime:
            longer = replace(model.host, step_s=model.host.step_s + read_s)
            table = TableStepTime(*model.tables._replace(host=longer), model.resident)
            return replace(step_times, model=table)
        raise SloBenchError("adapters go with neither speculation nor a device map; leave one out")
