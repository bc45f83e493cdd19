"""`slo-bench model make`: its size, its tokenizer, and who loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slo_bench.harness.load_generator.http.prompts import FREQUENT_WORDS
from slo_bench.harness.servers.launch.random_model import (
    make_model,
    model_fields,
    parameter_count,
    parse_parameters,
)
from slo_bench.predictors.families import random_types
from slo_bench.workloads.errors import SloBenchError


@pytest.mark.slow
@pytest.mark.parametrize("like", [*random_types("decoder"), *random_types("encoder")])
@pytest.mark.parametrize("size", ["1m", "4m", "30m", "100m", "1.5b", "20b"])
def test_random_model_has_about_the_asked_parameters(like: str, size: str) -> None:
    parameters = parse_parameters(size)
    assert parameter_count(model_fields(like, parameters)) == pytest.approx(parameters, rel=0.2)


@pytest.mark.parametrize("size", ["", "m", "100", "0.5m", "30b", "1e3x", "nanm", "-4m"])
def test_parse_parameters_refuses_malformed_sizes(size: str) -> None:
    with pytest.raises(SloBenchError, match="a size"):
        parse_parameters(size)


def test_random_model_of_a_seed_has_the_same_bytes(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1))]
    other = make_model(tmp_path / "c", seed=2)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (
        folders[0] / "model.safetensors"
    ).read_bytes()


def test_make_model_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SloBenchError, match="name another folder"):
        make_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_make_model_keeps_an_existing_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    about = folder / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()), sort_keys=True))
    (folder / "model.safetensors").write_bytes(b"")
    assert make_model(folder).samefile(folder)
    assert not (folder / "model.safetensors").stat().st_size
    about.write_text("{")
    with pytest.raises(SloBenchError, match="name another folder"):
        make_model(folder)


def test_model_make_command_writes_a_model(tmp_path: Path, slo_bench) -> None:
    code, out, _ = slo_bench("model", "make", "models/tiny", "--like", "qwen2")
    assert code == 0
    assert "qwen2, 4.0 million parameters" in out
    fields = json.loads((tmp_path / "models" / "tiny" / "config.json").read_text())
    assert fields["model_type"] == "qwen2"
    assert slo_bench("model", "make", "models/tiny", "--like", "gpt5")[0] == 2


def test_tokenizer_of_a_random_model_has_frequent_words(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = make_model(tmp_path / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = " " + " ".join(FREQUENT_WORDS)
    encoding = tokenizer.encode(text)
    assert len(encoding.ids) == len(FREQUENT_WORDS)
    assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.decode(tokenizer.encode("été, 100 %\n").ids) == "été, 100 %\n"
    assert tokenizer.get_vocab_size() == model_fields()["vocab_size"]


@pytest.mark.torch
@pytest.mark.parametrize("like", random_types("decoder"))
def test_random_model_is_loaded_by_transformers_and_the_torch_engine(
    like: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from slo_bench.harness.engine.torch.load_decoder import load_decoder

    folder = make_model(tmp_path / "tiny", model_fields(like))
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loaded.values())
    assert sum(tensor.numel() for tensor in model.parameters()) == parameter_count(
        model_fields(like)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one or two words", return_tensors="pt").input_ids
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    assert len(answer) == 32
    assert tokenizer.decode(answer).isascii()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert load_decoder(folder).config.hidden == 256
    assert torch.isfinite(model(prompt).logits).all()


@pytest.mark.torch
def test_random_encoder_embeds_as_transformers_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from slo_bench.harness.engine.torch.encoder import Encoder

    folder = make_model(tmp_path / "encoder", model_fields("bert"))
    model, loaded = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values())
    ids = transformers.AutoTokenizer.from_pretrained(folder)("one or two words").input_ids
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    [embedding] = Encoder(folder).embed([ids])
    torch.testing.assert_close(embedding, torch.nn.functional.normalize(states, dim=0))
