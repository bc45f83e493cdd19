"""Devices of a machine or cluster, and their links.

A topology file:

[[device]]
name = "GPU0"
gpu = "rtx-3090@350w"       # of the catalogue; or {like = "rtx-3090", memory_gib = 20, …}
layer_extra_ms = 0.5        # added to the step-time model, per layer

[[device]]
name = "A"
gpu = "a100-80g"
count = 16                  # A-0 … A-15; links may name all of them as "A"

[links]
default = "ethernet-100g"   # between devices without another link
# a matrix as `nvidia-smi topo -m` prints it, by device names
topo = \"\"\"
      GPU0  GPU1
GPU0   X    PIX
GPU1  PIX    X
\"\"\"

[[link]]
between = ["A", "A"]        # devices, or all of a `count`
link = "nvlink3"            # of the catalogue; or {bandwidth_gb_per_s = 25, latency_us = 8}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ...harness.experiments.config.experiment_file import read_toml
from ...predictors.device_map import read_gpu, read_link
from ...predictors.specs import GpuSpec, LinkSpec, link
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ...workloads.parsing import number
from .nvidia_smi import QUERY, ask, link_of, parse_gpus, parse_topo

SHIPPED = Path(__file__).parent / "topologies"
_DEVICE = {"name", "gpu", "count", "layer_extra_ms"}
_SECTIONS = {"device", "links", "link"}
_MOST_ALIKE = 1024  # devices of one entry


@dataclass(frozen=True)
class Machine:
    """One device: its name, what it is, and what each layer takes longer than modelled there."""

    name: str
    gpu: GpuSpec
    layer_extra_s: float = 0.0


@dataclass(frozen=True)
class Topology:
    """Devices, and the link from each to each (None from one to itself)."""

    devices: tuple[Machine, ...]
    links: tuple[tuple[LinkSpec | None, ...], ...]

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise SloBenchError("a topology needs at least one device")
        for name in names:
            if names.count(name) > 1:
                raise SloBenchError(f"two devices are called {name!r}; give each its own name")


def read_topology(path: Path) -> Topology:
    """The topology in a TOML file (see the module).

    Raises:
        FileFormatError: it cannot be read, or two devices have no link.
        UnknownNameError: a GPU or link that no catalogue has.
    """
    table, _ = read_toml(path)
    strangers = set(table) - _SECTIONS
    if strangers:
        raise FileFormatError(
            path, None, f"unknown {min(strangers)!r}; a topology has [[device]], [links], [[link]]"
        )
    members, devices = _devices(path, table.get("device"))
    found = _general(path, table.get("links", {}), devices)
    for (a, b), between in _single(path, table.get("link", []), members).items():
        found[a][b] = found[b][a] = between
    for i, j in product(range(len(devices)), repeat=2):
        if i == j:
            found[i][i] = None
        elif found[i][j] is None:
            raise FileFormatError(
                path,
                None,
                f"no link between {devices[i].name} and {devices[j].name}; add a [[link]] or "
                "links.default",
            )
    return Topology(devices, tuple(map(tuple, found)))


def named_topology(name_or_path: str) -> Topology:
    """The shipped topology of that name, or the one in a file (`.toml`).

    Raises:
        UnknownNameError: no topology of that name is shipped, or a GPU or link is unknown.
        FileFormatError: the file cannot be read.
    """
    if name_or_path.endswith(".toml"):
        return read_topology(Path(name_or_path).expanduser())
    known = {path.stem: path for path in SHIPPED.glob("*.toml")}
    if name_or_path not in known:
        raise UnknownNameError("topology (or file .toml)", name_or_path, known)
    return read_topology(known[name_or_path])


def _general(path: Path, said: object, devices: tuple[Machine, ...]) -> list[list[LinkSpec | None]]:
    """The default link and the matrix of the table [links]."""
    n = len(devices)
    found: list[list[LinkSpec | None]] = [[None] * n for _ in range(n)]
    if not isinstance(said, Mapping) or set(said) - {"default", "topo"}:
        raise FileFormatError(path, None, "[links] may set default and topo")
    if "default" in said:
        default = read_link(path, "links.default", said["default"])
        found = [[default] * n for _ in range(n)]
    if "topo" in said:
        place = {device.name: i for i, device in enumerate(devices)}
        names, kinds = parse_topo(str(said["topo"]), f"{path}: links.topo", place)
        for (i, a), (j, b) in product(enumerate(names), repeat=2):
            if i != j:
                found[place[a]][place[b]] = link_of(kinds[i][j], devices[place[a]].gpu)
    return found


def _single(
    path: Path, rows: object, members: Mapping[str, list[int]]
) -> dict[tuple[int, int], LinkSpec]:
    """The links of the tables [[link]], by the indices of their two devices."""
    found = {}
    for row in rows if isinstance(rows, list) else [rows]:
        said = row if isinstance(row, Mapping) else {}
        ends = said.get("between")
        if not isinstance(ends, list) or len(ends) != 2 or "link" not in said:
            raise FileFormatError(path, None, "a [[link]] needs between = [a, b] and link")
        for end in ends:
            if end not in members:
                raise FileFormatError(path, None, f"a [[link]] names {end!r}, no device")
        between = read_link(path, f"link {ends[0]}-{ends[1]}", said["link"])
        found.update(dict.fromkeys(product(members[ends[0]], members[ends[1]]), between))
    return found


def _devices(path: Path, rows: object) -> tuple[dict[str, list[int]], tuple[Machine, ...]]:
    if not isinstance(rows, list) or not rows:
        raise FileFormatError(path, None, "a topology needs [[device]]s")
    members: dict[str, list[int]] = {}
    devices: list[Machine] = []
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping) or "gpu" not in row or set(row) - _DEVICE:
            raise FileFormatError(
                path, None, f"device {place} needs gpu; it may have {', '.join(sorted(_DEVICE))}"
            )
        name, count = str(row.get("name", f"GPU{place}")), row.get("count")
        if count is not None and (not isinstance(count, int) or not 1 <= count <= _MOST_ALIKE):
            raise FileFormatError(
                path,
                None,
                f"count of {name} must be a whole number from 1 to {_MOST_ALIKE} but is "
                f"{count!r:.40}",
            )
        spec, extra_ms = read_gpu(path, name, row["gpu"]), row.get("layer_extra_ms", 0.0)
        if not 0 <= number(extra_ms) < math.inf:
            raise FileFormatError(
                path, None, f"layer_extra_ms of {name} must be from 0 on but is {extra_ms!r}"
            )
        for each in [name] if count is None else [f"{name}-{k}" for k in range(count)]:
            if each in members:
                raise FileFormatError(path, None, f"two devices are called {each!r}")
            members[each] = [len(devices)]
            devices.append(Machine(each, spec, extra_ms * 1e-3))
        if count is not None:
            members[name] = list(range(len(devices) - count, len(devices)))
    return members, tuple(devices)


def alike(gpu: GpuSpec, count: int) -> Topology:
    """`count` GPUs of one kind, with the catalogue's link between each pair."""
    if count < 1:
        raise SloBenchError(f"a topology needs at least one device but has {count}")
    if count > _MOST_ALIKE:
        raise SloBenchError(
            f"a topology has at most {_MOST_ALIKE:,} devices of one kind, not {count:,}: it has a "
            "link for each pair"
        )
    peer = link(gpu.peer_link)
    devices = tuple(Machine(f"GPU{i}", gpu) for i in range(count))
    links = tuple(tuple(None if i == j else peer for j in range(count)) for i in range(count))
    return Topology(devices, links)


def this_machine() -> Topology:
    """The topology that `nvidia-smi` prints for this machine.

    Raises:
        SloBenchError: there is no nvidia-smi, or its output cannot be read.
    """
    specs = parse_gpus(ask(["--query-gpu=" + QUERY, "--format=csv,noheader,nounits"]))
    names, kinds = parse_topo(ask(["topo", "-m"]), "nvidia-smi topo -m")
    if len(names) != len(specs):
        raise SloBenchError(
            f"nvidia-smi lists {len(specs)} GPUs, but its topology has {len(names)}"
        )
    devices = tuple(Machine(name, spec) for name, spec in zip(names, specs, strict=True))
    links = tuple(
        tuple(None if i == j else link_of(kinds[i][j], devices[i].gpu) for j in range(len(names)))
        for i in range(len(names))
    )
    return Topology(devices, links)
