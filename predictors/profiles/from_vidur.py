"""Vidur's measurements (microsoft/vidur, MIT) as profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError
from ..model_spec import ModelSpec
from ..specs import model
from ..step_time import ALL_REDUCES_PER_LAYER
from .build_model import ALL_REDUCE
from .from_projects import numbers
from .importers import ImportOptions, measurements_beside, unused_note
from .profile_format import Profile, Source, read_csv, table_of

# Column: calls of it in a layer; the embedding is once a step. Vidur adds `add` twice.
_IN_A_LAYER = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}
_ONCE = {"emb": 1}
_IN_ATTENTION = ("attn_prefill", "attn_decode", "attn_kv_cache_save")
_SIXTEEN_BITS = 2  # bytes of what an all-reduce sums


def read_vidur(path: Path, options: ImportOptions) -> Profile:
    """Linear layers and attention (microsoft/vidur, MIT): medians in milliseconds a call, rows of
    one tp (default 1) and of the model's shape.

    Read from Vidur's mlp.csv, or a folder with it, and the attention.csv and all_reduce.csv beside
    it where they are; or from `GPU__ORG__MODEL__linear.csv`, which has linear layers alone.
    """
    path = path / "mlp.csv" if path.is_dir() else path
    linear_alone = path.name.count("__") == 3
    names = path.name.split("__") if linear_alone else ("", "", "", *path.resolve().parts)[-4:-1]
    gpu_part, _, model_part = names[:3]
    spec = model(options.model_name(model_part))
    gpu = options.gpu_name(gpu_part)
    tp = options.tp or 1
    linear = _vidur_linear(path, spec, tp, "{}_ms" if linear_alone else _MEDIAN)
    attention: _Rows = []
    notes = ["one layer's operators; no output head"]
    files = [path]
    if not linear_alone:
        attention_file, reduce_file = map(path.with_name, ("attention.csv", "all_reduce.csv"))
        if attention_file.exists():
            attention = _vidur_attention(attention_file, spec, tp)
            files.append(attention_file)
        if tp > 1 and reduce_file.exists():
            linear += _vidur_all_reduce(reduce_file, spec, tp)
            files.append(reduce_file)
    if not attention:
        notes.append("no attention")
    if tp > 1 and linear[-1][0] != ALL_REDUCE:
        notes.append("without all-reduces (give --peer-link, or all_reduce.csv beside mlp.csv)")
    beside = [] if linear_alone else measurements_beside(path.parent, files)
    note = unused_note("; ".join(notes), beside)
    source = Source("Vidur (microsoft/vidur)", path.name, "MIT", note=note)
    tables = {"linear": table_of("linear", linear)}
    if attention:
        tables["attention"] = table_of("attention", attention)
    return Profile(spec.name, gpu, tp, sources=(source,), tables=tables)


_TP_COLUMN = "num_tensor_parallel_workers"
_MEDIAN = "time_stats.{}.median"
_NORMS = ("input_layernorm", "post_attention_layernorm", "add")  # not in every model's file
_Rows = list[tuple[Any, ...]]


def _vidur_linear(path: Path, spec: ModelSpec, tp: int, column: str) -> _Rows:
    calls = {k: n * spec.layers for k, n in _IN_A_LAYER.items()} | _ONCE
    optional = [column.format(name) for name in _NORMS] if column == _MEDIAN else []
    shape = {"n_head": spec.heads, "n_kv_head": spec.kv_heads, "n_embd": spec.hidden}
    shape |= {"n_expanded_embd": spec.intermediate}
    where = {_TP_COLUMN: tp} | (shape if column == _MEDIAN else {})
    fields = [column.format(name) for name in calls]
    table = _vidur_rows(path, where, ("num_tokens", *fields), optional)
    return [
        (operator, tokens, count, 1e3 * time_ms)
        for (operator, count), field in zip(calls.items(), fields, strict=True)
        for tokens, time_ms in zip(table["num_tokens"], table[field], strict=True)
        if time_ms > 0
    ]


def _vidur_attention(path: Path, spec: ModelSpec, tp: int) -> _Rows:
    """Chunks and decode steps apart, with the time to write their keys and values."""
    where = {_TP_COLUMN: tp, "n_q_head": spec.heads, "n_embd": spec.hidden}
    where |= {"n_kv_head": spec.kv_heads}
    fields = [_MEDIAN.format(name) for name in _IN_ATTENTION]
    counts = ("batch_size", "prefill_chunk_size", "kv_cache_size")
    table = _vidur_rows(path, where, (*counts, *fields), fields)
    rows: _Rows = []
    for batch, chunk, kv, *times_ms in zip(*(table[f] for f in (*counts, *fields)), strict=True):
        time_us = 1e3 * sum(times_ms)
        if chunk:
            rows.append((chunk, kv, 0.0, 0.0, spec.layers, time_us))
        else:
            rows.append((0.0, 0.0, batch, kv + 1, spec.layers, time_us))
    return rows


def _vidur_all_reduce(path: Path, spec: ModelSpec, tp: int) -> _Rows:
    """All-reduces within a node; their sizes are bytes of 16-bit numbers."""
    where = {"num_workers": tp, "devices_per_node": tp}
    field = _MEDIAN.format("all_reduce")
    table = _vidur_rows(path, where, ("size", field), ())
    calls = ALL_REDUCES_PER_LAYER * spec.layers
    tokens = [size / spec.hidden / _SIXTEEN_BITS for size in table["size"]]
    pairs = zip(tokens, table[field], strict=True)
    return [(ALL_REDUCE, n, calls, 1e3 * time_ms) for n, time_ms in pairs if n >= 1]


def _vidur_rows(
    path: Path, where: dict[str, int], names: Sequence[str], optional: Sequence[str]
) -> dict[str, list[float]]:
    """Columns of the rows that fit `where`; an empty cell and an absent optional column are 0.

    Raises:
        FileFormatError: no row fits; the message says what there is.
    """
    columns = read_csv(path, (*where, *names), optional)
    table = {name: numbers(path, [v or "0" for v in cells]) for name, cells in columns.items()}
    chosen = list(range(len(table[names[0]])))
    for name, value in where.items():
        values = table[name]
        fitting = [row for row in chosen if values[row] == value]
        if not fitting:
            there = ", ".join(f"{v:g}" for v in sorted({values[row] for row in chosen}))
            label = "tp" if name in (_TP_COLUMN, "num_workers") else name
            raise FileFormatError(
                path, None, f"has no rows of {label} {value}; it has {label} {there}"
            )
        chosen = fitting
    return {name: [table[name][row] for row in chosen] for name in names}
