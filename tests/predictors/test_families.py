"""A model family is one entry of `FAMILIES`: a new one is read, made at random, placed and run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slo_bench.harness.servers.launch.random_model import make_model, model_fields, parameter_count
from slo_bench.predictors import families
from slo_bench.predictors.families import (
    FAMILIES,
    Family,
    ModelType,
    Modules,
    Traits,
    architectures,
    torch_types,
)
from slo_bench.predictors.specs import model
from slo_bench.tuner.placement.launch import accelerate_map
from slo_bench.tuner.placement.problem import LayerRange
from slo_bench.workloads.errors import FileFormatError

SOURCE = Path(families.__file__).parents[1]
# A Qwen2 with other names for all that it has.
ACME = Family(
    "acme",
    (ModelType("acme_text", in_torch=True, architecture="AcmeForCausalLM", random={"acme": 1}),),
    Traits(biases="qkv"),
    fields={
        "layers": ("n_layer",),
        "hidden": ("n_embd",),
        "heads": ("n_attention_head",),
        "kv_heads": ("n_kv",),
        "intermediate": ("n_inner",),
        "vocab": ("n_token",),
        "context_tokens": ("n_ctx",),
        "eps": ("norm_eps",),
        "activation": ("act",),
    },
    modules=Modules(
        roots=("transformer.",),
        tokens="wte",
        positions=("turn",),
        layers="blocks",
        norm="last",
        head="to_tokens",
        attention_norm="first",
        qkv=("attn.query", "attn.key", "attn.value"),
        out="attn.back",
        mlp_norm="second",
        up=("mlp.gate", "mlp.wide"),
        down="mlp.narrow",
    ),
)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A random model of the made-up family."""
    monkeypatch.setitem(FAMILIES, "acme", ACME)
    return make_model(tmp_path / "acme", model_fields("acme_text"), seed=3)


def test_config_of_a_new_family_is_read(acme: Path) -> None:
    spec, fields = model(acme), model_fields("acme_text")
    assert spec.family == "acme"
    assert fields["architectures"] == ["AcmeForCausalLM"]
    assert "hidden_size" not in fields
    assert (spec.hidden, spec.layers) == (fields["n_embd"], fields["n_layer"])
    assert (spec.kv_heads, spec.context_tokens) == (fields["n_kv"], fields["n_ctx"])
    assert spec.traits.biases == "qkv"
    assert spec.parameters == parameter_count(fields)


def test_error_names_the_field_of_the_family(acme: Path) -> None:
    config = acme / "config.json"
    config.write_text(re.sub(r'"n_inner": \d+', '"n_inner": null', config.read_text()))
    with pytest.raises(FileFormatError, match="field 'n_inner' is missing"):
        model(acme)


def test_accelerate_map_has_the_modules_of_a_new_family(acme: Path) -> None:
    spec = model(acme)
    placed = accelerate_map(spec, (LayerRange(1, 1), LayerRange(0, spec.layers - 1)))
    assert list(placed)[:4] == [
        "transformer.wte",
        "transformer.turn",
        "transformer.blocks.0",
        "transformer.blocks.1",
    ]
    assert list(placed.items())[-2:] == [("transformer.last", 0), ("to_tokens", 0)]


@pytest.mark.torch
def test_torch_engine_answers_with_a_new_family_as_with_qwen2(acme: Path, tmp_path: Path) -> None:
    """The same seed draws the same weights, for the tensors differ in their names alone."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from slo_bench.harness.engine.torch.batch import Piece
    from slo_bench.harness.engine.torch.cache import KvCache
    from slo_bench.harness.engine.torch.load_decoder import load_decoder
    from slo_bench.harness.engine.torch.runner import Runner
    from slo_bench.harness.engine.torch.sequence import Sequence

    def answer(folder: Path) -> list[int]:
        decoder = load_decoder(folder)
        cache = KvCache(decoder.config, 4, 16, decoder.dtype, decoder.device)
        runner = Runner(decoder, cache)
        sequence = Sequence([5, 300, 1200])
        sequence.blocks.extend(range(4))
        sequence.tokens += runner.run([], [Piece(sequence, 0, 3)])
        for _ in range(20):
            sequence.tokens += runner.run([sequence], [])
        return sequence.tokens

    qwen2 = make_model(tmp_path / "qwen2", model_fields("qwen2"), seed=3)
    assert answer(acme) == answer(qwen2)


def test_torch_types_have_a_design_that_the_torch_engine_runs() -> None:
    """Gated MLPs, RMSNorm and rotary positions, or none of the three."""
    for architecture in architectures():
        traits, modules = architecture.family.traits, architecture.family.modules
        if architecture.type.in_torch:
            rotary = traits.position_offset is None
            assert traits.gated_mlp is rotary, architecture.type.name
            assert traits.norm_bias is not rotary, architecture.type.name
            assert modules is not None
            assert not architecture.type.marker
        if architecture.type.architecture:
            assert architecture.type.in_torch  # random models have the tensors that it reads


def test_model_types_are_named_in_families_alone() -> None:
    """No other module compares with the `model_type` of a file."""
    names = {architecture.type.name for architecture in architectures()} | set(FAMILIES)
    files = [
        SOURCE / name
        for name in (
            "predictors/model_config.py",
            "predictors/model_spec.py",
            "harness/servers/launch/random_model.py",
            "tuner/placement/launch.py",
            "cli/commands/model.py",
        )
    ]
    for file in [*files, *(SOURCE / "harness" / "engine" / "torch").glob("*.py")]:
        literals = {
            node.value
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant)
        }
        assert literals & names <= {"llama"}, file  # the default of `model make`
    assert list(torch_types("decoder")) == ["llama", "mistral", "qwen2", "qwen3", "opt"]
