"""NVIDIA's management library, as far as we need it: `libnvidia-ml.so.1`, which the driver brings.

Names and units are those of the NVML API reference (NVIDIA). What a GPU does not tell (MIG slices
no utilisation, old ones no energy) is None.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1  # NVML_CLOCK_SM
_CHARACTERS = 96  # the longest text that NVML gives


class NvmlError(Exception):
    """There is no library, or it has no driver to talk to."""


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment. `energy_j` counts from when the driver was loaded."""

    utilisation: float | None
    memory_bytes: int | None
    power_w: float | None
    sm_clock_mhz: int | None
    energy_j: float | None


class Gpu:
    """A GPU by its place in NVML's order, which is that of the PCI bus."""

    def __init__(self, library: Any, index: int) -> None:
        self._library = library
        self.index = index
        self._handle = ctypes.c_void_p()
        handle = ctypes.byref(self._handle)
        _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), handle)

    @property
    def name(self) -> str:
        """Such as `NVIDIA H200`."""
        return self._text("nvmlDeviceGetName")

    @property
    def uuid(self) -> str:
        """As `CUDA_VISIBLE_DEVICES` takes it: `GPU-…`."""
        return self._text("nvmlDeviceGetUUID")

    @property
    def memory_bytes(self) -> int | None:
        """All it has."""
        memory = self._get("nvmlDeviceGetMemoryInfo", _Memory())
        return None if memory is None else int(memory.total)

    def read(self) -> GpuReading:
        """What it does now; costs a few calls into the driver."""
        utilisation = self._get("nvmlDeviceGetUtilizationRates", _Utilisation())
        memory = self._get("nvmlDeviceGetMemoryInfo", _Memory())
        milliwatts = self._get("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        clock = self._get("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_int(_SM_CLOCK))
        millijoules = self._get("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return GpuReading(
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            power_w=None if milliwatts is None else milliwatts.value / 1000,
            sm_clock_mhz=None if clock is None else int(clock.value),
            energy_j=None if millijoules is None else millijoules.value / 1000,
        )

    def _get(self, function: str, answer: Any, *arguments: Any) -> Any:
        """`answer`, written to; None where this GPU or its driver has no such thing."""
        try:
            call = getattr(self._library, function)
            _call(call, self._handle, *arguments, ctypes.byref(answer))
        except (AttributeError, NvmlError):
            return None
        return answer

    def _text(self, function: str) -> str:
        text = ctypes.create_string_buffer(_CHARACTERS)
        _call(getattr(self._library, function), self._handle, text, ctypes.c_uint(_CHARACTERS))
        return text.value.decode(errors="replace")


class Nvml:
    """The library, initialised; it stays so as long as the process lives.

    Args:
        library: what `ctypes.CDLL` gives.

    Raises:
        NvmlError: it finds no driver.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            code = library.nvmlInit_v2()
        except AttributeError as error:
            raise NvmlError(f"no NVML: {error}") from None
        if code:
            raise NvmlError(f"NVML cannot be initialised (code {code}): no driver is loaded")

    @property
    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(_CHARACTERS)
        function = self._library.nvmlSystemGetDriverVersion
        _call(function, text, ctypes.c_uint(_CHARACTERS))
        return text.value.decode(errors="replace")

    def gpus(self) -> list[Gpu]:
        """All of this machine.

        Raises:
            NvmlError: the driver does not answer.
        """
        count = ctypes.c_uint()
        _call(self._library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        return [Gpu(self._library, index) for index in range(count.value)]


def _call(function: Callable[..., int], *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise NvmlError(f"{getattr(function, '__name__', 'NVML')} answers with code {code}")


@functools.cache
def load() -> Nvml:
    """NVML of this machine.

    Raises:
        NvmlError: there is none.
    """
    try:
        return Nvml(ctypes.CDLL(LIBRARY))
    except OSError:
        raise NvmlError(f"no {LIBRARY}: no NVIDIA driver") from None


def visible_gpus() -> Sequence[Gpu]:
    """Those that `CUDA_VISIBLE_DEVICES` leaves a server; none where there is no NVML."""
    try:
        gpus = load().gpus()
    except NvmlError:
        return ()
    return chosen(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen(gpus: Sequence[Gpu], asked: str | None) -> Sequence[Gpu]:
    """By number or by the beginning of their UUID, as CUDA reads it; None: all."""
    if asked is None:
        return gpus
    words = [word.strip() for word in asked.split(",")]
    numbers = {int(word) for word in words if word.isdigit()}
    prefixes = tuple(word for word in words if word.startswith("GPU-"))
    return [
        gpu for gpu in gpus if gpu.index in numbers or (prefixes and gpu.uuid.startswith(prefixes))
    ]
