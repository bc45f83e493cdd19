"""Tiny models with heads whose drafts are right by construction.

In a model of `embeddings_only` attention and MLP add nothing, so that the next token follows from
the last one: argmax over j of output_j · embedding_i, at any scale of the embedding. A head that
passes on the embedding of the last token, and shares the output matrix, proposes just that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slo_bench.harness.servers.launch.random_model import make_model, model_fields

Tensors = Mapping[str, NDArray[np.float32]]

_LAYER = "model.layers.0."


def embeddings_only(folder: Path, like: str = "llama") -> Tensors:
    """Write such a model with as many KV heads as heads; its tensors."""
    fields = {**model_fields(like), "max_position_embeddings": 4096}
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    file = make_model(folder, fields) / "model.safetensors"
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    del header["__metadata__"]
    tensors = {}
    for name, about in header.items():
        first, last = (begin + offset for offset in about["data_offsets"])
        tensors[name] = np.frombuffer(data[first:last], "<f4").reshape(about["shape"])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    _write(folder, fields, tensors)
    return tensors


def eagle_head(folder: Path, model: Path, tensors: Tensors) -> Path:
    """An EAGLE head: a layer without norm at its entry, which gets fc [embedding, hidden]."""
    fields = _fields(model) | {"num_hidden_layers": 1}
    size = fields["hidden_size"]
    layer = {
        name.removeprefix("model."): values
        for name, values in tensors.items()
        if name.startswith(_LAYER) and "input_layernorm" not in name
    }
    fc = np.hstack([np.eye(size), np.zeros((size, size))])
    return _write(folder, fields, {**layer, "fc.weight": fc})


def eagle3_head(folder: Path, model: Path, tensors: Tensors) -> Path:
    """An EAGLE-3 head: attention over [embedding, hidden] of three layers of the model.

    Hidden states are multiplied by 0. Queries and keys are the embedding, of a length at which
    each token attends to itself, or to others like it, alone; values are the embedding too.
    """
    fields = _fields(model) | {"num_hidden_layers": 1, "norm_before_residual": True}
    fields["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    size = fields["hidden_size"]
    passed, nothing = np.eye(size), np.zeros((size, size))
    layer = {
        name.replace(_LAYER, "midlayer."): values
        for name, values in tensors.items()
        if name.startswith(_LAYER)
    }
    layer |= {
        "midlayer.self_attn.q_proj.weight": np.hstack([16 * passed, nothing]),
        "midlayer.self_attn.k_proj.weight": np.hstack([passed, nothing]),
        "midlayer.self_attn.v_proj.weight": np.hstack([passed, nothing]),
        "midlayer.self_attn.o_proj.weight": passed,
        "midlayer.hidden_norm.weight": np.zeros(size),
        "norm.weight": np.ones(size),
        "fc.weight": np.zeros((size, 3 * size)),
        "lm_head.weight": tensors["lm_head.weight"],
    }
    return _write(folder, fields, layer)


def with_mtp_layer(folder: Path) -> Path:
    """A model with a layer of multi-token prediction in the form of MiMo, a Qwen2 with such layers.

    The layer gets a projection of [hidden, embedding].
    """
    tensors = embeddings_only(folder, "qwen2")
    fields = _fields(folder)
    size = fields["hidden_size"]
    begin = "model.mtp_layers.0."
    layer = {
        name.replace(_LAYER, begin): values
        for name, values in tensors.items()
        if name.startswith(_LAYER)
    }
    layer |= {
        f"{begin}{norm}_layernorm.weight": np.ones(size) for norm in ("token", "hidden", "final")
    }
    layer[f"{begin}input_proj.weight"] = np.hstack([np.zeros((size, size)), np.eye(size)])
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _write(folder, fields, {**tensors, **layer})


def _fields(model: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    return fields


def _write(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + 4 * values.size
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    parts = [np.ascontiguousarray(values, "<f4").tobytes() for values in tensors.values()]
    file = folder / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
    return folder
