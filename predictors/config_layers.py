"""What the layers of a `config.json` are, one by one, from the fields that say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .config_fields import Fields
from .model_parts import LinearAttention, SlidingWindow

Mixer = Literal["full", "sliding", "linear", "none"]

_MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("full_attention", "attention", "global_attention", "full", "hybrid"), "full"),
    "deepseek_sparse_attention": "full",  # to the tokens that an indexer chooses (`index_topk`)
    **dict.fromkeys(("sliding_attention", "chunked_attention", "sliding", "local"), "sliding"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv"), "linear"),
    **dict.fromkeys(("moe", "mlp"), "none"),
}
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # `hybrid_override_pattern`
_MOST_LAYERS = 10_000
_LISTS = ("layer_types", "layers_block_type")
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class Layout:
    """The layers in order. `mixers`: what mixes tokens; None: no field says it.

    With `parts_alone` a layer is a mixer or an MLP (Nemotron-H), else both; `expert_layers` is the
    number of those that are named as MLPs of experts.
    """

    count: int
    mixers: tuple[Mixer, ...] | None = None
    parts_alone: bool = False
    expert_layers: int | None = None

    def of(self, mixer: Mixer) -> int:
        """Number of layers with this mixer."""
        return (self.mixers or ()).count(mixer)


def layout_of(config: Fields, layers: int | None) -> Layout:
    """The layers, of which `num_hidden_layers` says that there are so many.

    Raises:
        FileFormatError: a field has too few layers, or one of a kind that is not modelled.
    """
    if layers is not None and layers > _MOST_LAYERS:
        raise config.fail(f"{layers:,} layers are more than the {_MOST_LAYERS:,} that are read")
    field, kinds = _named_kinds(config, layers)
    if kinds is None:
        if layers is None:
            raise config.fail("field 'num_hidden_layers' is missing")
        return Layout(layers)
    if not isinstance(kinds, list) or len(kinds) < (layers or 1):
        raise config.fail(f"field {field!r} must name a kind for each of the {layers} layers")
    if len(kinds) > _MOST_LAYERS:
        raise config.fail(
            f"field {field!r} names {len(kinds):,} layers, more than the {_MOST_LAYERS:,} that are "
            "read"
        )
    kinds = [str(kind) for kind in kinds[: layers or len(kinds)]]
    unknown = set(kinds) - set(_MIXERS)
    if unknown:
        raise config.fail(f"layers of {min(unknown)} (field {field!r}) are not modelled yet")
    alone = bool({"moe", "mlp"} & set(kinds))
    return Layout(
        len(kinds),
        tuple(_MIXERS[kind] for kind in kinds),
        alone,
        kinds.count("moe") if alone else None,
    )


def _named_kinds(config: Fields, layers: int | None) -> tuple[str, Any]:
    """The field that says what the layers are, and their kinds; None: no field does."""
    for field in _LISTS:
        if config.get(field) is not None:
            return field, config.get(field)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return "hybrid_override_pattern", [_LETTERS.get(letter, letter) for letter in pattern]
    if layers is None:
        return "", None
    return _marked_kinds(config, layers)


def _marked_kinds(config: Fields, layers: int) -> tuple[str, Any]:
    """As `_named_kinds`, of fields that mark or count layers of one kind."""
    marks = config.get("attn_type_list")  # 1 for full attention
    if isinstance(marks, list):
        return "attn_type_list", [
            "full_attention" if mark == 1 else "linear_attention" for mark in marks
        ]
    marks = config.get("hybrid_layer_pattern")  # 1 for sliding windows
    if isinstance(marks, list):
        return "hybrid_layer_pattern", [
            "sliding_attention" if mark else "full_attention" for mark in marks
        ]
    listed = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    linear = config.get("linear_attn_config")
    first = 0
    if isinstance(linear, dict):  # its layers are counted from 1
        listed, first = linear.get("full_attn_layers"), 1
    if isinstance(listed, list):
        return "attn_layer_indices", [
            "full_attention" if layer + first in listed else "linear_attention"
            for layer in range(layers)
        ]
    if config.get("full_attention_interval") is not None or config.get("linear_num_value_heads"):
        every = config.count("full_attention_interval", default=4)
        return "full_attention_interval", [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    if config.get("attention_chunk_size") and not config.get("sliding_window"):
        return "no_rope_layers", _chunked(config, layers)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, str):  # EXAONE 4: one letter a layer, repeated
        kinds = ["full_attention" if letter == "G" else "sliding_attention" for letter in pattern]
        return "sliding_window_pattern", (kinds * layers)[:layers]
    if pattern:
        every = config.count("sliding_window_pattern", "_sliding_window_pattern")
        return "sliding_window_pattern", [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    return "", None


def _chunked(config: Fields, layers: int) -> list[str]:
    """Llama 4: layers with rotary positions attend to chunks."""
    rotary = config.get("no_rope_layers")  # 1 for layers with rotary positions
    if not rotary:
        every = config.count("no_rope_layer_interval")
        rotary = [(layer + 1) % every for layer in range(layers)]
    if not isinstance(rotary, list):
        raise config.fail(f"field 'no_rope_layers' must be a list but is {rotary!r:.60}")
    return ["chunked_attention" if has_rotary else "full_attention" for has_rotary in rotary]


def window_of(config: Fields, layout: Layout, context_tokens: int) -> SlidingWindow | None:
    """The layers that slide: those that are named, or all, where `sliding_window` is set. Chunks of
    Llama 4 are taken as windows of their size, which is an upper bound: a token sees those of its
    chunk alone, in the mean half of them.
    """
    tokens = config.size("sliding_window", "attention_chunk_size")
    on = "use_sliding_window" not in config.fields or bool(config.get("use_sliding_window"))
    on = on and 0 < tokens < context_tokens
    if layout.mixers is None:  # of Qwen2 the first `max_window_layers` attend to all tokens
        sliding = layout.count - config.size("max_window_layers")
    else:
        sliding = layout.of("sliding")
        if sliding and not tokens:
            raise config.fail("field 'sliding_window' is missing, but layers slide ('layer_types')")
    return SlidingWindow(tokens, sliding) if on and sliding > 0 else None


def linear_of(config: Fields, layout: Layout, heads: int, head_dim: int) -> LinearAttention | None:
    """The recurrence of the layers that have one, by the fields that give its sizes.

    Raises:
        FileFormatError: there is one of a kind that is not modelled, or its sizes do not fit.
    """
    layers, of_mamba = layout.of("linear"), _mamba(config, layout)
    if layout.mixers is not None:  # sizes of layers that are none of these say nothing
        config.read.update(name for name in config.fields if name.startswith(("mamba_", "ssm_")))
    if of_mamba is not None:
        linear = of_mamba
    elif not layers and not config.get("linear_num_value_heads"):
        return None
    elif config.get("linear_num_value_heads"):
        linear = _gated_delta(config, layout)
    elif isinstance(config.get("linear_attn_config"), dict):
        linear = _kimi_delta(config, layers)
    elif config.get("conv_L_cache"):
        width = config.count("conv_dim", "hidden_size")
        linear = LinearAttention(
            layers, 1, 1, 0, width, config.count("conv_L_cache"), "convolution"
        )
    elif config.get("attn_type_list") or str(config.get("model_type")).startswith("minimax"):
        linear = LinearAttention(layers, heads, heads, head_dim, head_dim, 1, "lightning")
    else:
        raise config.fail(
            "linear attention (field 'layer_types') of which no field gives the sizes "
            "('linear_num_value_heads', 'linear_attn_config', 'mamba_n_heads') is not modelled yet"
        )
    if linear.value_heads % linear.key_heads:
        raise config.fail(
            f"{linear.value_heads} value heads of linear attention must be a multiple of the "
            f"{linear.key_heads} key heads"
        )
    return linear


def _gated_delta(config: Fields, layout: Layout) -> LinearAttention:
    layers = layout.of("linear")
    if not config.flag("attn_output_gate", default=True):
        raise config.fail("attention without its gate (field 'attn_output_gate') is not modelled")
    if not 0 < layers < layout.count:
        raise config.fail(
            f"{layers} of {layout.count} layers with linear attention are not modelled yet"
        )
    return LinearAttention(
        layers=layers,
        key_heads=config.count("linear_num_key_heads"),
        value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim"),
    )


def _kimi_delta(config: Fields, layers: int) -> LinearAttention:
    sizes = Fields(config.path, config.get("linear_attn_config"), "linear_attn_config")
    heads, width = sizes.count("num_heads"), sizes.count("head_dim")
    return LinearAttention(
        layers,
        heads,
        heads,
        width,
        width,
        sizes.count("short_conv_kernel_size"),
        "kda",
        full_gate=sizes.flag("use_full_rank_gate", default=False),
    )


def _mamba(config: Fields, layout: Layout) -> LinearAttention | None:
    """State-space layers of Mamba 2; beside attention in every layer where none is named."""
    state = config.size("mamba_d_state", "ssm_state_size", "state_size")
    beside = config.size("mamba_d_ssm") > 0
    if not state or not (beside or layout.of("linear")):
        return None
    heads = config.size("mamba_n_heads", "mamba_num_heads")
    if not heads:
        raise config.fail(
            "state-space layers of Mamba 1 (no field 'mamba_n_heads') are not modelled yet"
        )
    inner = config.size("mamba_d_ssm") or config.size("mamba_expand") * config.size("hidden_size")
    if config.get("mamba_d_head") == "auto":
        width = inner // heads
    else:
        width = config.count("mamba_d_head", "mamba_head_dim", default=max(1, inner // heads))
    stored = str(config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype") or "bfloat16")
    return LinearAttention(
        layout.count if beside else layout.of("linear"),
        config.count("mamba_n_groups", "n_groups", default=1),
        heads,
        state,
        width,
        config.count("mamba_d_conv", "conv_kernel", default=4),
        "mamba2",
        state_bits=_BITS.get(stored, 32),
        beside_attention=beside,
    )
