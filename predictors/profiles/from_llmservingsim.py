"""LLMServingSim's layer profiles of vLLM, mixed batches among them (casys-kaist, MIT)."""

from __future__ import annotations

import re
from pathlib import Path

from ...workloads.errors import FileFormatError
from ..specs import model
from .importers import ImportOptions
from .profile import Profile, ProfileTable, Source, read_csv, table_of

_ONCE = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
_FOLDER = re.compile(r"(?P<gpu>[^-]+)-(?P<model>.+)-(?P<dtype>bf16|fp16|fp8)-tp(?P<tp>\d+)$")


def read(path: Path, options: ImportOptions) -> Profile:
    """Read the folder of one model on one GPU; missing settings come from meta.yaml or the folder's
    name.
    """
    said = _said(path)
    name = options.model_name(said.get("model"))
    gpu = options.gpu_name(said.get("hardware"))
    layers = model(name).layers
    return Profile(
        model=name,
        gpu=gpu,
        tp=options.tp or int(said.get("tp", 1)),
        sources=(
            Source(
                "LLMServingSim (casys-kaist/LLMServingSim)",
                path.resolve().name,
                licence="MIT",
                version=f"vLLM {said['vllm_version']}" if "vllm_version" in said else "",
                note="median kernel times of one layer, launched eagerly",
            ),
        ),
        tables={
            "linear": _operators(path / "dense.csv", "linear", "tokens", layers),
            "per_sequence": _operators(path / "per_sequence.csv", "per_sequence", "sequences", 0),
            "attention": _attention(path / "attention.csv", layers),
        },
    )


def _said(path: Path) -> dict[str, str]:
    """The few plain lines of meta.yaml that matter; else what the folder's name says."""
    said: dict[str, str] = {}
    named = _FOLDER.match(path.resolve().name)
    if named:
        said = {"hardware": named["gpu"], "model": named["model"], "tp": named["tp"]}
    meta = path / "meta.yaml"
    if meta.is_file():
        for line in meta.read_text(encoding="utf-8").splitlines():
            key, colon, value = line.partition(":")
            if colon and key in ("model", "hardware", "vllm_version"):
                said[key] = value.strip().strip("'\"")
    return said


def _operators(path: Path, kind: str, count: str, layers: int) -> ProfileTable:
    columns = read_csv(path, ("layer", count, "time_us"))
    rows = []
    for operator, size, time_us in zip(*columns.values(), strict=True):
        calls = layers * (2 if operator in _TWICE_A_LAYER else 1)
        if operator in _ONCE or not layers:
            calls = 1
        rows.append((operator, _number(path, size), calls, _number(path, time_us)))
    return table_of(kind, rows)


def _attention(path: Path, layers: int) -> ProfileTable:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    columns = read_csv(path, names)
    rows = []
    for row in zip(*columns.values(), strict=True):
        *counts, time_us = (_number(path, text) for text in row)
        rows.append((*counts, layers, time_us))
    return table_of("attention", rows)


def _number(path: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FileFormatError(path, None, f"{text!r} is no number") from None
