"""Embeddings are those of transformers, whatever else is in the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch.encoder import Encoder  # noqa: E402
from slo_bench.harness.engine.torch.torch_errors import ModelError  # noqa: E402

pytestmark = pytest.mark.torch


SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}


def saved(kind: str, folder: Path, **more: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_encoder_embeddings_equal_those_of_transformers(
    kind: str, pooling: str, tmp_path: Path
) -> None:
    model = saved(kind, tmp_path)
    if pooling == "cls":
        (tmp_path / "1_Pooling").mkdir()
        pooling_config = {"pooling_mode_cls_token": True}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    draw = random.Random(2)
    texts = [[draw.randrange(5, 120) for _ in range(n)] for n in (1, 9, 30, 64)]
    embeddings = Encoder(tmp_path).embed(texts)
    for text, embedding in zip(texts, embeddings, strict=True):
        with torch.no_grad():
            input_ids = torch.tensor([text])
            states = model(input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state[
                0
            ]
        pooled = states[0] if pooling == "cls" else states.mean(0)
        expected = pooled / pooled.norm()
        torch.testing.assert_close(embedding, expected, rtol=1e-4, atol=1e-5)


def test_encoder_refuses_bad_texts_and_model_folders(tmp_path: Path) -> None:
    saved("Bert", tmp_path / "bert")
    encoder = Encoder(tmp_path / "bert")
    for texts in ([], [[]], [[5] * 67]):
        with pytest.raises(ModelError, match="texts must have"):
            encoder.embed(texts)
    saved("Bert", tmp_path / "relu", hidden_act="relu")
    with pytest.raises(ModelError, match="relu"):
        Encoder(tmp_path / "relu")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="embeds with bert"):
        Encoder(tmp_path / "gpt")
