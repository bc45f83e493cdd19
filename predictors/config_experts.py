"""Experts and MLPs of a `config.json`, from the fields that say their sizes and layers."""

from __future__ import annotations

from .config_fields import Fields
from .config_layers import Layout
from .model_parts import Experts

_EVERY_NTH = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
    "shared_intermediate_size",
)
_SHARED_COUNTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)


def experts_of(
    config: Fields, layout: Layout, routed_names: tuple[str, ...], chosen_names: tuple[str, ...]
) -> Experts | None:
    """The experts of a configuration, whose numbers have these names; None: it has none.

    Multi-token prediction layers (`num_nextn_predict_layers`, `num_mtp_modules`) serve speculative
    decoding alone; servers do not load them without it.

    Raises:
        FileFormatError: a field is missing or wrong.
    """
    routed = config.size(*routed_names)
    if routed < 2:
        return None
    with_experts = _expert_layers(config, layout)
    if not with_experts and not config.get("first_k_dense_replace"):
        return None
    chosen = config.count(*chosen_names)
    width = config.count("moe_intermediate_size", "intermediate_size")
    shared_experts = config.size(*_SHARED_COUNTS)
    shared = config.size(*_SHARED_WIDTHS) or shared_experts * width
    if config.get("interleave_moe_layer_step"):  # Llama 4: a shared expert as large as the others
        shared = width
    mlps = layout.count if layout.expert_layers is None else layout.of("none")
    if chosen > routed or not 0 < with_experts <= mlps:
        raise config.fail(
            f"{chosen} experts a token of {routed}, and {mlps - with_experts} of {mlps} layers "
            "without: there must be as many experts and a layer that has them"
        )
    return Experts(
        routed=routed,
        per_token=chosen,
        intermediate=width,
        shared_intermediate=shared,
        dense_layers=mlps - with_experts,
        width=config.size("moe_latent_size", "routed_expert_hidden_size"),
    )


def _expert_layers(config: Fields, layout: Layout) -> int:
    """Number of layers with experts."""
    layers = layout.count
    if layout.expert_layers is not None:
        return layout.expert_layers
    listed = config.get("moe_layers")
    if isinstance(listed, list):
        if len(listed) > layers:
            raise config.fail(f"field 'moe_layers' names {len(listed)} of {layers} layers")
        return len(listed)
    enumerated = config.get("moe_layers_enum")  # Step 3: numbers of layers, with commas
    if isinstance(enumerated, str) and enumerated:
        return len(enumerated.split(","))
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[:layers].count("sparse")
    marks = config.get("moe_layer_freq")
    if isinstance(marks, list):
        return sum(map(bool, marks[:layers]))
    every = config.size("moe_layer_freq", *_EVERY_NTH) or 1
    first = max(config.size(name) for name in _FIRST)
    if config.get("moe_layer_end_index") in (None, -1):
        last = layers
    else:
        last = min(layers, config.size("moe_layer_end_index") + 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise config.fail(f"field 'mlp_only_layers' must be a list but is {plain!r:.60}")
    counted_from = 0 if config.get("moe_layer_freq") is not None else 1  # DeepSeek from 0, Qwen 1
    return sum(
        (layer + counted_from) % every == 0 and layer not in plain for layer in range(first, last)
    )
