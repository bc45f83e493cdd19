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

Source of this machine's topology and of `topo`: NVIDIA System Management Interface, `nvidia-smi
topo -m` and its legend. Bandwidths are those of the catalogue's links, NVLink by the number of
bonded links, PCIe by the GPU's generation.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ...harness.experiments.config.experiment_file import read_toml
from ...predictors.device_map import read_gpu, read_link
from ...predictors.specs import GpuSpec, LinkSpec, gpu, gpus, link
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ...workloads.parsing import number

_PCIE = {"PIX": "pix", "PXB": "pix", "PHB": "node", "NODE": "node", "SYS": "sys"}
_NVLINK = re.compile(r"NV(\d+)")
_GPU = re.compile(r"GPU\d+")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PER_NVLINK = 20e9  # bytes a second in one direction, 80 % of 25 GB/s (NVLink 2 to 4)
_PER_NVLINK_5 = 40e9
_NVLINK_S = 4e-6
QUERY = "index,name,memory.total,power.limit,power.default_limit"
_TIMEOUT_S = 30


def parse_topo(
    text: str, where: str, devices: Collection[str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Names of the devices and how each is connected to each, from a printed matrix.

    `devices` are the names of the devices, by default GPU0, GPU1, …; network cards, columns of
    affinity and the legend are passed over.

    Raises:
        SloBenchError: there is no such matrix in it, with `where` it came from.
    """
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    rows = [line.split() for line in lines if line.strip()]
    if not rows:
        raise SloBenchError(f"{where} holds no matrix of GPUs, as nvidia-smi topo -m prints")
    header = rows[0]
    names = [
        name for name in header if (_GPU.fullmatch(name) if devices is None else name in devices)
    ]
    if not names:
        raise SloBenchError(f"{where} names no device in its first line")
    kinds = {}
    places = [header.index(name) + 1 for name in names]
    for row in rows[1:]:
        if row[0] in names and len(row) > max(places):
            kinds[row[0]] = [row[place] for place in places]
    missing = [name for name in names if name not in kinds]
    if missing:
        raise SloBenchError(
            f"{where} has no row for {missing[0]} in its matrix of GPUs "
            "(as nvidia-smi topo -m prints)"
        )
    return names, [kinds[name] for name in names]


def link_of(kind: str, gpu: GpuSpec) -> LinkSpec:
    """The link between two GPUs of this type for a connection of `topo -m`, such as NV4 or PIX.

    Raises:
        SloBenchError: the connection is not in nvidia-smi's legend.
    """
    bonded = _NVLINK.fullmatch(kind)
    if bonded:
        each = _PER_NVLINK_5 if gpu.peer_link == "nvlink5" else _PER_NVLINK
        return LinkSpec(
            kind.lower(), int(bonded[1]) * each, _NVLINK_S, "nvidia-smi topo (estimate)"
        )
    if kind not in _PCIE:
        supported = ", ".join([*_PCIE, "NV1", "NV2", "…"])
        raise SloBenchError(f"unknown connection {kind!r}; supported: {supported}")
    base = link(_PCIE[kind])
    generation = link(gpu.host_link).bandwidth_bytes_per_s / link("pcie4-x16").bandwidth_bytes_per_s
    if generation == 1:
        return base
    bandwidth = base.bandwidth_bytes_per_s * generation
    return replace(base, name=f"{base.name}-{gpu.host_link}", bandwidth_bytes_per_s=bandwidth)


def parse_gpus(text: str) -> list[GpuSpec]:
    """The GPUs that a query for `index,name,memory.total,power.limit,power.default_limit` lists.

    Each is the catalogue's of that name, with the memory that it really has, and under its power
    cap where it has one.

    Raises:
        SloBenchError: a line that cannot be read, or a GPU that the catalogue does not have.
    """
    specs = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            raise SloBenchError(f"cannot read {line!r} of nvidia-smi; expected {QUERY}")
        _, name, memory_mib, limit_w, default_w = cells
        spec = _of_the_catalogue(name, _number(memory_mib) * 2**20)
        capped_w, usual_w = _number(limit_w), _number(default_w)
        if 0 < capped_w < usual_w and capped_w < spec.power_w:
            spec = gpu(f"{spec.name}@{capped_w:g}w")
        specs.append(spec)
    return specs


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # [N/A]


def _of_the_catalogue(name: str, memory_bytes: float) -> GpuSpec:
    """The catalogue entry whose words all occur in the name; of several, the one with the nearest
    memory size.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))

    def named(entry: str) -> bool:
        parts = [part for part in entry.split("-") if not re.fullmatch(r"\d+g", part)]
        return set(parts) <= words

    fitting = [spec for entry, spec in gpus().items() if named(entry)]
    if not fitting:
        raise SloBenchError(
            f"the catalogue has no GPU {name!r}; add it to a catalogue of your own "
            "(docs/step-time.md) or describe the machine in a file (--topology FILE.toml)"
        )
    most_words = max(len(spec.name.split("-")) for spec in fitting)
    fitting = [spec for spec in fitting if len(spec.name.split("-")) == most_words]
    return min(fitting, key=lambda spec: abs(spec.memory_bytes - memory_bytes))


def ask(arguments: Sequence[str]) -> str:
    """The output of `nvidia-smi` with these arguments.

    Raises:
        SloBenchError: there is no nvidia-smi, or it fails.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise SloBenchError(
            "there is no nvidia-smi here; describe the devices in a file (--topology FILE.toml) "
            "or give --gpu G --devices N"
        ) from None
    except (subprocess.SubprocessError, OSError) as error:
        raise SloBenchError(f"nvidia-smi {' '.join(arguments)} failed: {error}") from error
    return done.stdout


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


def _wrong(path: Path, problem: str) -> FileFormatError:
    return FileFormatError(path, None, problem)


def read_topology(path: Path) -> Topology:
    """The topology in a TOML file (see the module).

    Raises:
        FileFormatError: it cannot be read, or two devices have no link.
        UnknownNameError: a GPU or link that no catalogue has.
    """
    table, _ = read_toml(path)
    strangers = set(table) - _SECTIONS
    if strangers:
        raise _wrong(
            path, f"unknown {min(strangers)!r}; a topology has [[device]], [links], [[link]]"
        )
    members, devices = _devices(path, table.get("device"))
    links = _general(path, table.get("links", {}), devices)
    for (a, b), between in _single(path, table.get("link", []), members).items():
        links[a][b] = links[b][a] = between
    for i, j in product(range(len(devices)), repeat=2):
        if i == j:
            links[i][i] = None
        elif links[i][j] is None:
            raise _wrong(
                path,
                f"no link between {devices[i].name} and {devices[j].name}; add a [[link]] or "
                "links.default",
            )
    return Topology(devices, tuple(map(tuple, links)))


def named_topology(name_or_path: str) -> Topology:
    """The shipped topology of that name, or the one in a file (`.toml`).

    Raises:
        UnknownNameError: no topology of that name is shipped, or a GPU or link is unknown.
        FileFormatError: the file cannot be read.
    """
    if name_or_path.endswith(".toml"):
        return read_topology(Path(name_or_path).expanduser())
    path_of = {path.stem: path for path in SHIPPED.glob("*.toml")}
    if name_or_path not in path_of:
        raise UnknownNameError("topology (or file .toml)", name_or_path, path_of)
    return read_topology(path_of[name_or_path])


def _general(
    path: Path, table: object, devices: tuple[Machine, ...]
) -> list[list[LinkSpec | None]]:
    """The default link and the matrix of the table [links]."""
    n = len(devices)
    links: list[list[LinkSpec | None]] = [[None] * n for _ in range(n)]
    if not isinstance(table, Mapping) or set(table) - {"default", "topo"}:
        raise _wrong(path, "[links] may set default and topo")
    if "default" in table:
        default = read_link(path, "links.default", table["default"])
        links = [[default] * n for _ in range(n)]
    if "topo" in table:
        place = {device.name: i for i, device in enumerate(devices)}
        names, kinds = parse_topo(str(table["topo"]), f"{path}: links.topo", place)
        for (i, a), (j, b) in product(enumerate(names), repeat=2):
            if i != j:
                links[place[a]][place[b]] = link_of(kinds[i][j], devices[place[a]].gpu)
    return links


def _single(
    path: Path, rows: object, members: Mapping[str, list[int]]
) -> dict[tuple[int, int], LinkSpec]:
    """The links of the tables [[link]], by the indices of their two devices."""
    links = {}
    for row in rows if isinstance(rows, list) else [rows]:
        table = row if isinstance(row, Mapping) else {}
        ends = table.get("between")
        if not isinstance(ends, list) or len(ends) != 2 or "link" not in table:
            raise _wrong(path, "a [[link]] needs between = [a, b] and link")
        for end in ends:
            if end not in members:
                raise _wrong(path, f"a [[link]] names {end!r}, no device")
        between = read_link(path, f"link {ends[0]}-{ends[1]}", table["link"])
        links.update(dict.fromkeys(product(members[ends[0]], members[ends[1]]), between))
    return links


def _devices(path: Path, rows: object) -> tuple[dict[str, list[int]], tuple[Machine, ...]]:
    if not isinstance(rows, list) or not rows:
        raise _wrong(path, "a topology needs [[device]]s")
    members: dict[str, list[int]] = {}
    devices: list[Machine] = []
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping) or "gpu" not in row or set(row) - _DEVICE:
            raise _wrong(
                path, f"device {place} needs gpu; it may have {', '.join(sorted(_DEVICE))}"
            )
        name, count = str(row.get("name", f"GPU{place}")), row.get("count")
        if count is not None and (not isinstance(count, int) or not 1 <= count <= _MOST_ALIKE):
            raise _wrong(
                path,
                f"count of {name} must be a whole number from 1 to {_MOST_ALIKE} but is "
                f"{count!r:.40}",
            )
        spec, extra_ms = read_gpu(path, name, row["gpu"]), row.get("layer_extra_ms", 0.0)
        if not 0 <= number(extra_ms) < math.inf:
            raise _wrong(path, f"layer_extra_ms of {name} must be from 0 on but is {extra_ms!r}")
        for each in [name] if count is None else [f"{name}-{k}" for k in range(count)]:
            if each in members:
                raise _wrong(path, f"two devices are called {each!r}")
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
