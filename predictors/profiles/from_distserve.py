"""DistServe's fitted coefficients of prefill and decode (LLMServe/DistServe, Apache-2.0)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_json
from .importers import ImportOptions
from .profile import Fitted, Profile, Source

_GPU = "a100-80g"  # where all of them were measured
_PHASES = {"prefill": "prefill", "decoding_smallbs": "small", "decoding_largebs": "large"}


def read(path: Path, options: ImportOptions) -> Profile:
    """One model and tp of a profiler JSON; milliseconds become seconds."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise FileFormatError(path, None, "must hold an object of models")
    found = _chosen(path, content, options)
    name = options.model_name(found)
    degrees = content[found]
    tp = options.tp or 1
    if not isinstance(degrees, dict) or str(tp) not in degrees:
        there = ", ".join(degrees) if isinstance(degrees, dict) else "none"
        raise SloBenchError(f"{path} has no tp {tp} of {found}; it has tp {there}")
    gpu = options.gpu or _GPU
    return Profile(
        model=name,
        gpu=gpu,
        tp=tp,
        best="distserve",
        sources=(
            Source(
                "DistServe (LLMServe/DistServe)",
                path.name,
                licence="Apache-2.0",
                note="coefficients of whole steps on an A100-80G, prefill and decode apart",
            ),
        ),
        fits={"distserve": Fitted(_coefficients(path, degrees[str(tp)]))},
    )


def _chosen(path: Path, content: dict[str, Any], options: ImportOptions) -> str:
    if options.model:
        fitting = [key for key in content if options.model_name(key) == _named(key)]
    else:
        fitting = list(content)
    if len(fitting) != 1:
        raise SloBenchError(
            f"{path} has {len(fitting)} models that fit; name one with --model "
            f"({', '.join(content)})"
        )
    return str(fitting[0])


def _named(key: str) -> str:
    try:
        return ImportOptions().model_name(key)
    except SloBenchError:
        return ""


def _coefficients(path: Path, entry: Any) -> dict[str, float]:
    try:
        found = {
            f"{phase}_{name}": float(value) * 1e-3
            for key, phase in _PHASES.items()
            for name, value in zip("abc", entry[key], strict=True)
        }
        found["large_from"] = float(entry["decoding_large_small_bs_threshold"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(path, None, f"is not a DistServe profile: {error!r}") from None
    return found
