"""What the GPUs of this machine did while a level was measured.

servers/<cell>.gpus.csv   a line for each GPU, four times a second; times are the workload's
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ....workloads.csv_text import csv_bytes
from ....workloads.whole_file import write_whole
from ...results.run_folder import Value
from ...servers.launch.gpus import Gpu, GpuReading

INTERVAL_S = 0.25


@dataclass(frozen=True)
class GpuSample:
    """A reading of one GPU at `time_s`, by the clock of the watch."""

    time_s: float
    gpu: int
    reading: GpuReading


@dataclass
class GpuWatch:
    """Readings of the GPU counters over time."""

    samples: list[GpuSample] = field(default_factory=list)

    def figures(self, begin_s: float, end_s: float) -> dict[str, Value]:
        """Columns of `cells.csv` for the time between two moments of the watch's clock.

        Power and energy are sums over all GPUs. Power is the growth of the energy counters over
        time if the GPUs have them, else the mean of the readings. Empty without readings.
        """
        if not self.samples or not end_s > begin_s:
            return {}
        within = [s for s in self.samples if begin_s <= s.time_s <= end_s] or self.samples
        by_gpu = [[s for s in within if s.gpu == gpu] for gpu in sorted({s.gpu for s in within})]
        powers = [_mean_power_w(gpu_samples) for gpu_samples in by_gpu]
        measured = [power for power in powers if power is not None]
        power_w = sum(measured) if len(measured) == len(powers) else None
        used = [s.reading.memory_bytes for s in within if s.reading.memory_bytes is not None]
        busy = [s.reading.utilisation for s in within if s.reading.utilisation is not None]
        return {
            "gpus_watched": len(by_gpu),
            "gpu_power_mean_w": None if power_w is None else round(power_w, 3),
            "gpu_energy_j": None if power_w is None else round(power_w * (end_s - begin_s), 3),
            "gpu_utilisation_mean": round(sum(busy) / len(busy), 6) if busy else None,
            "gpu_memory_peak_bytes": max(used, default=None),
        }

    def write(self, path: Path, begin_s: float) -> None:
        """The table; `begin_s` is the workload's time zero by the watch's clock."""
        names = [f.name for f in fields(GpuReading)]
        rows: list[list[object]] = [["time_s", "gpu", *names]]
        for sample in self.samples:
            values = [getattr(sample.reading, name) for name in names]
            rows.append([f"{sample.time_s - begin_s:.6f}", sample.gpu, *values])
        write_whole(path, [csv_bytes(rows)])


def _mean_power_w(samples: Sequence[GpuSample]) -> float | None:
    first, last = samples[0], samples[-1]
    energies = first.reading.energy_j, last.reading.energy_j
    if None not in energies and last.time_s > first.time_s:
        before_j, after_j = (energy for energy in energies if energy is not None)
        return (after_j - before_j) / (last.time_s - first.time_s)
    powers = [s.reading.power_w for s in samples if s.reading.power_w is not None]
    return sum(powers) / len(powers) if powers else None


@contextlib.contextmanager
def watching(
    gpus: Sequence[Gpu],
    *,
    interval_s: float = INTERVAL_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[GpuWatch]:
    """Read the GPUs now and then, at the beginning and at the end, from a thread of its own.

    Without GPUs there is no thread, and nothing is read.
    """
    watch = GpuWatch()
    if not gpus:
        yield watch
        return
    stop = threading.Event()

    def read_all() -> None:
        for gpu in gpus:
            watch.samples.append(GpuSample(clock(), gpu.index, gpu.read()))

    def read_on() -> None:
        while not stop.wait(interval_s):
            read_all()

    read_all()
    thread = threading.Thread(target=read_on, name="slo-bench-gpus", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
        read_all()
