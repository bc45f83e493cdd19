"""What torch computes with: model folders, KV in files, messages of workers, predictors."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

from slo_bench.harness.engine.torch.batch import PrefillChunk
from slo_bench.harness.engine.torch.decoder_config import read_config
from slo_bench.harness.engine.torch.encoder import read_encoder
from slo_bench.harness.engine.torch.load_decoder import load_decoder
from slo_bench.harness.engine.torch.model_tensors import Checkpoint
from slo_bench.harness.engine.torch.tiers import TierFolder, Tiers, UnitShape
from slo_bench.harness.engine.torch.torch_workers import loaded
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.predictors.lengths.length_network import HEADS, LengthNetwork
from slo_bench.predictors.lengths.predictor import put_weights
from slo_bench.predictors.lengths.predictor_config import (
    CONFIG,
    Base,
    NetworkShape,
    PredictorConfig,
)
from slo_bench.predictors.lengths.tfidf import SIZES, Encoded, TfIdfClassifier
from slo_bench.predictors.lengths.train import save_weights

from .target import Target, beside, from_file

_BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}
_ENCODED = Encoded(
    [[1, 2, 3], [1, 2, 4]], None, np.array([0, 1]), np.zeros((2, SIZES + 1), dtype=np.float32)
)
_SHAPE = UnitShape(1, 1, 1, 2, 2, torch.float32)


def targets(folder: Path) -> list[Target]:
    """Configurations, tensors and their index, a KV store, a message."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 259}
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    model = make_model(folder / "tiny", {**model_fields(), **sizes})
    sharded = folder / "sharded"
    shutil.rmtree(sharded, ignore_errors=True)
    sharded.mkdir()
    shutil.copy(model / "model.safetensors", sharded / "a.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(_names(model), "a.safetensors")}))
    store = _store(folder / "kv")
    message = io.BytesIO()
    torch.save(("run", [PrefillChunk.__name__, torch.zeros(2)]), message)
    return [
        beside(model, model / "config.json", read_config, "a decoder"),
        Target(
            "config.json of an encoder",
            [json.dumps(_BERT).encode()],
            from_file(folder, "encoder/config.json", lambda path: read_encoder(path.parent)),
        ),
        beside(model, model / "model.safetensors", load_decoder, "a decoder"),
        beside(sharded, index, _every_tensor, "a decoder"),
        beside(store, store / "about.json", _opened, "a KV store"),
        Target("unit of a KV store", [bytes(_SHAPE.size_bytes)], _unit(store)),
        Target("message of a worker", [message.getvalue()], loaded),
        *_predictor(folder / "predictor"),
    ]


def _predictor(folder: Path) -> list[Target]:
    """Its configuration as if written by hand, for a checksum would end every try; its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = NetworkShape(edges=(0, 8, 16), models=("m",), lora_r=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between peft and transformers
        network = LengthNetwork(transformers.BertModel(transformers.BertConfig(**_BERT)), shape)
    fitted = TfIdfClassifier.fit(_ENCODED, np.array([0, 1]), 3)
    config = PredictorConfig(
        shape, Base("b", "", ""), "words", 0.0, 0.1, 0.5, ((1, 0, 0),) * 3, {"rows": {}}
    )
    save_weights(network.trained(), fitted, folder / config.weights_file)
    (folder / config.samples_file).write_bytes(b"")
    config.save(folder)
    plain = json.loads((folder / CONFIG).read_text())
    del plain["crc32"], plain["files"]
    (folder / CONFIG).write_text(json.dumps(plain))

    def configured(path: Path) -> object:
        loaded_shape = PredictorConfig.load(path).shape
        head = HEADS[loaded_shape.head](loaded_shape.edges)
        return head.lengths(torch.zeros(1, head.outputs)).buckets()

    def weighed(path: Path) -> object:
        put_weights(network, path / config.weights_file)
        assert network.words is not None
        return network.words.probabilities(_ENCODED)

    return [
        beside(folder, folder / CONFIG, configured, "a predictor"),
        beside(folder, folder / config.weights_file, weighed, "a predictor"),
    ]


def _names(folder: Path) -> list[str]:
    return Checkpoint(folder, torch.float32, torch.device("cpu")).unread()


def _every_tensor(folder: Path) -> object:
    return Checkpoint(folder, torch.float32, torch.device("cpu")).unread()


def _store(folder: Path) -> Path:
    _opened(folder)
    return folder


def _opened(folder: Path) -> Tiers:
    tiers = Tiers([TierFolder(folder, 1 << 20)], _SHAPE, "a model")
    tiers.places()
    return tiers


def _unit(folder: Path):  # type: ignore[no-untyped-def]
    """A unit with other bytes than it had."""
    path = folder / "7"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return _SHAPE.mapped(str(path)).sum()
        finally:
            path.unlink()

    return read
