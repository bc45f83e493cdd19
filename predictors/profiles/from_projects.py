"""Measurements of DistServe, LLMServingSim, Splitwise and Vidur as profiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_json
from ..specs import model
from .importers import ImportOptions, recognise
from .profile_format import Fitted, Profile, ProfileTable, Source, read_csv, table_of

# -------------------------------------------------------------------- DistServe

_GPU = "a100-80g"  # where all of them were measured
_PHASES = {"prefill": "prefill", "decoding_smallbs": "small", "decoding_largebs": "large"}


def read_distserve(path: Path, options: ImportOptions) -> Profile:
    """Fitted coefficients of prefill and decode (LLMServe/DistServe, Apache-2.0): one model and tp
    of a profiler JSON; milliseconds become seconds.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise FileFormatError(path, None, "must hold an object of models")
    entry_name = _chosen(path, content, options)
    name = options.model_name(entry_name)
    degrees = content[entry_name]
    tp = options.tp or 1
    if not isinstance(degrees, dict) or str(tp) not in degrees:
        there = ", ".join(degrees) if isinstance(degrees, dict) else "none"
        raise SloBenchError(f"{path} has no tp {tp} of {entry_name}; it has tp {there}")
    note = "coefficients of whole steps on an A100-80G, prefill and decode apart"
    source = Source("DistServe (LLMServe/DistServe)", path.name, "Apache-2.0", note=note)
    fits = {"distserve": Fitted(_coefficients(path, degrees[str(tp)]))}
    gpu = options.gpu or _GPU
    return Profile(name, gpu, tp, best="distserve", sources=(source,), fits=fits)


def _chosen(path: Path, content: dict[str, Any], options: ImportOptions) -> str:
    if options.model:
        fitting = [key for key in content if options.model == _catalogue_name("models", key)]
    else:
        fitting = list(content)
    if len(fitting) != 1:
        raise SloBenchError(
            f"{path} has {len(fitting)} models that fit; name one with --model "
            f"({', '.join(content)})"
        )
    return str(fitting[0])


def _catalogue_name(section: str, text: str) -> str:
    try:
        return recognise(section, text)
    except SloBenchError:
        return ""


def _coefficients(path: Path, entry: Any) -> dict[str, float]:
    try:
        coefficients = {
            f"{phase}_{name}": float(value) * 1e-3
            for key, phase in _PHASES.items()
            for name, value in zip("abc", entry[key], strict=True)
        }
        coefficients["large_from"] = float(entry["decoding_large_small_bs_threshold"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(path, None, f"is not a DistServe profile: {error!r}") from None
    return coefficients


# -------------------------------------------------------------------- LLMServingSim

_ONE_CALL = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
_FOLDER = re.compile(r"(?P<gpu>[^-]+)-(?P<model>.+)-(?P<dtype>bf16|fp16|fp8)-tp(?P<tp>\d+)$")


def read_llmservingsim(path: Path, options: ImportOptions) -> Profile:
    """Layer profiles of vLLM, mixed batches among them (casys-kaist/LLMServingSim, MIT): the folder
    of one model on one GPU; missing settings come from meta.yaml or the folder's name.
    """
    settings = _settings(path)
    name = options.model_name(settings.get("model"))
    gpu = options.gpu_name(settings.get("hardware"))
    layers = model(name).layers
    source = Source(
        "LLMServingSim (casys-kaist/LLMServingSim)",
        path.resolve().name,
        "MIT",
        f"vLLM {settings['vllm_version']}" if "vllm_version" in settings else "",
        "median kernel times of one layer, launched eagerly",
    )
    tables = {
        "linear": _operators(path / "dense.csv", "linear", "tokens", layers),
        "per_sequence": _operators(path / "per_sequence.csv", "per_sequence", "sequences", 0),
        "attention": _attention(path / "attention.csv", layers),
    }
    tp = options.tp or int(settings.get("tp", 1))
    return Profile(name, gpu, tp, sources=(source,), tables=tables)


def _settings(path: Path) -> dict[str, str]:
    """The few plain lines of meta.yaml that matter; else what the folder's name says."""
    settings: dict[str, str] = {}
    named = _FOLDER.match(path.resolve().name)
    if named:
        settings = {"hardware": named["gpu"], "model": named["model"], "tp": named["tp"]}
    meta = path / "meta.yaml"
    if meta.is_file():
        for line in meta.read_text(encoding="utf-8").splitlines():
            key, colon, value = line.partition(":")
            if colon and key in ("model", "hardware", "vllm_version"):
                settings[key] = value.strip().strip("'\"")
    return settings


def _operators(path: Path, kind: str, count: str, layers: int) -> ProfileTable:
    columns = read_csv(path, ("layer", count, "time_us"))
    rows = []
    for operator, *figures in zip(*columns.values(), strict=True):
        size, time_us = _numbers(path, figures)
        calls = layers * (2 if operator in _TWICE_A_LAYER else 1)
        if operator in _ONE_CALL or not layers:
            calls = 1
        rows.append((operator, size, calls, time_us))
    return table_of(kind, rows)


def _attention(path: Path, layers: int) -> ProfileTable:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    rows = []
    for row in zip(*read_csv(path, names).values(), strict=True):
        *counts, time_us = _numbers(path, row)
        rows.append((*counts, layers, time_us))
    return table_of("attention", rows)


def _numbers(path: Path, texts: Sequence[str]) -> list[float]:
    numbers = []
    for text in texts:
        try:
            numbers.append(float(text))
        except ValueError:
            raise FileFormatError(path, None, f"{text!r} is no number") from None
    return numbers


# -------------------------------------------------------------------- Splitwise

_STEP_COLUMNS = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


def read_splitwise(path: Path, options: ImportOptions) -> Profile:
    """Measured prompts and tokens, end to end (Mutinifni/splitwise-sim, MIT): the rows of one
    model, GPU and tp, a prompt step and a decode step each (milliseconds).

    The decode step is the mean over the answer: its KV is the prompt and half of the answer.
    """
    columns = read_csv(path, ("model", "hardware", "tensor_parallel", *_STEP_COLUMNS))
    rows = list(zip(*columns.values(), strict=True))
    try:
        kinds = sorted({(row[0], row[1], int(float(row[2]))) for row in rows})
    except (ValueError, OverflowError) as error:
        problem = f"tensor_parallel is no whole number: {error}"
        raise FileFormatError(path, None, problem) from None
    fitting = [kind for kind in kinds if _fits(kind, options)]
    if len(fitting) != 1:
        there = "; ".join(f"{m} on {g} × tp {tp}" for m, g, tp in fitting or kinds)
        raise SloBenchError(
            f"{path} has {len(fitting)} that fit; choose with --model, --gpu and --tp: {there}"
        )
    kind = fitting[0]
    steps = []
    try:
        for model_name, gpu_name, tp, prompt, batch, answer, prompt_ms, token_ms in rows:
            if (model_name, gpu_name, int(float(tp))) != kind:
                continue
            n, tokens = float(batch), float(prompt)
            steps.append((n, tokens, 0.0, 0.0, 0.0, 1e3 * float(prompt_ms)))
            if float(answer) > 1:
                kv = tokens + float(answer) / 2
                steps.append((0.0, 0.0, 0.0, n, kv, 1e3 * float(token_ms)))
    except ValueError as error:
        raise FileFormatError(path, None, f"a field is no number: {error}") from None
    gpu = options.gpu_name(kind[1])
    note = "whole steps, host included; rows of tp 2 are irregular"
    source = Source("Splitwise (Mutinifni/splitwise-sim)", path.name, "MIT", note=note)
    tables = {"steps": table_of("steps", steps)}
    return Profile(options.model_name(kind[0]), gpu, kind[2], sources=(source,), tables=tables)


def _fits(kind: tuple[str, str, int], options: ImportOptions) -> bool:
    model_name, gpu_name, tp = kind
    if "pcap" in gpu_name:  # under a power cap
        return False
    pairs = ((options.model, model_name, "models"), (options.gpu, gpu_name, "gpus"))
    for requested, name, section in pairs:
        if (
            requested is not None
            and requested != name
            and requested != _catalogue_name(section, name)
        ):
            return False
    return options.tp is None or options.tp == tp


# -------------------------------------------------------------------- Vidur

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


def read_vidur(path: Path, options: ImportOptions) -> Profile:
    """Linear layers (microsoft/vidur, MIT); attention is not among them.

    Read from `GPU__ORG__MODEL__linear.csv`, milliseconds a call; rows of one tp (default 1).
    """
    parts = path.name.split("__")
    named = len(parts) == 4
    name = options.model_name(parts[2] if named else None)
    gpu = options.gpu_name(parts[0] if named else None)
    tp = options.tp or 1
    calls = {k: n * model(name).layers for k, n in _IN_A_LAYER.items()} | _ONCE
    fields = [f"{operator}_ms" for operator in calls]
    columns = read_csv(path, ("num_tokens", "num_tensor_parallel_workers", *fields))
    try:
        sizes = [float(v) for v in columns["num_tokens"]]
        degrees = [int(float(v)) for v in columns["num_tensor_parallel_workers"]]
        rows = [
            (operator, tokens, calls[operator], 1e3 * float(time_ms))
            for operator, field in zip(calls, fields, strict=True)
            for tokens, degree, time_ms in zip(sizes, degrees, columns[field], strict=True)
            if degree == tp and time_ms
        ]
    except (ValueError, OverflowError) as error:
        raise FileFormatError(path, None, f"a field is no number: {error}") from None
    if not rows:
        there = ", ".join(map(str, sorted(set(degrees))))
        raise SloBenchError(f"{path} has no rows of tp {tp}; it has tp {there}")
    note = "linear layers and norms of one layer; no attention, no output head"
    note += "; without all-reduces" if tp > 1 else ""
    source = Source("Vidur (microsoft/vidur)", path.name, "MIT", note=note)
    return Profile(name, gpu, tp, sources=(source,), tables={"linear": table_of("linear", rows)})
