"""Small models with random weights, in the format of Hugging Face, where no model is at hand.

A folder is written with numpy alone: `config.json`, safetensors, a tokenizer and a chat template.
vLLM, SGLang, `transformers` and the torch engine load it; `bert` is an encoder for embeddings.
Speed and memory are those of a real model of that shape; the text is nonsense.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....predictors.families import Architecture, architecture_of, random_types
from ....workloads.errors import SloBenchError, UnknownNameError
from ....workloads.parsing import parse_json
from ...engine.torch.decoder_config import DecoderConfig, decoder_config, modules_of
from ...engine.torch.encoder_config import EncoderConfig, encoder_config
from ...load_generator.http.prompts import FREQUENT_WORDS
from .environments import home

TINY = "tiny-llama"
TINY_PARAMETERS = 4_000_000
LEAST_PARAMETERS, MOST_PARAMETERS = 1_000_000, 20_000_000_000

_CONTEXT = 8192
_ENCODER_CONTEXT = 512
_VOCABULARY = 2048
_SPECIAL = ("<pad>", "<s>", "</s>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
_HIDDEN_STEP = 128
_HIDDEN_PER_LAYER = 64  # as in small language models: GPT-2 has 768 over 12 layers


def parse_parameters(text: str) -> int:
    """Number of parameters in `100m` or `1.5b`.

    Raises:
        SloBenchError: it is no such number, or out of bounds.
    """
    word = text.strip().lower()
    try:
        parameters = float(word[:-1]) * _UNITS[word[-1:]]
    except (ValueError, KeyError):
        raise SloBenchError(f"a size is written 4m, 100m or 1.5b but is {text!r}") from None
    if not LEAST_PARAMETERS <= parameters <= MOST_PARAMETERS:
        raise SloBenchError(f"a size must be from 1m to 20b but is {text!r}")
    return round(parameters)


def model_fields(like: str = "llama", parameters: int = TINY_PARAMETERS) -> dict[str, Any]:
    """`config.json` of a model with about this number of parameters.

    Raises:
        UnknownNameError: no such architecture.
    """
    choices = random_types("decoder") | random_types("encoder")
    if like not in choices:
        raise UnknownNameError("architecture", like, choices)
    candidates = (
        _fields(choices[like], hidden, parameters)
        for hidden in range(_HIDDEN_STEP, 8193, _HIDDEN_STEP)
    )

    def distance(fields: dict[str, Any]) -> float:
        size = abs(math.log(parameter_count(fields) / parameters))
        shape = shape_of(fields)
        layers = shape.hidden / (_HIDDEN_PER_LAYER * shape.layers)
        return size + 0.1 * abs(math.log(layers))

    return min(candidates, key=distance)


def _fields(architecture: Architecture, hidden: int, parameters: int) -> dict[str, Any]:
    """Fields at a width, with the layers that come nearest to the number of parameters."""
    model_type, traits = architecture.type, architecture.family.traits
    head_dim = 32 if hidden < 512 else 64
    heads = hidden // head_dim

    def named(**sizes: object) -> dict[str, Any]:
        names = ((architecture.names(size), value) for size, value in sizes.items())
        return {fields[0]: value for fields, value in names if fields}

    fields: dict[str, Any] = {
        "architectures": [model_type.architecture],
        "model_type": model_type.name,
        **model_type.random,
        **named(vocab=_VOCABULARY, hidden=hidden, layers=1, heads=heads),
        "pad_token_id": 0,
        "torch_dtype": "float32",
        # 8/3 of the width where the MLP has three matrices
        **named(intermediate=16 * round(hidden / 6) if traits.gated_mlp else 4 * hidden),
    }
    eps, activation = architecture.family.eps, architecture.family.activation
    if traits.kind == "encoder":
        fields |= named(context_tokens=_ENCODER_CONTEXT)
        fields["type_vocab_size"] = traits.token_types
        fields |= named(eps=eps, activation=activation)
    else:
        fields |= named(kv_heads=heads // 2, context_tokens=_CONTEXT, eps=eps)
        fields |= {"rope_theta": 10_000.0} if traits.position_offset is None else {}
        fields |= named(activation=activation)
        fields |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    if model_type.random_head_dim:
        fields |= named(head_dim=head_dim)
    [layers] = named(layers=1)
    one_layer_parameters = parameter_count(fields)
    layer = parameter_count({**fields, layers: 2}) - one_layer_parameters
    fields[layers] = max(1, 1 + round((parameters - one_layer_parameters) / layer))
    return fields


def parameter_count(fields: Mapping[str, Any]) -> int:
    """Parameters of a model with this `config.json`."""
    return sum(math.prod(shape) for _, shape in shape_of(fields).tensors())


def shape_of(fields: Mapping[str, Any]) -> DecoderConfig | EncoderConfig:
    """Shape of the random model with this `config.json`."""
    architecture = architecture_of(fields)
    assert architecture is not None
    if architecture.family.traits.kind == "encoder":
        return encoder_config(architecture, fields)
    return decoder_config(architecture, fields)


def make_model(folder: Path, fields: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a model with random weights; the same fields and seed give the same bytes.

    Its answers are ASCII text and do not end by themselves.

    Raises:
        SloBenchError: the folder holds something else.
    """
    fields = model_fields() if fields is None else fields
    about = folder / "config.json"
    with contextlib.suppress(OSError, ValueError):
        if parse_json(about.read_bytes()) == fields:
            return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SloBenchError(f"{folder} exists and is not this model; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(fields)
    table = _tokenizer(shape.vocab)
    _write_weights(folder / "model.safetensors", shape, _silent(table), seed)
    (folder / "tokenizer.json").write_text(json.dumps(table), "utf-8")
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(shape, DecoderConfig):
        words["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=1), "utf-8")
    text = json.dumps(fields, indent=1)
    about.write_text(text, "utf-8")  # last: a folder without it is unfinished
    return folder


def model_folder(model: str) -> Path:
    """Folder of a model; that of the tiny random Llama is made if it does not exist."""
    if model != TINY or Path(model).is_dir():
        return Path(model)
    folder = home() / "models" / "random" / TINY
    try:
        return make_model(folder, model_fields())
    except SloBenchError:
        shutil.rmtree(folder)  # an earlier version's, or unfinished
        return make_model(folder, model_fields())


def _write_weights(
    path: Path, model: DecoderConfig | EncoderConfig, silent: NDArray[np.int64], seed: int
) -> None:
    """Write safetensors: a length, a header of JSON, and the tensors one after the other.

    The format is https://github.com/huggingface/safetensors#format. The rows of `silent` tokens in
    the head are 0, so that a greedy answer has none of them.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in model.tensors():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    draw = np.random.default_rng(seed)
    scale = np.float32((2.0 / model.hidden) ** 0.5)
    head_weight = f"{modules_of(model.family).head}.weight"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        for name, shape in model.tensors():
            if len(shape) == 1 and name.endswith(".weight"):  # a norm
                values = np.ones(shape, dtype="<f4")
            else:
                values = draw.standard_normal(shape, dtype=np.float32).astype("<f4") * scale
            if name == head_weight:
                values[silent] = 0
            values.tofile(file)


def _silent(table: Mapping[str, Any]) -> NDArray[np.int64]:
    """Ids of special tokens and of bytes that are not printable ASCII."""
    plain = {chr(code) for code in range(33, 127)} | {_byte_letters()[ord(" ")]}
    token_ids = [
        number
        for token, number in table["model"]["vocab"].items()
        if token in _SPECIAL or not set(token) <= plain
    ]
    return np.array(token_ids, dtype=np.int64)


def _tokenizer(size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer: all bytes, frequent English words, then invented ones.

    Each merge makes the beginning of a word one letter longer, so that a word in the vocabulary is
    one token and an unknown one is its longest known beginning and letters.
    """
    letters = _byte_letters()
    tokens = [*_SPECIAL, *letters][:size]
    vocabulary = set(tokens)
    merges: list[list[str]] = []
    space = letters[ord(" ")]
    words = iter(_words())
    while len(tokens) < size:
        word = space + next(words)
        for split in range(1, len(word)):
            longer = word[: split + 1]
            if longer not in vocabulary and len(tokens) < size:
                vocabulary.add(longer)
                tokens.append(longer)
                merges.append([word[:split], word[split]])
    merges.sort(key=lambda pair: len(pair[0]))
    spaced = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    shared = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **shared, "special": True}
            for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **spaced},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **spaced},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _words() -> Iterator[str]:
    yield from FREQUENT_WORDS
    draw = random.Random(0)
    while True:
        syllables = draw.randint(1, 3)
        yield "".join(
            draw.choice("bcdfghklmnprstvw") + draw.choice("aeiou") + draw.choice(["", "n", "r"])
            for _ in range(syllables)
        )


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256 - len(plain)))
    return [chr(byte) if byte in plain else next(others) for byte in range(256)]
