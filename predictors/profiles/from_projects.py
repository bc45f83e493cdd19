"""Measurements of DistServe, LLMServingSim and Splitwise as profiles."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import read_json_object
from ..dtypes import KV_DTYPES, WEIGHT_DTYPES
from ..model_spec import ModelSpec
from ..specs import model
from .build_model import grid_of
from .importers import ImportOptions, measurements_beside, recognise, unused_note
from .profile_format import Fitted, Profile, ProfileTable, Source, read_csv, table_of
from .step_time_table import Curve

# -------------------------------------------------------------------- DistServe

_GPU = "a100-80g"  # where all of them were measured
_PHASES = {"prefill": "prefill", "decoding_smallbs": "small", "decoding_largebs": "large"}


def read_distserve(path: Path, options: ImportOptions) -> Profile:
    """Fitted coefficients of prefill and decode (LLMServe/DistServe, Apache-2.0): one model and tp
    of a profiler JSON; milliseconds become seconds.
    """
    content = read_json_object(path)
    if not content:
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
_PLAIN_MLP = ("gate_up_proj", "act_fn", "down_proj")  # not in layers of experts
_FOLDER = re.compile(r"(?P<hardware>[^-]+)-(?P<model>.+)-(?P<variant>bf16|fp16|fp8)-tp(?P<tp>\d+)$")
_TP_FOLDER = re.compile(r"tp(?P<tp>\d+)$")
_EXPERTS = "moe.csv"


def read_llmservingsim(path: Path, options: ImportOptions) -> Profile:
    """Layer profiles of vLLM, mixed batches among them (casys-kaist/LLMServingSim, MIT): the folder
    of one model on one GPU; missing settings come from meta.yaml or the folder's name.

    Experts of a step with n tokens take the time of as many activated experts as n tokens choose on
    average, each on its own.
    """
    folder = path
    if not (path / "dense.csv").exists() and (path / f"tp{options.tp or 1}").is_dir():
        folder = path / f"tp{options.tp or 1}"
    settings = _settings(folder)
    name = options.model_name(settings.get("model"))
    gpu = options.gpu_name(settings.get("hardware"))
    tp = int(settings.get("tp", options.tp or 1))
    if options.tp not in (None, tp):
        raise SloBenchError(f"{folder} was measured at tp {tp}, not {options.tp}; leave --tp out")
    spec = model(name)
    files = {kind: folder / f"{kind}.csv" for kind in ("dense", "per_sequence", "attention")}
    linear = _operators(files["dense"], "tokens", spec.layers, spec.layers - spec.expert_layers)
    used = list(files.values())
    if spec.experts is not None:
        linear += _experts(folder, spec, sorted({row[1] for row in linear}))
        used.append(folder / _EXPERTS)
    note = "median kernel times of one layer, launched eagerly"
    source = Source(
        "LLMServingSim (casys-kaist/LLMServingSim)",
        folder.resolve().name,
        "MIT",
        f"vLLM {settings['vllm_version']}" if "vllm_version" in settings else "",
        unused_note(note, measurements_beside(folder, used)),
    )
    tables = {
        "linear": table_of("linear", linear),
        "per_sequence": table_of("per_sequence", _operators(files["per_sequence"], "sequences")),
        "attention": _attention(files["attention"], spec.layers),
    }
    weights, _, kv = settings.get("variant", "").partition("-kv")
    return Profile(
        name,
        gpu,
        tp,
        weight_dtype=weights if weights in WEIGHT_DTYPES else "bf16",
        kv_dtype=kv if kv in KV_DTYPES else "bf16",
        sources=(source,),
        tables=tables,
    )


def _settings(path: Path) -> dict[str, str]:
    """The few plain lines of meta.yaml, here or above tpN, that matter; else what the folder's name
    says.
    """
    folder = path.resolve()
    named = _FOLDER.match(folder.name) or _TP_FOLDER.match(folder.name)
    settings = named.groupdict() if named else {}
    metas = [folder / "meta.yaml"]
    if _TP_FOLDER.match(folder.name):
        metas.append(folder.parent / "meta.yaml")
    for meta in metas:
        if meta.is_file():
            for line in meta.read_text(encoding="utf-8").splitlines():
                key, colon, value = line.partition(":")
                if colon and key in ("model", "hardware", "vllm_version", "variant"):
                    settings[key] = value.strip().strip("'\"")
            break
    return settings


def _experts(folder: Path, spec: ModelSpec, sizes: Sequence[float]) -> list[tuple[Any, ...]]:
    """Rows of the experts for steps of so many tokens.

    Raises:
        FileFormatError: there are none; LLMServingSim measures them whole, on one GPU.
    """
    path = folder / _EXPERTS
    if not path.exists() and not path.with_name(f"{_EXPERTS}.gz").exists():
        raise FileFormatError(
            path,
            None,
            f"is missing, so the experts of {spec.name} would take no time; LLMServingSim measures "
            "them on one GPU: import tp1 with --tp 1, or use `--profile operators`, which has "
            "measured experts of its own",
        )
    columns = read_csv(path, ("tokens", "activated_experts", "time_us")).values()
    tokens, activated, times_us = (np.array(numbers(path, column)) for column in columns)
    experts = spec.experts
    assert experts is not None
    (tokens, activated), grid = grid_of([tokens, activated], times_us, fill_along=(1, 0))
    rows = []
    for size in sizes:
        by_tokens = [np.interp(experts.distinct(size), activated, line) for line in grid]
        time_us = Curve(tokens, np.array(by_tokens))(size)
        rows.append(("moe", size, spec.expert_layers, time_us))
    return rows


def _operators(
    path: Path, count: str, layers: int = 0, plain_layers: int = 0
) -> list[tuple[Any, ...]]:
    """Operator, size, calls a step and µs; `layers` 0: all are called once a step."""
    columns = read_csv(path, ("layer", count, "time_us"))
    rows = []
    for operator, *figures in zip(*columns.values(), strict=True):
        size, time_us = numbers(path, figures)
        calls = layers * (2 if operator in _TWICE_A_LAYER else 1)
        if operator in _PLAIN_MLP:
            calls = plain_layers
        if operator in _ONE_CALL or not layers:
            calls = 1
        rows.append((operator, size, calls, time_us))
    return rows


def _attention(path: Path, layers: int) -> ProfileTable:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    rows = []
    for row in zip(*read_csv(path, names).values(), strict=True):
        *counts, time_us = numbers(path, row)
        rows.append((*counts, layers, time_us))
    return table_of("attention", rows)


def numbers(path: Path, texts: Sequence[str]) -> list[float]:
    """Sizes or times.

    Raises:
        FileFormatError: one is no number, negative or infinite.
    """
    values = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            raise FileFormatError(path, None, f"{text!r} is no number") from None
        if not 0 <= value < math.inf:
            raise FileFormatError(path, None, f"{text!r} is no size or time")
        values.append(value)
    return values


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
