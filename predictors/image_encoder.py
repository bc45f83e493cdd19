"""Parameters of the image encoder beside a language model, from `vision_config`."""

from __future__ import annotations

from ..workloads.errors import FileFormatError
from .config_fields import Fields


def image_encoder_parameters(whole: Fields, hidden: int) -> int:
    """Parameters of the vision transformer beside a language model of width `hidden`: layers,
    patches, and what joins the two: one matrix, or for patches that are merged an MLP (one more for
    each layer of the encoder whose result goes to the language model too: Qwen3-VL).

    Half a percent of such models lies in other parts.
    """
    vision = whole.get("vision_config")
    if not vision:
        return 0
    if not isinstance(vision, dict):
        raise whole.fail(f"field 'vision_config' must be an object but is {vision!r:.60}")
    config = Fields(whole.path, vision)
    try:
        width = config.count("embed_dim", "vt_hidden_size", "hidden_size")
        inner = _inner(config, width)
        layers = config.count("num_hidden_layers", "depth", "vt_num_hidden_layers")
    except FileFormatError as error:
        raise whole.fail(f"an image encoder (field 'vision_config') of which {error}") from None
    matrices = 3 if config.get("hidden_act") == "silu" else 2
    patch = config.count("num_channels", "in_channels", "in_chans", default=3)
    patch *= (config.size("patch_size") ** 2) * max(1, config.size("temporal_patch_size"))
    joined = width * hidden
    merged = width * config.size("spatial_merge_size") ** 2
    if merged and (config.get("out_hidden_size") or config.get("embed_dim")):
        also = config.get("deepstack_visual_indexes")
        joined = merged * (merged + hidden) * (1 + len(also if isinstance(also, list) else ()))
    return layers * (4 * width + matrices * inner) * width + width * patch + joined


def _inner(config: Fields, width: int) -> int:
    ratio = config.get("mlp_ratio")
    if isinstance(ratio, int | float) and not config.get("intermediate_size"):
        return round(ratio * width)
    return config.count("intermediate_size", "vt_intermediate_size")
