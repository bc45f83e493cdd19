"""The topology of this machine, from `nvidia-smi`.

Source: NVIDIA System Management Interface, `nvidia-smi topo -m` and its legend. Bandwidths are
those of the catalogue's links, NVLink by the number of bonded links, PCIe by the GPU's generation.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace

from ...predictors.specs import GpuSpec, LinkSpec, gpu, gpus, link
from ...workloads.errors import SloBenchError

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
        known = ", ".join([*_PCIE, "NV1", "NV2", "…"])
        raise SloBenchError(f"unknown connection {kind!r}; supported: {known}")
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
    found = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            raise SloBenchError(f"cannot read {line!r} of nvidia-smi; expected {QUERY}")
        _, name, memory_mib, limit_w, default_w = cells
        spec = _of_the_catalogue(name, _number(memory_mib) * 2**20)
        capped_w, usual_w = _number(limit_w), _number(default_w)
        if 0 < capped_w < usual_w and capped_w < spec.power_w:
            spec = gpu(f"{spec.name}@{capped_w:g}w")
        found.append(spec)
    return found


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
    most = max(len(spec.name.split("-")) for spec in fitting)
    fitting = [spec for spec in fitting if len(spec.name.split("-")) == most]
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
