"""accelerate takes our maps: every module of a real model has a device, and none is unknown."""

import dataclasses

import pytest

from slo_bench.predictors.specs import model
from slo_bench.tuner.placement.launch import accelerate_map
from slo_bench.tuner.placement.problem import LayerRange

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("accelerate.utils.modeling")

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
KINDS = {
    "llama": ("llama-3-8b", "LlamaConfig", {"intermediate_size": 24}),
    "mistral": ("mistral-7b", "MistralConfig", {"intermediate_size": 24}),
    "qwen2": ("qwen2.5-7b", "Qwen2Config", {"intermediate_size": 24}),
    "qwen3": ("qwen3-8b", "Qwen3Config", {"intermediate_size": 24, "head_dim": 8}),
    "opt": ("opt-6.7b", "OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
}


@pytest.mark.parametrize("family", KINDS)
def test_accelerate_map_covers_every_module(family):
    name, kind, sizes = KINDS[family]
    config = getattr(transformers, kind)(**{**TINY, **sizes})
    network = transformers.AutoModelForCausalLM.from_config(config)
    spec = dataclasses.replace(model(name), layers=3)
    assert spec.family == family
    device_map = accelerate_map(spec, (LayerRange(1, 2), LayerRange(0, 1)))
    modeling.check_device_map(network, device_map)
    modules = dict(network.named_modules())
    missing = [module for module in device_map if module not in modules]
    assert not missing
