"""GPU telemetry, on a library of the kind that `ctypes.CDLL` gives."""

from __future__ import annotations

import csv
import json
import threading
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pynvml
import pytest
from typer.testing import CliRunner

from slo_bench.cli.commands import doctor
from slo_bench.cli.main import app
from slo_bench.harness.experiments.backends.gpu_watch import GpuSample, GpuWatch, watching
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.servers.launch import gpus
from slo_bench.harness.servers.mock import MockConfig, serving


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA Test"
    busy_percent: int = 50
    used_bytes: int = 3 << 30
    milliwatts: int = 200_000
    millijoules: int = 1_000_000
    joules_a_reading: float = 0.0  # by which the energy counter grows
    lacks: set[str] = field(default_factory=set)


def _refused():
    return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class FakeNvml:
    """Stands in for functions of `pynvml`; a handle is a `FakeGpu`."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self._gpus = gpus
        self.reads = 0

    def nvmlInit(self):  # noqa: N802
        if not self._gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self._gpus[index]

    def nvmlDeviceGetName(self, gpu):  # noqa: N802
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu):  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        if "utilisation" in gpu.lacks:
            raise _refused()
        return SimpleNamespace(gpu=gpu.busy_percent, memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        if "memory" in gpu.lacks:
            raise _refused()
        total = 141 << 30
        return SimpleNamespace(total=total, used=gpu.used_bytes, free=total - gpu.used_bytes)

    def nvmlDeviceGetPowerUsage(self, gpu):  # noqa: N802
        if "power" in gpu.lacks:
            raise _refused()
        return gpu.milliwatts

    def nvmlDeviceGetClockInfo(self, gpu, which):  # noqa: N802
        return {0: 1, 1: 1980, 2: 2}[which]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):  # noqa: N802
        if "energy" in gpu.lacks:
            raise _refused()
        self.reads += 1
        millijoules = gpu.millijoules
        gpu.millijoules += int(gpu.joules_a_reading * 1000)
        return millijoules


@pytest.fixture
def machine(monkeypatch):
    """A machine with these GPUs; without any, one without NVML."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*gpus: FakeGpu) -> FakeNvml:
        library = FakeNvml(*gpus)
        for name in dir(library):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(library, name))
        return library

    return make


def test_gpu_reading_is_converted_to_si_units(machine):
    machine(FakeGpu("GPU-a"))
    (gpu,) = gpus.visible_gpus()
    assert gpu.read() == gpus.GpuReading(0.5, 3 << 30, 200.0, 1980, 1000.0)
    assert (gpu.index, gpu.name, gpu.uuid) == (0, "NVIDIA Test", "GPU-a")
    assert gpu.memory_bytes == 141 << 30


def test_gpu_reading_of_unsupported_values_is_none(machine):
    machine(FakeGpu("GPU-a", lacks={"utilisation", "memory", "power", "energy"}))
    (gpu,) = gpus.visible_gpus()
    assert gpu.read() == gpus.GpuReading(None, None, None, 1980, None)


@pytest.mark.parametrize(
    ("variable", "indices"),
    [(None, [0, 1, 2]), ("2, 0", [0, 2]), ("GPU-b", [1]), ("", []), ("-1", []), ("MIG-x", [])],
)
def test_visible_gpus_follow_cuda_visible_devices(machine, monkeypatch, variable, indices):
    machine(FakeGpu("GPU-aa"), FakeGpu("GPU-bb"), FakeGpu("GPU-cc"))
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.index for gpu in gpus.visible_gpus()] == indices


def reading(power_w=None, energy_j=None, utilisation=None, memory_bytes=None):
    return gpus.GpuReading(utilisation, memory_bytes, power_w, None, energy_j)


def test_gpu_figures_prefer_energy_counters_and_sum_gpus():
    watch = GpuWatch(
        [
            GpuSample(0.0, 0, reading(999.0, 50.0, 1.0, 99)),  # before the level
            GpuSample(1.0, 0, reading(100.0, 100.0, 0.5, 10)),
            GpuSample(1.0, 1, reading(40.0, None, 0.1, 30)),
            GpuSample(3.0, 0, reading(100.0, 500.0, 0.5, 20)),
            GpuSample(3.0, 1, reading(60.0, None, 0.3, 20)),
        ]
    )
    figures = watch.figures(1.0, 5.0)
    assert figures == {
        "gpus_watched": 2,
        "gpu_power_mean_w": 200.0 + 50.0,
        "gpu_energy_j": 4.0 * 250.0,
        "gpu_utilisation_mean": 0.35,
        "gpu_memory_peak_bytes": 30,
    }


def test_gpu_figures_without_values_are_none():
    figures = GpuWatch([GpuSample(0.0, 0, reading())]).figures(0.0, 1.0)
    assert figures.pop("gpus_watched") == 1
    assert set(figures.values()) == {None}
    assert GpuWatch().figures(0.0, 1.0) == {}
    assert GpuWatch([GpuSample(0.0, 0, reading())]).figures(0.0, float("nan")) == {}


def test_gpu_watch_reads_at_both_ends_and_between(machine, tmp_path):
    library = machine(FakeGpu("GPU-a", joules_a_reading=2.0))
    ticks = count()
    with watching(gpus.visible_gpus(), interval_s=0.001, clock=lambda: next(ticks)) as watch:
        while library.reads < 5:
            pass
    assert [s.time_s for s in watch.samples] == list(range(len(watch.samples)))
    assert len(watch.samples) == library.reads
    assert watch.figures(0.0, 4.0)["gpu_power_mean_w"] == 2.0
    watch.write(tmp_path / "servers" / "cell.gpus.csv", 1.0)
    with (tmp_path / "servers" / "cell.gpus.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(watch.samples)
    assert rows[0] == {
        "time_s": "-1.000000",
        "gpu": "0",
        "utilisation": "0.5",
        "memory_bytes": str(3 << 30),
        "power_w": "200.0",
        "sm_clock_mhz": "1980",
        "energy_j": "1000.0",
    }


def test_gpu_watch_without_gpus_starts_no_thread():
    before = threading.active_count()
    with watching(()) as watch:
        assert threading.active_count() == before
    assert watch.samples == []


def measured(folder, **client):
    with serving(MockConfig(ttft_s=0.002, itl_s=0.001)) as server:
        url = server.url
        experiment = Experiment(
            backend="openai",
            workload="sharegpt",
            prompt_tokens="fixed(8)",
            output_tokens="fixed(5)",
            requests=12,
            rates=100.0,
            seeds=1,
            client={"base_urls": [url], "send_delay_limit_s": 60.0, **client},
        )
        result = experiment.run(folder)
    (row,) = result.rows()
    return row


def test_level_on_this_machines_gpus_has_gpu_columns(machine, tmp_path):
    machine(FakeGpu("GPU-a", busy_percent=25), FakeGpu("GPU-b", busy_percent=75))
    row = measured(tmp_path / "run")
    assert (row["gpus_watched"], row["gpu_utilisation_mean"]) == (2, 0.5)
    assert row["gpu_memory_peak_bytes"] == 3 << 30
    assert (tmp_path / "run" / "servers" / f"{row['cell']}.gpus.csv").is_file()


def test_level_without_gpus_has_no_gpu_columns(machine, tmp_path):
    machine()
    row = measured(tmp_path / "run")
    columns = [name for name, value in row.items() if value is not None]
    assert not [name for name in columns if name.startswith(("gpu_", "gpus_"))]
    assert not (tmp_path / "run" / "servers").exists()


def test_doctor_reports_gpus(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_import_failure", lambda extra, modules: None)  # seconds each time

    def finding(check):
        shown = CliRunner().invoke(app, ["doctor", "--json"]).stdout
        return next(f for f in json.loads(shown) if f["check"] == check)

    machine(FakeGpu("GPU-a"))
    assert finding("GPU")["found"] == "NVIDIA Test, 141 GiB (driver 580.1, watched by NVML)"
    machine()
    assert finding("GPU")["state"] == "missing"
    assert "no NVIDIA driver" in finding("GPU")["found"]
    assert finding("servers")["mend"] == "slo-bench backends install vllm --cpu"
    folder = tmp_path / "environments" / "vllm-0.9.0-cpu"
    folder.mkdir(parents=True)
    marker = '{"backend": "vllm", "version": "0.9.0", "device": "cpu"}'
    (folder / "slo-bench.json").write_text(marker)
    assert finding("servers")["found"] == "vllm-0.9.0-cpu"
