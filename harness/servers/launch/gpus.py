"""GPUs of this machine, read through NVIDIA's management library, and their division among servers.

A value that a GPU does not report (MIG slices no utilisation, old GPUs no energy) is None.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml
from pynvml import NVMLError

from ....workloads.errors import SloBenchError
from .server_kind import ServerKind


@dataclass(frozen=True)
class GpuReading:
    """Counters of one GPU at one time. `energy_j` counts from when the driver was loaded."""

    utilisation: float | None
    memory_bytes: int | None
    power_w: float | None
    sm_clock_mhz: int | None
    energy_j: float | None


class Gpu:
    """A GPU by its index in NVML, which follows the PCI bus."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.name = str(pynvml.nvmlDeviceGetName(self._handle))  # such as `NVIDIA H200`
        # As `CUDA_VISIBLE_DEVICES` takes it: `GPU-…`.
        self.uuid = str(pynvml.nvmlDeviceGetUUID(self._handle))

    @property
    def memory_bytes(self) -> int | None:
        """Total memory in bytes."""
        memory = self._get(pynvml.nvmlDeviceGetMemoryInfo)
        return None if memory is None else int(memory.total)

    def read(self) -> GpuReading:
        """Read the present counters: a few calls into the driver."""
        utilisation = self._get(pynvml.nvmlDeviceGetUtilizationRates)
        memory = self._get(pynvml.nvmlDeviceGetMemoryInfo)
        milliwatts = self._get(pynvml.nvmlDeviceGetPowerUsage)
        millijoules = self._get(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return GpuReading(
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            power_w=None if milliwatts is None else milliwatts / 1000,
            sm_clock_mhz=self._get(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            energy_j=None if millijoules is None else millijoules / 1000,
        )

    def _get(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A counter; None if the GPU or its driver does not have it."""
        try:
            return function(self._handle, *arguments)
        except NVMLError:
            return None


def all_gpus() -> list[Gpu]:
    """All GPUs of this machine.

    Raises:
        NVMLError: there is no library, or it has no driver to talk to.
    """
    pynvml.nvmlInit()
    return [Gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]


def visible_gpus() -> Sequence[Gpu]:
    """GPUs that `CUDA_VISIBLE_DEVICES` allows; none without NVML."""
    try:
        gpus = all_gpus()
    except NVMLError:
        return ()
    return chosen(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen(gpus: Sequence[Gpu], visible_devices: str | None) -> Sequence[Gpu]:
    """GPUs by number or prefix of their UUID, as CUDA reads the variable; None: all."""
    if visible_devices is None:
        return gpus
    words = [word.strip() for word in visible_devices.split(",")]
    numbers = {int(word) for word in words if word.isdigit()}
    prefixes = tuple(word for word in words if word.startswith("GPU-"))
    return [
        gpu for gpu in gpus if gpu.index in numbers or (prefixes and gpu.uuid.startswith(prefixes))
    ]


def gpus_each(kind: ServerKind, server_args: Sequence[str]) -> int:
    """Number of GPUs of a server of this kind with these arguments.

    Raises:
        SloBenchError: a degree is no number.
    """
    gpu_count = 1
    words = [part for word in server_args for part in word.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name in kind.gpu_options:
            if not value.isdecimal() or int(value) < 1:
                raise SloBenchError(f"{name} must be a whole number from 1 on but is {value!r}")
            gpu_count *= int(value)
    return gpu_count


def shares(servers: int, each: int, visible: Sequence[str]) -> list[tuple[str, ...]]:
    """GPUs of each server, by their names in `visible`.

    Raises:
        SloBenchError: there are not enough.
    """
    if servers * each > len(visible):
        raise SloBenchError(
            f"{servers} servers with {each} GPU{'s' if each > 1 else ''} each need "
            f"{servers * each}; {len(visible)} can be used here"
        )
    return [tuple(visible[k * each : (k + 1) * each]) for k in range(servers)]
