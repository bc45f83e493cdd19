"""A map of a model's layers to devices, as a file: what a tuner writes and a simulation runs.

    {
      "model": "chatglm2-6b",
      "lanes": 1,
      "ready_s": 0.0,
      "stages": [
        {"device": "GPU0", "gpu": "rtx-3090@350w", "layers": 16, "link": {...} },
        {"device": "GPU1", "gpu": "rtx-3090@300w", "layers": 12}
      ]
    }

`gpu` is a name of the catalogue, or a table with `like` (such a name) and what differs from it:
`memory_gib`, `bandwidth_gb_per_s`, `tflops_16bit`. `link` leads to the next stage: a name of the
catalogue, or a table with `bandwidth_gb_per_s` and `latency_us`. Each layer of a stage takes
`layer_extra_ms` longer than the step-time model says, where that was measured. `lanes` batches are
in flight (1: an eager loop over mapped layers, where one GPU computes at a time; by default as many
as there are stages). It serves `ready_s` seconds after requests begin to come, if the search for it
had to run tests on the devices themselves. Other fields, such as those for launchers, are left
alone, but for `SERVER.environment.CUDA_VISIBLE_DEVICES`, which numbers the devices of a started
server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError, UnknownNameError
from ..workloads.file_cache import depends_on, file_cache
from ..workloads.parsing import number, parse_json
from .placement import PipelineStage
from .specs import GIB, GpuSpec, LinkSpec, gpu, link, links

SHIPPED = "device_maps"
_ALTERED = "*"  # after the name of a GPU with figures that differ from the catalogue's
_GPU_FIELDS = {"memory_gib", "bandwidth_gb_per_s", "tflops_16bit"}


@dataclass(frozen=True)
class DeviceMap:
    """Which device holds how many layers, in order; see the module for the fields."""

    model: str
    stages: tuple[PipelineStage, ...]
    devices: tuple[str, ...]
    lanes: int | None = None
    ready_s: float = 0.0
    cuda_devices: tuple[str, ...] = ()  # of the stages; empty: unknown

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def gpus_text(self) -> str:
        """The GPUs of the stages, equal ones together: `rtx-3090@350w+rtx-3090@300w`."""
        counts: dict[str, int] = {}
        for stage in self.stages:
            counts[stage.gpu.name] = counts.get(stage.gpu.name, 0) + 1
        return "+".join(f"{n}×{name}" if n > 1 else name for name, n in counts.items())

    def plain(self) -> dict[str, Any]:
        """As it stands in a file."""
        table: dict[str, Any] = {"model": self.model}
        if self.lanes is not None:
            table["lanes"] = self.lanes
        table["ready_s"] = self.ready_s
        table["stages"] = [
            {"device": device, "gpu": _plain_gpu(stage.gpu), "layers": stage.layers}
            | ({"layer_extra_ms": stage.layer_extra_s * 1e3} if stage.layer_extra_s else {})
            | ({"link": _plain_link(stage.link)} if stage.link is not None else {})
            for device, stage in zip(self.devices, self.stages, strict=True)
        ]
        return table


@file_cache(maxsize=64)
def read_device_map(name_or_path: str) -> DeviceMap:
    """The shipped map of that name, or the one in a file (`.json`).

    Raises:
        UnknownNameError: no map of that name is shipped.
        FileFormatError: the file cannot be read or holds no map.
    """
    if name_or_path.endswith(".json"):
        path = Path(name_or_path).expanduser()
    else:
        maps = shipped_device_maps()
        if name_or_path not in maps:
            raise UnknownNameError("device map (or file .json)", name_or_path, maps)
        path = maps[name_or_path]
    depends_on(path)
    try:
        table = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileFormatError(path, None, f"is not JSON: {error}") from error
    return _read(path, table)


def shipped_device_maps() -> dict[str, Path]:
    """The maps that come with the package, by name."""
    folder = Path(str(files(__package__) / SHIPPED))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _read(path: Path, table: Any) -> DeviceMap:
    if not isinstance(table, dict) or not isinstance(table.get("stages"), list):
        raise FileFormatError(path, None, 'a device map needs a list "stages"')
    rows, stages, devices = table["stages"], list[PipelineStage](), list[str]()
    if not rows:
        raise FileFormatError(path, None, '"stages" is empty')
    for place, row in enumerate(rows):
        where = f"stage {place}"
        if not isinstance(row, dict) or not isinstance(row.get("layers"), int) or row["layers"] < 1:
            raise FileFormatError(path, None, f"{where} needs layers, a whole number above 0")
        if "gpu" not in row or ("link" not in row and place < len(rows) - 1):
            raise FileFormatError(path, None, f"{where} needs gpu, and link to the next stage")
        to_next = read_link(path, where, row["link"]) if place < len(rows) - 1 else None
        extra_ms = _number(
            path, f"{where}: layer_extra_ms", row.get("layer_extra_ms", 0.0), low=0.0
        )
        on = read_gpu(path, where, row["gpu"])
        stages.append(PipelineStage(on, row["layers"], to_next, extra_ms * 1e-3))
        devices.append(str(row.get("device", place)))
    lanes, ready_s = table.get("lanes"), table.get("ready_s", 0.0)
    if lanes is not None and (not isinstance(lanes, int) or not 1 <= lanes <= len(stages)):
        raise FileFormatError(path, None, f"lanes must be 1 to {len(stages)} but is {lanes!r}")
    _number(path, "ready_s", ready_s, low=0.0)
    if not isinstance(table.get("model"), str):
        raise FileFormatError(path, None, "model must be a name")
    return DeviceMap(
        table["model"], tuple(stages), tuple(devices), lanes, float(ready_s), _cuda_devices(table)
    )


def _cuda_devices(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Devices of the first server for which the file has an environment that names some."""
    for part in table.values():
        environment = part.get("environment") if isinstance(part, dict) else None
        devices = environment.get("CUDA_VISIBLE_DEVICES") if isinstance(environment, dict) else None
        if isinstance(devices, str) and devices:
            return tuple(devices.split(","))
    return ()


def read_gpu(path: Path, where: str, entry: object) -> GpuSpec:
    """A GPU by name, or by a table of what differs from one (see the module).

    Raises:
        UnknownNameError: no such GPU.
        FileFormatError: another form.
    """
    if isinstance(entry, str):
        return gpu(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("like"), str):
        raise FileFormatError(path, None, f'{where}: gpu must be a name or {{"like": name, …}}')
    strangers = set(entry) - _GPU_FIELDS - {"like"}
    if strangers:
        raise FileFormatError(
            path,
            None,
            f"{where}: gpu has no {min(strangers)!r}; it may set {', '.join(sorted(_GPU_FIELDS))}",
        )
    base = gpu(entry["like"])
    numbers = {
        name: _number(path, f"{where}: {name}", entry[name], above=0.0)
        for name in _GPU_FIELDS & set(entry)
    }
    flops = numbers.get("tflops_16bit", base.flops_16bit / 1e12) * 1e12
    bandwidth = numbers.get("bandwidth_gb_per_s", base.bandwidth_bytes_per_s / 1e9) * 1e9
    memory = numbers.get("memory_gib", base.memory_bytes / GIB) * GIB
    return replace(
        base,
        name=base.name + _ALTERED,
        memory_bytes=round(memory),
        bandwidth_bytes_per_s=bandwidth,
        flops_16bit=flops,
    )


def read_link(path: Path, where: str, entry: object) -> LinkSpec:
    """A link by name, or by a table with `bandwidth_gb_per_s` and `latency_us`.

    Raises:
        UnknownNameError: no such link.
        FileFormatError: another form.
    """
    if isinstance(entry, str):
        return link(entry)
    if not isinstance(entry, Mapping) or set(entry) - {"name", "bandwidth_gb_per_s", "latency_us"}:
        raise FileFormatError(
            path,
            None,
            f'{where}: link must be a name or {{"bandwidth_gb_per_s": …, "latency_us": …}}',
        )
    bandwidth = _number(path, f"{where}: bandwidth_gb_per_s", entry.get("bandwidth_gb_per_s"), 0.0)
    latency = _number(path, f"{where}: latency_us", entry.get("latency_us", 0.0), low=0.0)
    return LinkSpec(str(entry.get("name", "given")), bandwidth * 1e9, latency * 1e-6)


def _number(
    path: Path, label: str, value: object, above: float | None = None, *, low: float | None = None
) -> float:
    amount = number(value)
    good = math.isfinite(amount)
    if not good or (above is not None and amount <= above) or (low is not None and amount < low):
        bound = f"above {above:g}" if above is not None else f"from {low:g} on"
        raise FileFormatError(path, None, f"{label} must be a number {bound} but is {value!r:.40}")
    return amount


def _plain_gpu(spec: GpuSpec) -> str | dict[str, Any]:
    if not spec.name.endswith(_ALTERED):
        return spec.name
    return {
        "like": spec.name.removesuffix(_ALTERED),
        "memory_gib": spec.memory_bytes / GIB,
        "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
        "tflops_16bit": spec.flops_16bit / 1e12,
    }


def _plain_link(spec: LinkSpec) -> str | dict[str, Any]:
    if spec.name in links() and link(spec.name) == spec:
        return spec.name
    return {
        "name": spec.name,
        "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
        "latency_us": spec.latency_s * 1e6,
    }
