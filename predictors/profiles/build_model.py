"""From a profile to a step-time model, for the device and the model that it is about.

These are the catalogue's, or as the profile measured them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError, UnknownNameError
from ..dtypes import SIXTEEN_BIT_BYTES, weight_dtype
from ..model_spec import ModelSpec
from ..specs import GpuSpec, entries, gpu, link, model
from ..step_time import ALL_REDUCES_PER_LAYER
from .profile_format import MeasuredLink, Profile, ProfileTable
from .step_time_table import Curve, DecodeGrid, Host, MixedGrid, TableStepTime

_BITS_OF_FLOPS = 16
_NO_LINK = "pcie4-x16"  # where none was measured


def profiled_model(profile: Profile) -> ModelSpec:
    """The model that the profile is about.

    Raises:
        SloBenchError: neither the catalogue nor the profile has its shape.
    """
    if not profile.model_file:
        return model(profile.model)
    return dataclasses.replace(model(profile.model_file), name=profile.model)


def profiled_gpu(profile: Profile) -> GpuSpec:
    """The GPU (or CPU) that it is about, with the links that were measured on it.

    Raises:
        SloBenchError: neither the catalogue nor the profile has it.
    """
    try:
        spec = gpu(profile.gpu)
    except UnknownNameError:
        if profile.device is None:
            raise
        spec = _measured(profile)
    named = {name: _named(measured_link) for name, measured_link in profile.links.items()}
    unknown = set(named) - {"host", "peer"}
    if unknown:
        raise SloBenchError(f"a profile's links are host and peer, not {min(unknown)}")
    host, peer = named.get("host", spec.host_link), named.get("peer", spec.peer_link)
    return dataclasses.replace(spec, host_link=host, peer_link=peer)


def with_peer_link(profile: Profile, text: str | None) -> Profile:
    """With a measured link between GPUs, such as `16gb/s@20us` (bandwidth and latency); as it is
    where `text` is None.

    Raises:
        SloBenchError: `text` is not of that form; a name of the catalogue is a data sheet's link.
    """
    if text is None:
        return profile
    spec = None if text in entries("links") or "@" not in text else link(text)
    if spec is None:
        raise SloBenchError(
            f"--peer-link must be a measured bandwidth and latency such as 16gb/s@20us but is "
            f"{text!r}"
        )
    measured = MeasuredLink(spec.bandwidth_bytes_per_s, spec.latency_s)
    return dataclasses.replace(profile, links={**profile.links, "peer": measured})


def _measured(profile: Profile) -> GpuSpec:
    device = profile.device
    assert device is not None
    bits = weight_dtype(profile.weight_dtype).compute_bits
    return GpuSpec(
        name=profile.gpu,
        memory_bytes=int(device.memory_bytes),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        flops_16bit=device.flops * bits / _BITS_OF_FLOPS,
        flops_8bit=0.0,
        flops_4bit=0.0,
        host_link=_NO_LINK,
        peer_link=_NO_LINK,
        power_w=1.0,
        price_per_hour_usd=0.0,
        origin=f"measured: {profile.label}",
    )


def _named(link: MeasuredLink) -> str:
    """By a name that says its figures."""
    return f"{link.bandwidth_bytes_per_s / 1e9:.9g}gb/s@{1e6 * link.latency_s:.9g}us"


# Two thread blocks (a decoding sequence and one KV head each) share a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 2
ALL_REDUCE = "all_reduce"  # the operator in a table of linear layers
GRAPH_TOKENS = 512  # the largest CUDA graph that vLLM captures


def default_host(host_s: float | None = None) -> Host:
    """What the host adds where steps are scheduled ahead and decode from CUDA graphs: nothing, or
    `host_s` seconds before every step.
    """
    return Host(step_s=host_s or 0.0, graph_tokens=GRAPH_TOKENS)


def table_step_time(profile: Profile, host: Host | None = None) -> TableStepTime:
    """The profile's tables as a step-time model.

    Raises:
        SloBenchError: a table is missing, attention lacks decode or prefill, or several GPUs have
            no all-reduce.
    """
    attention = _table(profile, "attention")
    linear = linear_curve(profile)
    if "per_sequence" in profile.tables:
        per_sequence = summed_curve(profile.tables["per_sequence"], "sequences")
    else:
        per_sequence = Curve(np.array([1.0]), np.array([0.0]))
    decode = _decode(profile, attention)
    return TableStepTime(
        linear,
        per_sequence,
        decode,
        _mixed(profile, attention, decode),
        default_host() if host is None else host,
        resident=_resident(profile),
    )


def _table(profile: Profile, kind: str) -> ProfileTable:
    if kind not in profile.tables:
        there = ", ".join(profile.tables) or "none"
        raise SloBenchError(
            f"the profile of {profile.label} has no table {kind!r} (it has: {there}); add one "
            "with `slo-bench profile import … --add`, or fit a formula that does without"
        )
    return profile.tables[kind]


def linear_curve(profile: Profile) -> Curve:
    """Linear layers and all-reduces of a step by its tokens, calibrated where the profile is.

    Tables without all-reduces get those of the measured link between the GPUs: a latency each for
    scatter and gather, and 2 (tp - 1) / tp of the bytes over every GPU's link, as in
    `predictors.step_time`.

    Raises:
        SloBenchError: the table is missing; or tp > 1, and neither all-reduces nor the link were
            measured.
    """
    table = _table(profile, "linear")
    curve = summed_curve(table, "tokens")
    counts, seconds = curve.counts, curve.seconds
    tp = profile.tp
    if tp > 1 and ALL_REDUCE not in table.words["operator"]:
        link = profile.links.get("peer")
        if link is None:
            raise SloBenchError(
                f"the profile of {profile.label} has no all-reduce: its tables hold the work of "
                "one GPU alone. Measure the link between the GPUs and give its bandwidth and "
                "latency, for example --peer-link 16gb/s@20us with `slo-bench profile import` (or "
                "validate, calibrate), or [link.peer] in the file"
            )
        shape = profiled_model(profile)
        token_bytes = 2 * (tp - 1) / tp * shape.hidden * SIXTEEN_BIT_BYTES
        each_s = 2 * link.latency_s + counts * token_bytes / link.bandwidth_bytes_per_s
        seconds = seconds + ALL_REDUCES_PER_LAYER * shape.layers * each_s
    if profile.calibration is not None:
        seconds = seconds * profile.calibration.at(np.maximum(1.0, counts))
    return Curve(counts, seconds)


def summed_curve(table: ProfileTable, count: str) -> Curve:
    """All operators of a step together; an operator not measured at a size is interpolated."""
    sizes = np.unique(table[count])
    seconds = np.zeros(len(sizes))
    for operator in np.unique(table.words["operator"]):
        rows = table.rows(table.words["operator"] == operator)
        (counts,), times = grid_of([rows[count]], rows["time_us"] * rows["calls"] * 1e-6, ())
        seconds += np.interp(sizes, counts, times)
    return Curve(sizes, seconds)


def _decode(profile: Profile, attention: ProfileTable) -> DecodeGrid:
    rows = attention.rows((attention["prefill_chunk"] == 0) & (attention["n_decode"] > 0))
    if len(np.unique(rows["n_decode"])) < 2 or len(np.unique(rows["kv_decode"])) < 2:
        raise SloBenchError(
            f"the attention table of {profile.label} has too few rows that only decode; a grid of "
            "sequences and lengths is needed"
        )
    (sequences, kv), seconds = grid_of(
        [rows["n_decode"], rows["kv_decode"]], _seconds(rows), fill_along=(1, 0)
    )
    return DecodeGrid(sequences, kv, seconds)


def _mixed(profile: Profile, attention: ProfileTable, decode: DecodeGrid) -> MixedGrid:
    prefill = attention.rows((attention["prefill_chunk"] > 0) & (attention["n_decode"] == 0))
    if len(np.unique(prefill["prefill_chunk"])) < 2:
        raise SloBenchError(
            f"the attention table of {profile.label} has too few rows of prefill; several chunk "
            "lengths are needed"
        )
    mixed = attention.rows((attention["prefill_chunk"] > 0) & (attention["n_decode"] > 0))
    if len(mixed):
        return _measured_mix(prefill, mixed)
    return _added_mix(prefill, decode)


def _measured_mix(prefill: ProfileTable, mixed: ProfileTable) -> MixedGrid:
    """Prefill alone is one more slice, the same at every length of the (absent) decodes."""
    kv = np.unique(mixed["kv_decode"])
    repeated = [np.repeat(prefill[name], len(kv)) for name in ("prefill_chunk", "kv_prefill")]
    alone = len(repeated[0])
    columns = [
        np.concatenate([mixed["prefill_chunk"], repeated[0]]),
        np.concatenate([mixed["kv_prefill"], repeated[1]]),
        np.concatenate([mixed["n_decode"], np.zeros(alone)]),
        np.concatenate([mixed["kv_decode"], np.tile(kv, len(prefill))]),
    ]
    times = np.concatenate([_seconds(mixed), np.repeat(_seconds(prefill), len(kv))])
    # Along chunks attention is smoothest, along the decodes' lengths it has steps (caches).
    axes, seconds = grid_of(columns, times, fill_along=(0, 1, 3, 2))
    chunks, contexts, sequences, kv = axes
    if len(contexts) == 1:
        contexts, seconds = _with_contexts(chunks, contexts, seconds)
    return MixedGrid(chunks, contexts, sequences, kv, seconds)


def _added_mix(prefill: ProfileTable, decode: DecodeGrid) -> MixedGrid:
    """Mixed batches were not measured: prefill and decode attention one after the other."""
    (chunks, contexts), alone = grid_of(
        [prefill["prefill_chunk"], prefill["kv_prefill"]], _seconds(prefill), fill_along=(0, 1)
    )
    if len(contexts) == 1:
        contexts, alone = _with_contexts(chunks, contexts, alone)
    sequences = np.concatenate([[0.0], decode.sequences])
    decodes = np.concatenate([np.zeros((1, len(decode.kv_tokens))), decode.seconds])
    seconds = alone[:, :, None, None] + decodes[None, None, :, :]
    return MixedGrid(chunks, contexts, sequences, decode.kv_tokens, seconds)


def _with_contexts(chunks: Floats, contexts: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Chunks after others were not measured: each is priced by its (query, KV) pairs.

    The longest chunk measured, c tokens in `seconds`, attends to c * c / 2 pairs.
    """
    longest = float(chunks[-1])
    pair_s = seconds[-1, 0] / (longest * longest / 2)
    more = longest
    shape = (len(chunks),) + (1,) * (seconds.ndim - 2)
    later = seconds[:, 0] + chunks.reshape(shape) * more * pair_s[None]
    return np.array([contexts[0], contexts[0] + more]), np.stack([seconds[:, 0], later], axis=1)


def _seconds(table: ProfileTable) -> Floats:
    return table["time_us"] * table["calls"] * 1e-6


def _resident(profile: Profile) -> float:
    """Sequences of the model that the GPU attends to at once; 0 where that is not known."""
    if not profile.multiprocessors:
        return 0.0
    try:
        kv_heads = -(-profiled_model(profile).kv_heads // profile.tp)
    except SloBenchError:
        return 0.0
    return BLOCKS_PER_MULTIPROCESSOR * profile.multiprocessors / kv_heads


def grid_of(
    columns: Sequence[Floats], values: Floats, fill_along: Sequence[int]
) -> tuple[list[Floats], Floats]:
    """Axes (the values of each column, ascending) and the full grid of `values` over them.

    Of equal points the median is taken. Cells that were not measured are filled along the axes
    `fill_along`, in that order: straight between their neighbours on that axis, and at last
    beyond them, from the two outermost.
    """
    axes = [np.unique(column) for column in columns]
    where = tuple(np.searchsorted(a, c) for a, c in zip(axes, columns, strict=True))
    shape = tuple(len(axis) for axis in axes)
    flat = np.ravel_multi_index(where, shape)
    order = np.lexsort((values, flat))
    cells, begins, counts = np.unique(flat[order], return_index=True, return_counts=True)
    below, above = (values[order[begins + k // 2]] for k in (counts - 1, counts))
    grid = np.full(shape, np.nan)
    grid.ravel()[cells] = (below + above) / 2
    for beyond in (False, True):
        for axis in fill_along:
            if not np.isnan(grid).any():
                break
            grid = _filled(grid, axes[axis], axis, beyond)
    return axes, grid


def _filled(grid: Floats, points: Floats, axis: int, beyond: bool) -> Floats:
    """`grid` with missing cells filled along one axis, in between or also beyond."""
    lines = np.moveaxis(grid, axis, -1).reshape(-1, len(points)).copy()
    for line in lines:
        present = np.flatnonzero(~np.isnan(line))
        if len(present) in (0, len(points)):
            continue
        missing = np.flatnonzero(np.isnan(line))
        inside = missing[(missing > present[0]) & (missing < present[-1])]
        line[inside] = np.interp(points[inside], points[present], line[present])
        if beyond:
            for outer, ends in (
                (missing[missing < present[0]], present[:2]),
                (missing[missing > present[-1]], present[-2:]),
            ):
                slope = np.ptp(line[ends]) and (line[ends[1]] - line[ends[0]])
                slope = slope / (points[ends[1]] - points[ends[0]]) if len(ends) > 1 else 0.0
                line[outer] = np.maximum(
                    0.0, line[ends[0]] + slope * (points[outer] - points[ends[0]])
                )
    shape = [grid.shape[k] for k in range(grid.ndim) if k != axis] + [len(points)]
    return np.moveaxis(lines.reshape(shape), -1, axis)
