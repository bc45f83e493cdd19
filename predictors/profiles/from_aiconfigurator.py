"""aiconfigurator's measured operators (ai-dynamo/aiconfigurator, Apache-2.0), for one model.

Its tables are by shape, not by model: matrix multiplications by (m, n, k), attention by heads and
lengths, all-reduces by message. What a model's step is made of is put together here. Norms, rotary
embedding and activation are not in its tables; their time is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError
from ...workloads.extras import need
from ..operators.server_version import DEFAULT_ENGINE, TITLES
from ..specs import ModelSpec, model
from .build_model import ALL_REDUCE
from .importers import ImportOptions, unused_note
from .profile_format import Profile, Source, read_parquet, table_of

_DTYPE = "bfloat16"
_REDUCES_A_LAYER = 2


_REQUIRED = ("gemm_perf", "context_attention_perf", "generation_attention_perf")
_ALL_REDUCE = "custom_allreduce_perf"
_VERSION = re.compile(r"\d+\.\d")


@dataclass(frozen=True)
class _Tables:
    """Files by name without suffix, and what else the system's folder has."""

    files: dict[str, Path]
    backend: str
    left_out: list[str]  # backends with their versions


def read_aiconfigurator(path: Path, options: ImportOptions) -> Profile:
    """Read the Parquet files of one system: of `SYSTEM/FAMILY/BACKEND/VERSION` (2026) or
    `SYSTEM/BACKEND/VERSION` the newest of vLLM, or what `path` names within; or all files in `path`
    and below (or next to it: `SYSTEM_*` of one system).
    """
    if options.model is None:
        raise SloBenchError("aiconfigurator's tables are by shape: name the model with --model")
    system_tables = _tables(path)
    files, backend = system_tables.files, system_tables.backend
    spec, tp = model(options.model), options.tp or 1
    if not spec.is_plain:
        raise SloBenchError(
            f"{spec.name} is no plain dense model; use its step times from the same tables "
            "(--profile operators)"
        )
    device = str(_column(files, "generation_attention_perf", "device")[0])
    gpu = options.gpu_name(device)
    tables = {
        "linear": table_of("linear", _linear(files, spec, tp, backend)),
        "per_sequence": table_of("per_sequence", _head(files, spec, tp)),
        "attention": table_of("attention", _attention(files, spec, tp)),
    }
    used = [*_REQUIRED, *((_ALL_REDUCE,) if tp > 1 else ())]
    versions = {files[name].parent.name for name in used if _is_version(files[name].parent)}
    if not versions:
        versions = {str(_column(files, "generation_attention_perf", "version")[0])}
    unused = sorted(f"{name}.parquet" for name in files if name not in used)
    note = "prefill and decode attention apart, never mixed; no norms, no activation"
    source = Source(
        "aiconfigurator (ai-dynamo/aiconfigurator)",
        path.resolve().name,
        "Apache-2.0",
        f"{TITLES[backend]} {', '.join(sorted(versions))}",
        unused_note(note, [*system_tables.left_out, *unused]),
    )
    return Profile(options.model, gpu, tp, sources=(source,), tables=tables)


def _tables(path: Path) -> _Tables:
    """What `path` names; it may also be the common beginning of several folders' names.

    Raises:
        SloBenchError: a required file is missing, or there are several systems.
    """
    system, backend, version = _system(path)
    paths = sorted(system.rglob("*.parquet")) if system.is_dir() else []
    if any(_is_version(file.parent) for file in paths):
        tables = _newest(path, system, paths, backend, version)
    else:
        if not paths and path.parent.is_dir():
            beside = (f for f in path.parent.glob(f"{path.name}*") if f.is_dir())
            paths = sorted(file for folder in beside for file in folder.rglob("*.parquet"))
        named = {file.stem: file for file in paths}
        if len(named) != len(paths):
            raise _several(path, paths[0].parent.name.split("_")[0])
        folders = {file.parent.name for file in paths}
        of_others = (name for name in TITLES if any(name in folder for folder in folders))
        tables = _Tables(named, next(of_others, DEFAULT_ENGINE), [])
    for name in _REQUIRED:
        if name not in tables.files:
            raise SloBenchError(
                f"{path} has no {name}.parquet; it has {', '.join(tables.files) or 'none'}. Give "
                "the folder of a system, such as systems/data/h200_sxm"
            )
    return tables


def _newest(path: Path, system: Path, paths: Sequence[Path], backend: str, version: str) -> _Tables:
    """Of each table the newest version, or `version`, of `backend` or the first that there is."""
    paths = [file for file in paths if _VERSION.match(file.parent.name)]
    for file in paths:
        if system not in (file.parents[2], file.parents[3]):
            raise _several(path, file.relative_to(system).parts[0])
    there = {file.parent.parent.name for file in paths}
    backend = backend or next((name for name in TITLES if name in there), "")
    named = {
        file.stem: file
        for file in sorted(paths, key=_release)
        if file.parent.parent.name == backend and version in ("", file.parent.name)
    }
    releases = {f"{file.parent.parent.name} {file.parent.name}" for file in paths}
    used = {f"{file.parent.parent.name} {file.parent.name}" for file in named.values()}
    return _Tables(named, backend, sorted(releases - used))


def _several(path: Path, example: str) -> SloBenchError:
    return SloBenchError(
        f"{path} holds several systems; name one, or the beginning of its folders' names, such as "
        f"{example}"
    )


def _system(path: Path) -> tuple[Path, str, str]:
    """The system's folder, and the backend and version that `path` names in it ('': none)."""
    folder, backend, version = path.resolve(), "", ""
    if _is_version(folder):
        folder, version = folder.parent, folder.name
    if folder.name in TITLES:
        folder, backend = folder.parent, folder.name
    of_one_family = any((folder / name).is_dir() for name in TITLES)
    if of_one_family and any(folder.parent.glob(f"*/*/*/{_REQUIRED[0]}.parquet")):
        folder = folder.parent
    return folder, backend, version


def _is_version(folder: Path) -> bool:
    return _VERSION.match(folder.name) is not None and folder.parent.name in TITLES


def _release(file: Path) -> tuple[int, ...]:
    """Sorts versions as numbers, a release after its candidates."""
    numbers = [int(number) for number in re.findall(r"\d+", file.parent.name.partition("rc")[0])]
    return (*numbers, 0 if "rc" in file.parent.name else 1)


def _column(files: Mapping[str, Path], name: str, column: str) -> list[Any]:
    return read_parquet(files[name], (column,))[column]


def _rows(
    files: Mapping[str, Path], name: str, counts: tuple[str, ...], where: Mapping[str, Any]
) -> tuple[Floats, Floats]:
    """The counts of the rows that fit `where`, and their latency in µs, the least of each point.

    Some points were measured with several kernels: the engine picks the fastest.
    """
    columns = read_parquet(files[name], (*counts, *where, "latency"))
    chosen = np.ones(len(columns["latency"]), dtype=np.bool_)
    for key, value in where.items():
        chosen &= np.array(columns[key]) == value
    points = np.column_stack([np.array(columns[c], dtype=np.float64)[chosen] for c in counts])
    times = np.array(columns["latency"], dtype=np.float64)[chosen] * 1e3
    if not len(times):
        conditions = ", ".join(f"{k} {v}" for k, v in where.items())
        raise SloBenchError(f"{files[name]} has no rows with {conditions}")
    unique, inverse = np.unique(points, axis=0, return_inverse=True)
    least = np.full(len(unique), np.inf)
    np.minimum.at(least, inverse, times)
    return unique, least


def _gemm(files: Mapping[str, Path], n: int, k: int) -> tuple[Floats, Floats]:
    """Sizes m and times of (m, n, k): of the shape itself, else scaled from the nearest one."""
    points, times = _rows(files, "gemm_perf", ("m", "n", "k"), {"gemm_dtype": _DTYPE})
    shapes = np.unique(points[:, 1:], axis=0)
    far = np.abs(np.log(shapes / np.array([n, k], dtype=np.float64))).sum(axis=1)
    nearest = shapes[int(np.argmin(far))]
    chosen = (points[:, 1:] == nearest).all(axis=1)
    scale = n * k / float(nearest.prod())
    return points[chosen, 0], times[chosen] * scale


def _matrices(spec: ModelSpec, tp: int) -> dict[str, tuple[int, int]]:
    """(n, k) of a layer's matrices on one GPU."""
    heads = -(-spec.kv_heads // tp)
    qkv = spec.query_width // tp + 2 * heads * spec.head_dim
    inner = spec.intermediate // tp
    return {
        "qkv_proj": (qkv, spec.hidden),
        "o_proj": (spec.hidden, spec.query_width // tp),
        "up_proj": ((2 if spec.traits.gated_mlp else 1) * inner, spec.hidden),
        "down_proj": (spec.hidden, inner),
    }


def _linear(
    files: Mapping[str, Path], spec: ModelSpec, tp: int, backend: str
) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for operator, (n, k) in _matrices(spec, tp).items():
        sizes, times = _gemm(files, n, k)
        rows += [(operator, m, spec.layers, t) for m, t in zip(sizes, times, strict=True)]
    if tp > 1:
        if _ALL_REDUCE not in files:
            raise SloBenchError(f"there is no {_ALL_REDUCE}.parquet, so no tp {tp}")
        points, times = _rows(
            files,
            _ALL_REDUCE,
            ("message_size",),
            {"num_gpus": tp, "backend": f"{backend}_graph"},
        )
        calls = _REDUCES_A_LAYER * spec.layers
        for elements, time_us in zip(points[:, 0] / spec.hidden, times, strict=True):
            if elements >= 1:
                rows.append((ALL_REDUCE, elements, calls, time_us))
    return rows


def _head(files: Mapping[str, Path], spec: ModelSpec, tp: int) -> list[tuple[Any, ...]]:
    sizes, times = _gemm(files, spec.vocab // tp, spec.hidden)
    return [("lm_head", m, 1, t) for m, t in zip(sizes, times, strict=True) if m <= 1024]


def _attention(files: Mapping[str, Path], spec: ModelSpec, tp: int) -> list[tuple[Any, ...]]:
    shape = {
        "num_heads": spec.heads // tp,
        "num_key_value_heads": -(-spec.kv_heads // tp),
        "head_dim": spec.head_dim,
        "attn_dtype": _DTYPE,
        "kv_cache_dtype": _DTYPE,
    }
    rows: list[tuple[Any, ...]] = []
    points, times = _calls(files, "context_attention_perf", "isl", shape)
    for (batch, length), time_us in zip(points, times, strict=True):
        if batch == 1:
            rows.append((length, 0.0, 0.0, 0.0, spec.layers, time_us))
    points, times = _calls(files, "generation_attention_perf", "step", shape)
    for (batch, before), time_us in zip(points, times, strict=True):
        rows.append((0.0, 0.0, batch, before + 1, spec.layers, time_us))
    return rows


def _calls(
    files: Mapping[str, Path], name: str, length: str, shape: Mapping[str, Any]
) -> tuple[Floats, Floats]:
    """(batch, length) and times of one shape, without a sliding window."""
    need("parquet", str(files[name]))
    import pyarrow.parquet as pq

    where = dict(shape)
    if "window_size" in pq.read_schema(files[name]).names:
        where["window_size"] = 0
    return _rows(files, name, ("batch_size", length), where)
