"""Vidur's profiles of linear layers (microsoft/vidur, MIT); attention is not among them."""

from __future__ import annotations

from pathlib import Path

from ...workloads.errors import FileFormatError, SloBenchError
from ..specs import model
from .importers import ImportOptions
from .profile import Profile, Source, read_csv, table_of

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


def read(path: Path, options: ImportOptions) -> Profile:
    """Read `GPU__ORG__MODEL__linear.csv`, milliseconds a call; rows of one tp (default 1)."""
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
    return Profile(
        model=name,
        gpu=gpu,
        tp=tp,
        sources=(
            Source(
                "Vidur (microsoft/vidur)",
                path.name,
                licence="MIT",
                note="linear layers and norms of one layer; no attention, no output head"
                + ("; without all-reduces" if tp > 1 else ""),
            ),
        ),
        tables={"linear": table_of("linear", rows)},
    )
