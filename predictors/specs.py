"""GPUs, links and models by name: from the catalogues, the user's files or a model's own folder.

The user's own files are laid over the shipped catalogues.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from ..workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ..workloads.file_cache import depends_on, depends_on_variable, file_cache
from ..workloads.parsing import number
from .config_fields import Fields
from .dtypes import kv_dtype, weight_dtype
from .families import FAMILIES, Traits
from .model_parts import (
    Experts,
    LatentAttention,
    LinearAttention,
    SlidingWindow,
    SparseAttention,
)
from .model_spec import ModelSpec as ModelSpec

CATALOGUE_VARIABLE = "SLO_BENCH_CATALOGUE"
SECTIONS = ("gpus", "links", "models")

Entry = dict[str, Any]


def entries(section: str) -> dict[str, Entry]:
    """All entries of `section` (gpus, links, models) by name; `_file` in each says where from.

    A user's TOML file holds tables such as `[gpus.a100-80g]`; its fields replace those of the
    shipped entry of that name, or make a new entry. Files: the one, or all of the folder, that
    SLO_BENCH_CATALOGUE names; else the TOML files of `~/.config/slo-bench`.

    Raises:
        FileFormatError: a file is not TOML or holds something other than these tables.
        SloBenchError: SLO_BENCH_CATALOGUE names nothing that exists.
    """
    return _merged(_user_files())[section]


def price_basis() -> Entry:
    """`basis` and `date` of the prices in the shipped catalogue of GPUs."""
    shipped = files(__package__) / "catalogues" / "gpus.toml"
    prices: Entry = tomllib.loads(shipped.read_text(encoding="utf-8"))["prices"]
    return prices


def _user_files() -> tuple[Path, ...]:
    for variable in (CATALOGUE_VARIABLE, "XDG_CONFIG_HOME", "HOME"):
        depends_on_variable(variable)
    named = os.environ.get(CATALOGUE_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if path.is_file():
            return (path,)
        if path.is_dir():
            depends_on(path)
            return tuple(sorted(path.glob("*.toml")))
        raise SloBenchError(
            f"{CATALOGUE_VARIABLE} names {named!r}, which does not exist; "
            "it should be a TOML file or a folder of them"
        )
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    folder = home / "slo-bench"
    depends_on(folder)
    return tuple(sorted(folder.glob("*.toml")))


@file_cache(maxsize=8)
def _merged(user_files: tuple[Path, ...]) -> dict[str, dict[str, Entry]]:
    shipped = files(__package__) / "catalogues"
    merged: dict[str, dict[str, Entry]] = {}
    for section in SECTIONS:
        file = shipped / f"{section}.toml"
        table = tomllib.loads(file.read_text(encoding="utf-8"))[section]
        merged[section] = {
            name: {**entry, "_file": f"{section}.toml"} for name, entry in table.items()
        }
    for path in user_files:
        for section, table in _read(path).items():
            for name, entry in table.items():
                previous = merged[section].get(name, {})
                merged[section][name] = {**previous, **entry, "_file": str(path)}
    return merged


def _read(path: Path) -> dict[str, dict[str, Entry]]:
    depends_on(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(path, None, f"not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from None
    for section, table in content.items():
        if section not in SECTIONS:
            expected = ", ".join(f"[{name}.NAME]" for name in SECTIONS)
            raise FileFormatError(path, None, f"unknown table [{section}]; use {expected}")
        if not isinstance(table, dict) or not all(isinstance(e, dict) for e in table.values()):
            raise FileFormatError(path, None, f"{section} must hold tables [{section}.NAME]")
    return content


GIB = 2**30
IDLE_POWER_SHARE = 0.1
POWER_EXPONENT = 1 / 3
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


Part = TypeVar(
    "Part", Experts, LatentAttention, LinearAttention, SlidingWindow, SparseAttention, Traits
)
_BY_FIGURES = "as its name says"  # origin of a link that is named by its figures


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What moves bytes between two memories, in one direction."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    origin: str = ""

    @property
    def measured(self) -> bool:
        """Is it named by figures of its own, such as `16gb/s@20us`, and not by a data sheet?"""
        return self.origin == _BY_FIGURES

    def transfer_s(self, moved_bytes: float) -> float:
        """Seconds for one message of that many bytes."""
        return self.latency_s + moved_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. Throughputs are dense operations a second; 0 where the GPU has no such unit."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_16bit: float
    flops_8bit: float
    flops_4bit: float
    host_link: str
    peer_link: str
    power_w: float
    price_per_hour_usd: float
    origin: str = ""
    multiprocessors: int = 0  # 0: not known
    flash_attention: int = 0  # the version that vLLM takes; 0: another one, others or not known

    def flops(self, compute_bits: int) -> float:
        """Operations a second at this width; at 16 bits where the GPU has no narrower unit."""
        narrow = {8: self.flops_8bit, 4: self.flops_4bit}.get(compute_bits)
        if narrow:
            return narrow
        return self.flops_16bit * (0.5 if compute_bits == 32 else 1.0)


@file_cache(maxsize=1)
def gpus() -> dict[str, GpuSpec]:
    """Every GPU of the catalogue, by name."""
    return {name: _gpu(name, entry) for name, entry in entries("gpus").items()}


def links() -> dict[str, LinkSpec]:
    """Every link of the catalogue, by name."""
    return {name: _link(name, entry) for name, entry in entries("links").items()}


def models() -> dict[str, ModelSpec]:
    """Every model of the catalogue, by name."""
    return {name: _model(name, entry) for name, entry in entries("models").items()}


def gpu(name: str) -> GpuSpec:
    """The GPU called `name`; `rtx-3090@250w` is one with its power capped (see `capped`).

    Raises:
        UnknownNameError: no catalogue holds it.
        SloBenchError: the cap is not a power between idle and the GPU's own limit.
    """
    base, separator, cap = name.partition("@")
    catalogue = entries("gpus")
    if base not in catalogue:
        raise UnknownNameError("GPU", name, catalogue)
    spec = _gpu(base, catalogue[base])
    if not separator:
        return spec
    watts = re.fullmatch(r"(\d+(?:\.\d+)?)[wW]", cap)
    if watts is None:
        raise SloBenchError(f"power cap {cap!r} of GPU {name!r} should look like {base}@250w")
    return capped(spec, float(watts[1]))


def capped(spec: GpuSpec, power_cap_w: float) -> GpuSpec:
    """The GPU under a power cap: an estimate, not a measurement.

    Idle takes 10 % of the GPU's own limit; the rest feeds the compute units, whose power grows
    with the cube of their clock (voltage follows frequency), so throughput falls with the cube
    root of the power left to them. Memory keeps its own clock and hence its bandwidth.
    """
    idle_w = IDLE_POWER_SHARE * spec.power_w
    if not idle_w < power_cap_w <= spec.power_w:
        raise SloBenchError(
            f"power cap {power_cap_w:g} W of {spec.name} must be above {idle_w:g} W (idle) "
            f"and at most {spec.power_w:g} W"
        )
    share = ((power_cap_w - idle_w) / (spec.power_w - idle_w)) ** POWER_EXPONENT
    return replace(
        spec,
        name=f"{spec.name}@{power_cap_w:g}w",
        flops_16bit=spec.flops_16bit * share,
        flops_8bit=spec.flops_8bit * share,
        flops_4bit=spec.flops_4bit * share,
        power_w=power_cap_w,
        origin=f"{spec.origin}; estimate for a cap of {power_cap_w:g} W",
    )


def link(name: str) -> LinkSpec:
    """The link called `name`; `12.3gb/s@10us` is one of such a bandwidth and latency.

    Raises:
        UnknownNameError: it is neither.
    """
    catalogue = entries("links")
    figures = re.fullmatch(rf"({_NUMBER})gb/s@({_NUMBER})us", name)
    if figures is not None and float(figures[1]) > 0:
        return LinkSpec(name, float(figures[1]) * 1e9, float(figures[2]) * 1e-6, _BY_FIGURES)
    if name not in catalogue:
        raise UnknownNameError("link", name, catalogue)
    return _link(name, catalogue[name])


def model(name_or_path: str | Path) -> ModelSpec:
    """The catalogue's model of that name, or the one in that folder or `config.json`.

    Raises:
        UnknownNameError: neither the catalogue nor the disk has it.
        FileFormatError: the configuration cannot be read, or says what is not modelled yet.
    """
    catalogue = entries("models")
    name = str(name_or_path)
    if name in catalogue:
        return _model(name, catalogue[name])
    path = Path(name_or_path).expanduser()
    if isinstance(name_or_path, Path) or path.is_dir() or name.endswith(".json"):
        from .model_config import read_model  # no model of the catalogue needs it

        return read_model(path)
    raise UnknownNameError("model", name, catalogue)


class _Fields(Fields):
    """Typed access to one entry, every field of which must be read."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(entry["_file"], entry, name)

    def _held(self, field: str, default: object) -> object:
        value = self.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"field {field!r} is missing")
        return value

    def number(self, field: str, default: float | None = None, low: float = 0.0) -> float:
        value = self._held(field, default)
        amount = number(value)
        if not low <= amount < math.inf:
            raise self.fail(
                f"field {field!r} must be a number from {low:g} on but is {value!r:.40}"
            )
        return amount

    def positive(self, field: str) -> float:
        value = self.number(field)
        if value == 0:
            raise self.fail(f"field {field!r} must be above 0 but is 0")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value = self._held(field, default)
        if not isinstance(value, str):
            raise self.fail(f"field {field!r} must be text but is {value!r}")
        return value

    def origin(self) -> str:
        return self.text("origin", f"user catalogue {self.path}")

    def link(self, field: str) -> str:
        value = self.text(field)
        if value not in entries("links"):
            names = ", ".join(sorted(entries("links")))
            raise self.fail(f"field {field!r} names no link: {value!r}; known: {names}")
        return value

    def part(self, field: str, cls: type[Part], **defaults: int) -> Part | None:
        """The table `field` of this entry as a `cls`; None: it has none.

        Its fields are counts, but from 0 on, text or flags where the class has such a default.
        """
        table = self._held(field, {})
        if not isinstance(table, dict):
            raise self.fail(f"field {field!r} must be a table but is {table!r}")
        if not table:
            return None
        reader = _Fields(f"{self.entry}.{field}", {**table, "_file": self.path})

        def value(name: str, default: object) -> object:
            if default is MISSING:
                return reader.count(name, default=defaults.get(name))
            if isinstance(default, bool):
                return reader.flag(name, default)
            if isinstance(default, str):
                return reader.text(name, default)
            return int(reader.number(name, 0)) or default

        values: dict[str, Any] = {
            definition.name: value(definition.name, definition.default)
            for definition in fields(cls)
        }
        reader.done()
        return cls(**values)

    def done(self) -> None:
        unread = set(self.fields) - self.read - {"_file"}
        if unread:
            raise self.fail(f"unknown field {min(unread)!r}")


def _gpu(name: str, entry: Entry) -> GpuSpec:
    reader = _Fields(f"gpus.{name}", entry)
    spec = GpuSpec(
        name=name,
        memory_bytes=round(reader.positive("memory_gib") * GIB),
        bandwidth_bytes_per_s=reader.positive("bandwidth_gb_per_s") * 1e9,
        flops_16bit=reader.positive("tflops_16bit") * 1e12,
        flops_8bit=reader.number("tflops_8bit", 0.0) * 1e12,
        flops_4bit=reader.number("tflops_4bit", 0.0) * 1e12,
        host_link=reader.link("host_link"),
        peer_link=reader.link("peer_link"),
        power_w=reader.positive("power_w"),
        price_per_hour_usd=reader.number("price_per_hour_usd", 0.0),
        origin=reader.origin(),
        multiprocessors=reader.size("multiprocessors"),
        flash_attention=reader.size("flash_attention"),
    )
    reader.done()
    return spec


def _link(name: str, entry: Entry) -> LinkSpec:
    reader = _Fields(f"links.{name}", entry)
    spec = LinkSpec(
        name=name,
        bandwidth_bytes_per_s=reader.positive("bandwidth_gb_per_s") * 1e9,
        latency_s=reader.number("latency_us", 0.0) * 1e-6,
        origin=reader.origin(),
    )
    reader.done()
    return spec


def _model(name: str, entry: Entry) -> ModelSpec:
    reader = _Fields(f"models.{name}", entry)
    family = reader.text("family")
    if family not in FAMILIES:
        raise UnknownNameError(f"family of model {name} in {entry['_file']}:", family, FAMILIES)
    heads, hidden = reader.count("heads"), reader.count("hidden")
    layers = reader.count("layers")
    latent = reader.part("latent", LatentAttention)
    spec = ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.count("kv_heads", default=1 if latent else heads),
        head_dim=reader.count(
            "head_dim",
            default=latent.kv_rank + latent.rope_dim if latent else max(1, hidden // heads),
        ),
        intermediate=reader.count("intermediate"),
        vocab=reader.count("vocab"),
        context_tokens=reader.count("context_tokens"),
        tied_embeddings=reader.flag("tied_embeddings", default=False),
        origin=reader.origin(),
        experts=reader.part("experts", Experts),
        latent=latent,
        sparse=reader.part("sparse", SparseAttention),
        window=reader.part("window", SlidingWindow, layers=layers),
        linear=reader.part("linear", LinearAttention),
        image_encoder_parameters=int(reader.number("image_encoder_parameters", 0)),
        checkpoint_dtype=weight_dtype(reader.text("checkpoint_dtype", "bf16")).name,
        checkpoint_kv_dtype=kv_dtype(reader.text("checkpoint_kv_dtype", "bf16")).name,
        checkpoint_beside_dtype=reader.text("checkpoint_beside_dtype", ""),
        mixers_alone=reader.size("mixers_alone"),
        mlps_alone=reader.size("mlps_alone"),
        own_traits=reader.part("traits", Traits),
    )
    reader.done()
    return spec
