"""A model's shape from its Hugging Face `config.json`; refuses what is not modelled, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError
from ..workloads.file_cache import depends_on
from ..workloads.parsing import number, parse_json
from .checkpoint_format import checkpoint_dtype, side_file
from .config_fields import Fields
from .families import FIELDS, Architecture, Family, ModelType, architecture_of, architectures
from .model_spec import (
    Experts,
    LatentAttention,
    LinearAttention,
    ModelSpec,
    SlidingWindow,
    SparseAttention,
)

_SPECULATIVE = (
    "num_lookahead_tokens",
    "num_lookahead_slots",
    "num_speculative_tokens",
    "n_predict",
    "medusa_num_heads",
    "speculative_config",
    "speculators_config",
    "speculators_model_type",
)
_OTHER = {
    "index_topk": "sparse attention",
    "index_topk_pattern": "indices shared between layers",
    "sparse_attention_config": "sparse attention",
    "dual_chunk_attention_config": "chunked attention",
    "hybrid_override_pattern": "state-space layers",
    "num_kv_shared_layers": "KV shared between layers",
    "is_encoder_decoder": "an encoder beside the decoder",
    "audio_config": "an audio encoder",
    "linear_num_value_heads": "linear attention",
    "full_attention_interval": "linear attention",
    "interleave_moe_layer_step": "experts in some layers only",
    "attention_chunk_size": "chunked attention",
    "use_bidirectional_attention": "attention to later tokens",
    "vision_config": "an image encoder without a language model of its own (field 'text_config')",
    "layer_group_size": "linear attention",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
}
# Fields whose names say that they shape a layer, and of these the ones that are read beside the
# sizes, or that leave sizes and times as they are.
_PARTS = re.compile(
    r"attn|attention|window|sparse|mamba|ssm|conv|recurrent|expert|moe|latent|cross"
)
_HARMLESS = re.compile(
    r"_?sliding_window_pattern|query_pre_attn_scalar|moe_layers|attn_(scale|temperature_tuning)|"
    r"interleave_moe_layer_step|attention_chunk_size|multi_query_attention|(use_)?sliding_window|"
    r"max_window_layers|attn_type_list|n_shared_experts|(num_)?experts_per_tok(en)?|(moe|shared_expert)_intermediate_size|moe_layer_freq|"
    r"decoder_sparse_step|(moe_)?router_.*|.*dropout(_prob)?|.*bias|_?attn_implementation.*|"
    r"linear_conv_kernel_dim|full_attention_interval|attn_output_gate|mamba_ssm_dtype|"
    r"attention_softmax_in_fp32|use_(flash|logn)_attn|layernorm_full_attention_.*"
)
_SPECULATIVE_TYPES = ("eagle", "medusa", "mlp_speculator", "speculator")
_STRETCHED = ("yarn", "deepseek_yarn", "linear", "dynamic")  # rotary positions, by a factor


class _Config(Fields):
    """The fields of a `config.json`, with what its architecture calls them."""

    def __init__(self, path: Path | str, fields: Mapping[str, Any]) -> None:
        architecture = architecture_of(fields)
        super().__init__(path, {**(architecture.type.defaults if architecture else {}), **fields})
        self.architecture = architecture or Architecture(ModelType(""), Family("", ()))
        self.type, self.family = self.architecture.type, self.architecture.family

    def named(self, size: str, default: int | None = None) -> int:
        """One of `FIELDS`; a whole number of at least one."""
        return self.count(*self.architecture.names(size), default=default)


def read_model(path: Path) -> ModelSpec:
    """The model whose folder or `config.json` is `path`, named after the folder.

    Raises:
        FileFormatError: the file is missing or not JSON, a field is missing or wrong, or the
            model's architecture is not modelled (speculative decoding, other attention).
    """
    file = path / "config.json" if path.is_dir() else path
    depends_on(file)
    try:
        fields = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileFormatError(
            file, None, "no such file; a model folder holds config.json"
        ) from None
    except json.JSONDecodeError as error:
        raise FileFormatError(file, error.lineno, f"not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(file, None, f"cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise FileFormatError(file, None, "must hold a JSON object")
    beside = file.with_name("hf_quant_config.json")  # as ModelOpt writes it
    if file.name == "config.json" and beside.exists() and "quantization_config" not in fields:
        fields["quantization_config"] = side_file(beside)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_from_config(fields, name=name, path=file)


def model_from_config(fields: Mapping[str, Any], name: str, path: Path) -> ModelSpec:
    """The shape that the fields of a `config.json` describe. Errors as in `read_model`."""
    whole = Fields(path, fields)
    config = _language_model(whole)
    _refuse_unmodelled(config)
    _refuse_other_types(config)
    heads, hidden = config.named("heads"), config.named("hidden")
    head_dim = config.named("head_dim", default=max(1, hidden // heads))
    layers = config.named("layers")
    context_tokens = _context_tokens(config)
    latent = _latent(config)
    kv_heads = 1 if latent else _kv_heads(config, heads)
    spec = ModelSpec(
        name=name,
        family=config.family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=latent.kv_rank + latent.rope_dim if latent else head_dim,
        intermediate=_intermediate(config),
        vocab=config.named("vocab"),
        context_tokens=context_tokens,
        tied_embeddings=_tied(config),
        origin=str(path),
        experts=_experts(config, layers),
        latent=latent,
        sparse=_sparse(config),
        window=_window(config, layers, context_tokens),
        linear=_linear(config, layers),
        image_encoder_parameters=_image_encoder_parameters(whole, hidden),
        checkpoint_dtype=checkpoint_dtype(config),
    )
    if heads % spec.kv_heads:
        raise config.fail(
            f"num_attention_heads {heads} must be a multiple of the {spec.kv_heads} KV heads"
        )
    return spec


def _language_model(whole: Fields) -> _Config:
    """The language model of a file: its `text_config` where it has one, and what holds for all."""
    text = whole.fields.get("text_config")
    if text is None:
        language = dict(whole.fields)
    elif isinstance(text, dict):
        around = {name: value for name, value in whole.fields.items() if name != "text_config"}
        _refuse_unmodelled(_Config(whole.path, around | {"vision_config": None}))
        shared = ("quantization_config", "tie_word_embeddings")
        language = {name: around[name] for name in shared if name in around} | text
    else:
        raise whole.fail(f"field 'text_config' must be an object but is {text!r:.60}")
    return _Config(whole.path, language)


def _image_encoder_parameters(whole: Fields, hidden: int) -> int:
    """Parameters of the vision transformer beside a language model of width `hidden`: layers,
    patches, and one matrix between the two (half a percent of such models lies in other parts).
    """
    vision = whole.fields.get("vision_config")
    if not vision:
        return 0
    if not isinstance(vision, dict):
        raise whole.fail(f"field 'vision_config' must be an object but is {vision!r:.60}")
    config = Fields(whole.path, vision)
    try:
        width = config.count("hidden_size", "vt_hidden_size")
        inner = config.count("intermediate_size", "vt_intermediate_size")
        layers = config.count("num_hidden_layers", "depth", "vt_num_hidden_layers")
    except FileFormatError as error:
        raise whole.fail(f"an image encoder (field 'vision_config') of which {error}") from None
    patch = config.count("num_channels", "in_channels", default=3) * config.size("patch_size") ** 2
    return layers * (4 * width + 2 * inner) * width + width * (patch + hidden)


def _refuse_unmodelled(config: _Config) -> None:
    kind = str(config.fields.get("model_type", ""))
    for name in config.architecture.names("experts"):
        value = config.fields.get(name)
        if isinstance(value, int) and value > 1 and not config.type.experts:
            with_experts = sorted(a.type.name for a in architectures() if a.type.experts)
            raise config.fail(
                f"mixture of experts (field {name!r} is {value}) of model_type {kind!r} is not "
                f"modelled yet; known: {', '.join(with_experts)}"
            )
    for name in _SPECULATIVE:
        if config.fields.get(name):
            raise config.fail(
                f"speculative decoding (field {name!r}) is not modelled yet; use the plain model"
            )
    if kind in _SPECULATIVE_TYPES:
        raise config.fail(
            f"speculative decoding (model_type {kind!r}) is not modelled yet; use the plain model"
        )
    for name, feature in _OTHER.items():
        if config.fields.get(name) and name not in config.type.reads:
            raise config.fail(f"{feature} (field {name!r}) is not modelled yet")
    if set(str(config.fields.get("attn_type_list") or "")) - set("[1, ]"):
        raise config.fail("linear attention (field 'attn_type_list') is not modelled yet")
    sizes = {name for size in FIELDS for name in config.architecture.names(size)}
    for name, value in config.fields.items():
        if value and name not in sizes and _PARTS.search(name) and not _HARMLESS.fullmatch(name):
            raise config.fail(
                f"field {name!r} ({value!r:.60}) is not known, and may change sizes or times; "
                "remove it if it does not"
            )


def _refuse_other_types(config: _Config) -> None:
    if not config.type.name:
        types = ", ".join(sorted({a.type.name for a in architectures()}))
        kind = config.fields.get("model_type")
        raise config.fail(f"field 'model_type' is {kind!r}, not modelled yet; known: {types}")
    for name in config.architecture.names("embedding_width"):
        width = config.fields.get(name)
        if width is not None and width != config.fields.get("hidden_size"):
            raise config.fail(
                f"field {name!r} differs from hidden_size (as in opt-350m), not modelled yet"
            )


def _experts(config: _Config, layers: int) -> Experts | None:
    """The experts of a configuration whose model_type has some.

    Multi-token prediction layers (`num_nextn_predict_layers`, `num_mtp_modules`) serve speculative
    decoding alone; servers do not load them without it.
    """
    if not config.type.experts:
        return None
    if (
        config.fields.get("decoder_sparse_step", 1) != 1
        or config.fields.get("moe_layer_freq", 1) != 1
    ):
        raise config.fail(
            "experts in every n-th layer (field 'decoder_sparse_step' or 'moe_layer_freq') are not "
            "modelled yet"
        )
    if "interleave_moe_layer_step" in config.type.reads:
        return _llama4_experts(config, layers)
    dense = config.size("first_k_dense_replace")
    plain = config.fields.get("mlp_only_layers") or []
    kinds = config.fields.get("mlp_layer_types")
    if isinstance(kinds, list):
        plain = [layer for layer, kind in enumerate(kinds[:layers]) if kind != "sparse"]
    if plain != list(range(len(plain))):
        raise config.fail(
            f"layers without experts other than the first (field 'mlp_only_layers' is {plain!r}) "
            "are not modelled yet"
        )
    intermediate = config.count("moe_intermediate_size", "intermediate_size")
    experts = Experts(
        routed=config.named("experts"),
        per_token=config.named("experts_per_token"),
        intermediate=intermediate,
        shared_intermediate=config.size(
            "shared_expert_intermediate_size", "shared_intermediate_size"
        )
        or config.size("n_shared_experts") * intermediate,
        dense_layers=dense or len(plain),
    )
    if experts.per_token > experts.routed or experts.dense_layers >= layers:
        raise config.fail(
            f"{experts.per_token} experts a token of {experts.routed}, and {experts.dense_layers} "
            f"of {layers} layers without: there must be as many experts and a layer that has them"
        )
    return experts


def _sparse(config: _Config) -> SparseAttention | None:
    if "index_topk" not in config.type.reads:
        return None
    shared = config.size("index_topk_freq") > 1
    kinds = config.fields.get("indexer_types") or []
    if shared or not isinstance(kinds, list) or set(map(str, kinds)) - {"full"}:
        raise config.fail(
            "indices shared between layers (field 'index_topk_freq' or 'indexer_types') are not "
            "modelled yet"
        )
    return SparseAttention(
        tokens=config.count("index_topk"),
        heads=config.count("index_n_heads"),
        head_dim=config.count("index_head_dim"),
    )


def _llama4_experts(config: _Config, layers: int) -> Experts | None:
    """Experts of the layers in `moe_layers`, else of every n-th; a shared one is as large."""
    listed = config.fields.get("moe_layers")
    if isinstance(listed, list):
        with_experts = len(listed)
    else:
        with_experts = layers // config.count("interleave_moe_layer_step")
    if with_experts > layers:
        raise config.fail(f"field 'moe_layers' names {with_experts} of {layers} layers")
    if not with_experts:
        return None
    intermediate = config.count("intermediate_size")
    return Experts(
        routed=config.count("num_local_experts"),
        per_token=config.count("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=intermediate,
        dense_layers=layers - with_experts,
    )


def _latent(config: Fields) -> LatentAttention | None:
    if not config.size("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim"),
        key_dim=config.count("qk_nope_head_dim"),
        value_dim=config.count("v_head_dim"),
        query_rank=config.size("q_lora_rank") or None,
    )


def _window(config: _Config, layers: int, context_tokens: int) -> SlidingWindow | None:
    """The layers that slide: those of `layer_types`, else all but every n-th, or all, where
    `sliding_window` is set. Chunks of Llama 4 are taken as windows of their size, which is an upper
    bound: a token sees those of its chunk alone, in the mean half of them.
    """
    kinds = _kinds_of_layers(config, layers)
    tokens = config.size("sliding_window", "attention_chunk_size")
    on = config.fields.get("use_sliding_window", True) and 0 < tokens < context_tokens
    if kinds is None:  # of Qwen2 the first `max_window_layers` attend to all tokens
        sliding = layers - config.size("max_window_layers")
        return SlidingWindow(tokens, sliding) if on and sliding > 0 else None
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise config.fail(f"field 'layer_types' must name a kind for each of the {layers} layers")
    modelled = {"full_attention", "sliding_attention", "chunked_attention"}
    if "full_attention_interval" in config.type.reads:
        modelled.add("linear_attention")
    unknown = {str(kind) for kind in kinds} - modelled
    if unknown:
        raise config.fail(f"layers of {min(unknown)} (field 'layer_types') are not modelled yet")
    sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds[:layers])
    if sliding and not tokens:
        raise config.fail("field 'sliding_window' is missing, but layers slide ('layer_types')")
    return SlidingWindow(tokens, sliding) if sliding and on else None


def _kinds_of_layers(config: _Config, layers: int) -> Any:
    """`layer_types`, or what older files say in its place; None: nothing."""
    fields = config.fields
    if fields.get("layer_types") is not None:
        return fields["layer_types"]
    if "attention_chunk_size" in config.type.reads:
        rotary = fields.get("no_rope_layers")  # 1 for layers with rotary positions
        if not rotary:
            every = config.count("no_rope_layer_interval")
            rotary = [(layer + 1) % every for layer in range(layers)]
        if not isinstance(rotary, list):
            raise config.fail(f"field 'no_rope_layers' must be a list but is {rotary!r:.60}")
        return ["chunked_attention" if has_rotary else "full_attention" for has_rotary in rotary]
    if config.size("sliding_window_pattern", "_sliding_window_pattern"):
        every = config.count("sliding_window_pattern", "_sliding_window_pattern")
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    return None


def _linear(config: _Config, layers: int) -> LinearAttention | None:
    """The layers with linear attention: those of `layer_types`, else all but every n-th."""
    if "full_attention_interval" not in config.type.reads:
        return None
    kinds = config.fields.get("layer_types")
    if isinstance(kinds, list):
        count = kinds[:layers].count("linear_attention")
    else:
        count = layers - layers // config.count("full_attention_interval", default=4)
    if not config.flag("attn_output_gate", default=True):
        raise config.fail("attention without its gate (field 'attn_output_gate') is not modelled")
    if not 0 < count < layers:
        raise config.fail(f"{count} of {layers} layers with linear attention are not modelled yet")
    linear = LinearAttention(
        layers=count,
        key_heads=config.count("linear_num_key_heads"),
        value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim"),
    )
    if linear.value_heads % linear.key_heads:
        raise config.fail(
            f"linear_num_value_heads {linear.value_heads} must be a multiple of the "
            f"{linear.key_heads} key heads"
        )
    return linear


def _kv_heads(config: _Config, heads: int) -> int:
    flag = config.family.kv_heads_flag
    if not flag:
        return config.named("kv_heads", default=heads)
    return config.named("kv_heads") if config.flag(flag, default=False) else heads


def _intermediate(config: _Config) -> int:
    # Where all layers have experts (Qwen3.5), a file may leave it out.
    width = config.named("intermediate", default=config.size("moe_intermediate_size") or None)
    return max(1, width // config.family.mlp_parts)


def _context_tokens(config: _Config) -> int:
    """The longest context, with rotary positions scaled where they are (`rope_scaling`): to the
    factor's multiple of what they were trained on, or of all where the file does not say it.
    """
    tokens, family = config.named("context_tokens"), config.family
    scaling = config.fields.get("rope_scaling") or config.fields.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise config.fail(f"field 'rope_scaling' must be an object but is {scaling!r:.60}")
    stretched = scaling.get("rope_type", scaling.get("type")) in _STRETCHED
    if stretched and not family.scaled_context:
        scaled = Fields(config.path, scaling, "rope_scaling")
        trained = scaled.count("original_max_position_embeddings", default=tokens)
        factor = number(scaling.get("factor", 1.0))
        if not 1 <= factor < 1e6:
            raise config.fail(f"rope_scaling: factor must be a number from 1 on, not {factor!r}")
        tokens = max(tokens, round(trained * factor))
    return (
        max(1, tokens - (family.traits.position_offset or 0))
        if family.offset_in_context
        else tokens
    )


def _tied(config: _Config) -> bool:
    if config.family.traits.kind == "encoder":
        return True
    return config.flag("tie_word_embeddings", default=config.family.tied)
