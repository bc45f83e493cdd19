"""Folders that hold no model this engine can run: a clear word, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file, save_file

from slo_bench.harness.engine.torch import load_decoder as load
from slo_bench.harness.engine.torch.load_decoder import load_decoder
from slo_bench.harness.engine.torch.text import Text
from slo_bench.harness.engine.torch.torch_errors import DoesNotFitError, ModelError
from slo_bench.workloads.errors import FileFormatError

pytestmark = pytest.mark.torch


WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model_type": "gpt2"}, "generates with llama"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_key_value_heads": 3}, "is no decoder"),
        ({"use_sliding_window": True}, "windows"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"intermediate_size": 96}, "has the shape"),
        ({"num_hidden_layers": 3}, "has no weight 'model.layers.2"),
        ({"num_hidden_layers": 1}, "has no use for"),
    ],
)
def test_unsupported_configurations_are_refused(
    folder: Path, fields: dict[str, Any], word: str
) -> None:
    change(folder, **fields)
    with pytest.raises(ModelError, match=word):
        load_decoder(folder)


def test_configuration_without_a_required_field_is_refused(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    del fields["hidden_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="lacks the field 'hidden_size'"):
        load_decoder(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_tokenizer_config_that_is_no_json_object_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(FileFormatError, match=r"tokenizer_config\.json"):
        Text(folder)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_decoder(tmp_path)


def test_missing_weight_is_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"has no weight 'model.layers.1.self_attn.k_proj.weight'"):
        load_decoder(folder)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_truncated_weights_file_is_named(folder: Path, kept: float) -> None:
    content = (folder / WEIGHTS).read_bytes()
    end = round(kept * len(content)) if isinstance(kept, float) else kept
    (folder / WEIGHTS).write_bytes(content[:end])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_decoder(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        load_decoder(folder)


def test_missing_shard_is_named(save_model: Callable[..., Path]) -> None:
    folder = save_model("qwen3", max_shard_size="60KB")
    shards = sorted(folder.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks the shard {shards[1].name}"):
        load_decoder(folder)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(ModelError, match="does not hold"):
        load_decoder(folder)
    shards[1].write_bytes(kept)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelError, match="no index of shards"):
        load_decoder(folder)


def test_model_larger_than_free_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "free_bytes", lambda device: 1000)
    with pytest.raises(DoesNotFitError, match=r"the weights of model take .* cpu has"):
        load_decoder(folder)


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "nonsense:x"])
def test_absent_devices_are_refused(folder: Path, device: str) -> None:
    with pytest.raises(ModelError, match=r"device must be|there is no"):
        load_decoder(folder, device)


def test_load_decoder_dtype_is_taken_or_refused(folder: Path) -> None:
    assert str(load_decoder(folder, dtype="bfloat16").dtype) == "torch.bfloat16"
    with pytest.raises(ModelError, match="dtype must be one of"):
        load_decoder(folder, dtype="int8")
