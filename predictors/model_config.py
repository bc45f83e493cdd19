"""A model's shape from its Hugging Face `config.json`; refuses what is not modelled, by name.

Models are read by the parts that their fields name. `families` adds what files leave unsaid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError
from ..workloads.file_cache import depends_on
from ..workloads.parsing import number, parse_json
from .checkpoint_format import checkpoint_formats, side_file
from .config_experts import experts_of
from .config_fields import Fields
from .config_layers import Layout, layout_of, linear_of, window_of
from .families import (
    BY_PARTS,
    FIELDS,
    TIED_TYPES,
    Architecture,
    Family,
    ModelType,
    Traits,
    architecture_of,
)
from .image_encoder import image_encoder_parameters
from .model_parts import LatentAttention, SparseAttention
from .model_spec import ModelSpec

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
_SPECULATIVE_TYPES = ("eagle", "medusa", "mlp_speculator", "speculator")
_OTHER = {
    "compress_ratios": "attention to compressed tokens",
    "sparse_attention_config": "attention to chosen blocks",
    "dual_chunk_attention_config": "chunked attention",
    "num_kv_shared_layers": "KV shared between layers",
    "use_cla": "KV shared between layers",
    "is_encoder_decoder": "an encoder beside the decoder",
    "audio_config": "an audio encoder",
    "layer_group_size": "linear attention in groups of layers",
    "ssm_cfg": "state-space layers",
    "mamba_dt_rank": "Mamba 1",
    "block_configs": "layers that differ in width",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "use_double_wide_mlp": "layers that differ in width",
    "num_global_key_value_heads": "layers whose KV heads differ",
    "global_head_dim": "layers whose heads differ",
    "swa_num_key_value_heads": "layers whose KV heads differ",
    "attn_res_block_size": "residuals that attend to earlier layers",
    "hc_mult": "several residual streams",
    "zero_expert_num": "experts that compute nothing",
    "type_vocab_size": "token types, as of an encoder,",
}
# Fields whose names say that they shape a layer, and of these the ones that are read only where
# others say so, or that leave sizes and times as they are.
_PARTS = re.compile(
    r"attn|attention|window|sparse|mamba|ssm|conv|recurrent|expert|moe|latent|cross|dense|"
    r"multi_query|kv_(heads|shar)|block_types|rnn|rwkv|_loops|ut_steps|self_decoder|share_map"
)
_HARMLESS = re.compile(
    r"query_pre_attn_scalar|attn_(scale|logit_softcapping|temperature_tuning)|num_attention_heads|"
    r"attention_(chunk_size|multiplier|value_scale|out_.*|qk_.*)|multi_query_attention|"
    r"_?(use_)?sliding_window.*|max_window_layers|.*rope.*|(moe_)?router_.*|"
    r".*dropout(_prob)?|.*bias|"
    r"_?attn_implementation.*|(scale_)?attention_softmax_in_fp32|scale_attn_weights|"
    r"use_(flash|logn)_attn|"
    r"layernorm_(full|linear)_attention_.*|mlp_only_layers|moe_(intermediate_size|layer_freq|"
    r"latent_size)|n_shared_experts|(moe_)?shared_expert.*|num_experts_per_tok.*|moe_.*_overlap|"
    r"(mtp|dspark)_.*|moe_(renormalize|gate|grouped|group|capacity|use_aux|score|norm|act|router|"
    r"orthogonal|multimodal|every|aux|dropout|z_).*|num_expert_group|latent_moe_use_norm|"
    r"use_(mamba_kernels|conv_bias|cross_layer_.*)|mamba_(chunk_size|hidden_act|proj_bias|"
    r"norm_before_gate|rms_norm|use_mlp|expand|ssm_.*|dt_.*|step_.*)|ssm_(multipliers|in_.*|out_.*)|"
    r"conv_(kernel|use_xavier_init)|expert_(layer_.*|capacity|parallel.*)|enable_moe_.*|"
    r"add_(swa|full)_attention_sink_bias|use_moe_router_bias|"
    r"first_k_dense_replace|linear_conv_kernel_dim|interleave_moe_layer_step|"
    r"decoder_sparse_step|full_attention_interval|attention_output_gate|num_moe_.*|"
    r"sliding_attention.*|attn_rotary_emb|expert_dtype|attn_qkv_pack|ffn_expert.*|conv_dim_.*"
)
_STRETCHED = ("yarn", "deepseek_yarn", "linear", "dynamic")  # rotary positions, by a factor
_BIASED = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias")
_NORMED = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
_OUTPUT_GATES = ("attn_output_gate", "mla_use_output_gate", "use_output_gate")
_ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function")
_GATED = re.compile(r"si?lu|swish|swi?glu.*|geglu|situ")
_PLAIN = re.compile(r"relu2?|relu_?squared|xielu")
_DECODERS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForVisionText2Text")
_SHARED_EMBEDDINGS = ("tie_embedding", "use_embedding_sharing")
_DTYPE = re.compile(r"(torch\.)?(auto|half|float|bfloat16|float(16|32|64)|float8_\w+|u?int[48])")
_TEXTS = ("text_config", "llm_config", "language_config")


class _Config(Fields):
    """The fields of a `config.json`, with what its architecture calls them."""

    def __init__(self, path: Path | str, fields: Mapping[str, Any]) -> None:
        architecture = architecture_of(fields)
        super().__init__(path, {**(architecture.type.defaults if architecture else {}), **fields})
        self.architecture = architecture or Architecture(ModelType(""), Family(BY_PARTS, ()))
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
    for field in ("torch_dtype", "dtype"):
        dtype = config.get(field)
        if dtype is not None and not _DTYPE.fullmatch(str(dtype)):
            raise config.fail(f"field {field!r} is no number format: {dtype!r:.60}")
    layout = layout_of(config, config.named("layers", default=0) or None)
    heads, hidden = config.named("heads"), config.named("hidden")
    head_dim = config.named("head_dim", default=max(1, hidden // heads))
    context_tokens = _context_tokens(config)
    latent = _latent(config)
    if not latent and config.get("v_head_dim") not in (None, head_dim):
        raise config.fail("not modelled yet: values of another width (field 'v_head_dim')")
    kv_heads = 1 if latent else _kv_heads(config, heads)
    names = config.architecture.names
    experts = experts_of(config, layout, names("experts"), names("experts_per_token"))
    traits = None if config.type.name else _traits(config, layout)
    mlps_alone = layout.of("none")
    formats = checkpoint_formats(config)
    spec = ModelSpec(
        name=name,
        family=config.family.name,
        layers=layout.count,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=latent.kv_rank + latent.rope_dim if latent else head_dim,
        intermediate=_intermediate(config, has_experts=experts is not None),
        vocab=config.named("vocab"),
        context_tokens=context_tokens,
        tied_embeddings=_tied(config),
        origin=str(path),
        experts=experts,
        latent=latent,
        sparse=_sparse(config, layout.count),
        window=window_of(config, layout, context_tokens),
        linear=linear_of(config, layout, heads, head_dim),
        image_encoder_parameters=image_encoder_parameters(whole, hidden),
        checkpoint_dtype=formats.weights,
        checkpoint_beside_dtype=formats.beside,
        checkpoint_kv_dtype=formats.kv,
        mixers_alone=layout.count - mlps_alone if layout.parts_alone else 0,
        mlps_alone=mlps_alone,
        own_traits=traits,
    )
    if heads % spec.kv_heads:
        raise config.fail(
            f"num_attention_heads {heads} must be a multiple of the {spec.kv_heads} KV heads"
        )
    if not spec.attention_layers:
        raise config.fail("a model without attention (fields of its layers) is not modelled yet")
    _refuse_unread(config)
    return spec


def _language_model(whole: Fields) -> _Config:
    """The language model of a file: its `text_config` where it has one, and what holds for all."""
    nested = next((name for name in _TEXTS if whole.fields.get(name) is not None), None)
    if nested is None:
        around, language = {}, dict(whole.fields)
    else:
        text = whole.fields[nested]
        if not isinstance(text, dict):
            raise whole.fail(f"field {nested!r} must be an object but is {text!r:.60}")
        around = {name: value for name, value in whole.fields.items() if name not in _TEXTS}
        shared = ("quantization_config", "tie_word_embeddings", "architectures")
        language = {name: around[name] for name in shared if name in around} | text
    config = _Config(whole.path, language)
    config.read.update(("vision_config", *(name for size in FIELDS for name in FIELDS[size])))
    if around:
        outside = _Config(whole.path, around | {"vision_config": None})
        _refuse_features(outside)
        _refuse_unread(outside)
    return config


def _refuse_features(config: _Config) -> None:
    kind = str(config.get("model_type"))
    for name in _SPECULATIVE:
        if config.get(name):
            raise config.fail(
                f"speculative decoding (field {name!r}) is not modelled yet; use the plain model"
            )
    if kind in _SPECULATIVE_TYPES:
        raise config.fail(
            f"speculative decoding (model_type {kind!r}) is not modelled yet; use the plain model"
        )
    encoder = config.family.traits.kind == "encoder"
    for name, feature in _OTHER.items():
        if config.get(name) and not (encoder and name == "type_vocab_size"):
            raise config.fail(f"not modelled yet: {feature} (field {name!r})")
    if config.get("use_bidirectional_attention") is True:  # "vision": inside an image alone
        raise config.fail(
            "attention to later tokens (field 'use_bidirectional_attention') is not modelled yet"
        )


def _refuse_unmodelled(config: _Config) -> None:
    _refuse_features(config)
    classes = config.get("architectures")
    named = isinstance(classes, list) and classes and not config.type.name
    if named and not any(str(name).endswith(_DECODERS) for name in classes):
        raise config.fail(
            f"field 'architectures' ({classes[0]!r}) names no decoder, and model_type "
            f"{config.get('model_type')!r} is not known"
        )
    for name in config.architecture.names("embedding_width"):
        width = config.get(name)
        if width is not None and width != config.get("hidden_size"):
            raise config.fail(
                f"field {name!r} differs from hidden_size (as in opt-350m), not modelled yet"
            )


def _refuse_unread(config: _Config) -> None:
    """Refuse a field that shapes layers by its name, and that nothing has read."""
    for name, value in config.fields.items():
        if not value or name in config.read or _HARMLESS.fullmatch(name):
            continue
        if _PARTS.search(name):
            raise config.fail(
                f"field {name!r} ({value!r:.60}) is not known, and may change sizes or times; "
                "remove it if it does not"
            )


def _traits(config: _Config, layout: Layout) -> Traits:
    """What the fields say of a decoder of no family.

    Raises:
        FileFormatError: no field says whether its MLPs have a gate.
    """
    held = [config.get(name) for name in _ACTIVATIONS if isinstance(config.get(name), str)]
    activation = str(held[0]).lower() if held else "silu"
    gated = _GATED.fullmatch(activation) is not None
    if not gated and not _PLAIN.fullmatch(activation):
        raise config.fail(
            f"model_type {config.get('model_type')!r} is not known, and its activation "
            f"{activation!r} does not say whether its MLPs have a gate"
        )
    return Traits(
        gated_mlp=gated,
        biases="qkv" if any(config.get(name) is True for name in _BIASED) else "none",
        norms_per_layer=1 if layout.parts_alone else 2,
        qk_norm=any(config.get(name) is True for name in _NORMED),
        output_gate=any(config.get(name) is True for name in _OUTPUT_GATES),
    )


def _sparse(config: _Config, layers: int) -> SparseAttention | None:
    """DeepSeek's indexer; with `layers` below all where some take the indices of an earlier one."""
    if not config.get("index_topk"):
        return None
    kinds = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    every = config.size("index_topk_freq")
    with_indexer = layers
    if isinstance(kinds, list) and kinds:
        with_indexer = kinds[:layers].count("full")
    elif isinstance(pattern, str) and pattern:
        with_indexer = layers - pattern[:layers].count("S")
    elif every > 1:
        first = config.size("index_skip_topk_offset") or 2
        with_indexer = sum(max(layer - first + 1, 0) % every == 0 for layer in range(layers))
    if not with_indexer:
        raise config.fail("no layer has an indexer of sparse attention (field 'indexer_types')")
    return SparseAttention(
        tokens=config.count("index_topk"),
        heads=config.count("index_n_heads"),
        head_dim=config.count("index_head_dim"),
        layers=0 if with_indexer == layers else with_indexer,
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


def _kv_heads(config: _Config, heads: int) -> int:
    flag = config.family.kv_heads_flag
    if not flag:
        return config.named("kv_heads", default=heads)
    return config.named("kv_heads") if config.flag(flag, default=False) else heads


def _intermediate(config: _Config, *, has_experts: bool) -> int:
    width = config.size("dense_intermediate_size")
    if not has_experts:  # dense models of Granite 4 have what would be the shared expert alone
        width = width or config.size("shared_intermediate_size")
    # Where all layers have experts (Qwen3.5), a file may leave it out.
    spare = config.size("moe_intermediate_size") or None
    if (
        not has_experts
        and config.get("conv_L_cache")
        and config.flag("block_auto_adjust_ff_dim", default=True)
    ):  # LFM2
        named = config.count("block_ff_dim", "intermediate_size")
        multiple = config.size("block_multiple_of") or 256
        scale = number(config.get("block_ffn_dim_multiplier") or 1.0)
        return max(1, multiple * -(-int(scale * int(2 * named / 3)) // multiple))
    return max(1, (width or config.named("intermediate", default=spare)) // config.family.mlp_parts)


def _context_tokens(config: _Config) -> int:
    """The longest context, with rotary positions scaled where they are (`rope_scaling`): to the
    factor's multiple of what they were trained on, or of all where the file does not say it.
    """
    tokens, family = config.named("context_tokens"), config.family
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
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
    tied = config.family.tied or config.get("model_type") in TIED_TYPES
    for name in _SHARED_EMBEDDINGS:
        tied = config.flag(name, default=tied)
    return config.flag("tie_word_embeddings", default=tied)
