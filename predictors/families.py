"""Model families, each declared once: what the reader of `config.json`, the torch engine, random
models and launchers must know of one and files do not say. Decoders of no family are read by the
parts that their fields name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["decoder", "encoder"]
Names = Mapping[str, tuple[str, ...]]

# What `config.json` calls each size; families and types have the names that differ. Of several
# names, the first that a file has holds.
FIELDS: Names = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "attention_head_dim"),
    "intermediate": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "context_tokens": ("max_position_embeddings",),
    "embedding_width": (),  # of the token embeddings, where it can differ from `hidden`
    "eps": ("rms_norm_eps",),
    "activation": ("hidden_act",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
        *("moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
    ),
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What models of one family have in common and their sizes do not say."""

    gated_mlp: bool = True  # three matrices (SwiGLU) instead of two
    biases: Literal["none", "qkv", "all"] = "none"
    norm_bias: bool = False  # LayerNorm (scale and shift) instead of RMSNorm
    norms_per_layer: int = 2
    qk_norm: bool = False
    output_gate: bool = False  # a gate as wide as the queries multiplies what attention returns
    sinks: bool = False  # a learned logit a head that takes part in the softmax
    qk_norm_over_heads: bool = False  # one norm over all heads instead of one a head
    final_norm: bool = True
    position_offset: int | None = None  # learned positions: rows beyond the context; None: rotary
    token_types: int = 0
    kind: Kind = "decoder"

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP; of activations as wide as it, as many are held at once."""
        return 3 if self.gated_mlp else 2


@dataclass(frozen=True, slots=True)
class Modules:
    """Module names in transformers or in the family's own code; weights are named after them.

    All but `head` stand below one of `roots`: the first in a whole model, another in a checkpoint
    of its body alone. Those from `attention_norm` to `down` are of each layer; the torch engine and
    random models alone need them.
    """

    roots: tuple[str, ...] = ("model.", "")
    tokens: str = "embed_tokens"
    positions: tuple[str, ...] = ("rotary_emb",)  # where they are learned, the first is their table
    layers: str = "layers"
    norm: str = "norm"  # after all layers; of an encoder, of the embeddings
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    token_types: str = ""
    pooler: str = ""


@dataclass(frozen=True, slots=True)
class ModelType:
    """One `model_type` of `config.json`. All but `name` holds of this type of its family alone."""

    name: str
    marker: str = ""  # a field that tells this type from one of the same name
    fields: Names = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of transformers, for absent fields
    in_torch: bool = False  # the torch engine runs it
    architecture: str = ""  # class in transformers that loads random models; "": none are made
    random: Mapping[str, Any] = field(default_factory=dict)  # what random models say beside sizes
    random_head_dim: bool = False  # they say `head_dim`, for which transformers has a default


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share an implementation. `name` is that of the catalogues of models.

    The torch engine runs decoders with gated MLPs, RMSNorm and rotary positions, or with plain
    MLPs, LayerNorm and learned positions. `refusals` are fields with the value that it does not
    run, and why.
    """

    name: str
    types: tuple[ModelType, ...]
    traits: Traits = Traits()
    fields: Names = field(default_factory=dict)
    kv_heads_flag: str = ""  # where the file does not set it, there are as many as `heads`
    mlp_parts: int = 1  # matrices whose widths `intermediate` adds up
    offset_in_context: bool = False  # `context_tokens` counts the rows of `position_offset`
    scaled_context: bool = False  # `context_tokens` counts scaled rotary positions
    tied: bool = False  # head and embeddings share weights where the file does not say
    modules: Modules | None = None
    eps: float = 1e-6  # where the file does not say, as is `activation`
    activation: str = "silu"
    slides: bool = False  # in the torch engine, all layers have the file's `sliding_window`
    refusals: tuple[tuple[str, bool, str], ...] = (
        ("use_sliding_window", True, "windows that differ between layers are not supported"),
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """A type and its family."""

    type: ModelType
    family: Family

    def names(self, size: str) -> tuple[str, ...]:
        """Fields of `config.json` for one of `FIELDS`."""
        return {**FIELDS, **self.family.fields, **self.type.fields}[size]


# Of no family in which all are `tied`; their head is the embeddings where the file does not say it.
TIED_TYPES = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe", "starcoder2")
BY_PARTS = "transformer"  # decoders of no family, whose traits are read too
_GLM_FIELDS: Names = {
    "layers": ("num_hidden_layers", "num_layers"),
    "head_dim": ("head_dim", "kv_channels"),
    "context_tokens": ("max_position_embeddings", "seq_length", "max_sequence_length"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "inner_hidden_size"),
    "vocab": ("padded_vocab_size", "vocab_size"),
}
_OPT_WITHOUT = "an OPT without biases or without its last norm is not supported"
_BERT = Modules(
    roots=("", "bert.", "roberta."),
    tokens="embeddings.word_embeddings",
    positions=("embeddings.position_embeddings",),
    layers="encoder.layer",
    norm="embeddings.LayerNorm",
    head="",
    attention_norm="attention.output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    mlp_norm="output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    token_types="embeddings.token_type_embeddings",
    pooler="pooler.dense",
)
_ENCODER = Family(
    "",
    (),
    Traits(
        gated_mlp=False,
        biases="all",
        norm_bias=True,
        final_norm=False,
        position_offset=0,
        token_types=2,
        kind="encoder",
    ),
    fields={"eps": ("layer_norm_eps",)},
    tied=True,
    modules=_BERT,
    eps=1e-12,
    activation="gelu",
)

_FAMILIES = (
    Family(BY_PARTS, ()),
    Family(
        "llama",
        (
            ModelType("llama", in_torch=True, architecture="LlamaForCausalLM"),
            ModelType(
                "llama4_text",
                # `intermediate_size` is that of the experts.
                fields={"intermediate": ("intermediate_size_mlp", "intermediate_size")},
                defaults={"no_rope_layer_interval": 4, "interleave_moe_layer_step": 1},
            ),
        ),
        modules=Modules(),
    ),
    Family(
        "mistral",
        (
            ModelType(
                "mistral",
                in_torch=True,
                architecture="MistralForCausalLM",
                random={"sliding_window": None},
            ),
            ModelType("mixtral"),
        ),
        modules=Modules(),
        slides=True,
    ),
    Family(
        "qwen",
        (ModelType("qwen"),),
        Traits(biases="qkv"),
        fields={
            "head_dim": ("head_dim", "kv_channels"),
            "context_tokens": ("max_position_embeddings", "seq_length"),
        },
        mlp_parts=2,
        modules=Modules(
            roots=("transformer.",),
            tokens="wte",
            positions=("drop", "rotary_emb"),
            layers="h",
            norm="ln_f",
        ),
    ),
    Family(
        "qwen2",
        (
            ModelType(
                "qwen2",
                in_torch=True,
                architecture="Qwen2ForCausalLM",
                random={"use_sliding_window": False},
            ),
            ModelType("qwen2_moe"),
            ModelType("qwen2_vl"),
            ModelType("qwen2_5_vl"),
        ),
        Traits(biases="qkv"),
        modules=Modules(),
    ),
    Family(
        "qwen3",
        (
            ModelType(
                "qwen3",
                in_torch=True,
                architecture="Qwen3ForCausalLM",
                random={"use_sliding_window": False, "attention_bias": False},
                random_head_dim=True,
            ),
            ModelType("qwen3_moe"),
            ModelType("qwen3_vl_text"),
            ModelType("qwen3_vl_moe_text"),
        ),
        Traits(qk_norm=True),
        modules=Modules(),
    ),
    Family(
        "qwen3-next",
        (
            ModelType("qwen3_next"),
            ModelType("qwen3_5_text"),
            ModelType("qwen3_5_moe_text"),
        ),
        Traits(qk_norm=True, output_gate=True),
    ),
    Family("gpt-oss", (ModelType("gpt_oss"),), Traits(biases="all", sinks=True)),
    Family(
        "deepseek",
        (
            ModelType("deepseek_v2"),
            ModelType("deepseek_v3"),
            ModelType("kimi_k2"),
            ModelType("deepseek_v32"),
            ModelType("glm_moe_dsa"),
        ),
    ),
    Family(
        "gemma3",
        (
            ModelType(
                "gemma3_text",
                defaults={
                    "vocab_size": 262_208,
                    "max_position_embeddings": 131_072,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "sliding_window": 4096,
                    "sliding_window_pattern": 6,
                },
            ),
        ),
        Traits(qk_norm=True, norms_per_layer=4),
        scaled_context=True,
        tied=True,
    ),
    Family(
        "gemma2",
        (
            ModelType("gemma"),
            ModelType("gemma2", defaults={"sliding_window": 4096, "sliding_window_pattern": 2}),
        ),
        Traits(norms_per_layer=4),
        tied=True,
    ),
    Family(
        "olmo",
        (ModelType("olmo2"), ModelType("olmo3")),
        Traits(qk_norm=True, qk_norm_over_heads=True),
    ),
    Family(
        "phi",  # an MLP without a gate, which the name of its activation does not say
        (ModelType("phi"), ModelType("gpt_neox"), ModelType("starcoder2")),
        Traits(gated_mlp=False, biases="all", norm_bias=True),
    ),
    Family(
        "minimax",
        (ModelType("minimax_m2"),),
        Traits(qk_norm=True, qk_norm_over_heads=True),
    ),
    Family(
        "opt",
        (ModelType("opt", in_torch=True),),
        Traits(gated_mlp=False, biases="all", norm_bias=True, position_offset=2),
        fields={
            "kv_heads": (),
            "head_dim": (),
            "intermediate": ("ffn_dim",),
            "embedding_width": ("word_embed_proj_dim",),
            "eps": (),
            "activation": ("activation_function",),
        },
        tied=True,
        modules=Modules(
            roots=("model.decoder.", "decoder."),
            positions=("embed_positions",),
            norm="final_layer_norm",
            attention_norm="self_attn_layer_norm",
            out="self_attn.out_proj",
            mlp_norm="final_layer_norm",
            up=("fc1",),
            down="fc2",
        ),
        eps=1e-5,
        activation="relu",
        refusals=(
            ("do_layer_norm_before", False, "norms after the layers (OPT-350m) are not supported"),
            ("enable_bias", False, _OPT_WITHOUT),
            ("_remove_final_layer_norm", True, _OPT_WITHOUT),
        ),
    ),
    Family(
        "chatglm",
        # One name, two designs: ChatGLM-6B has a plain MLP, its successors a gated one.
        (ModelType("chatglm", marker="inner_hidden_size"),),
        Traits(gated_mlp=False, biases="all", norm_bias=True),
        fields=_GLM_FIELDS,
        tied=True,
        modules=Modules(
            roots=("transformer.",), tokens="word_embeddings", positions=(), norm="final_layernorm"
        ),
    ),
    Family(
        "chatglm2",  # ChatGLM2, ChatGLM3, GLM-4-9B in their own code's config
        (ModelType("chatglm"),),
        Traits(biases="qkv"),
        fields={**_GLM_FIELDS, "kv_heads": ("multi_query_group_num",)},
        kv_heads_flag="multi_query_attention",
        modules=Modules(
            roots=("transformer.",),
            tokens="embedding",
            positions=("rotary_pos_emb",),
            layers="encoder.layers",
            norm="encoder.final_layernorm",
            head="transformer.output_layer",
        ),
    ),
    Family("glm", (ModelType("glm"),), Traits(biases="qkv"), modules=Modules()),
    Family(
        "glm4", (ModelType("glm4"),), Traits(biases="qkv", norms_per_layer=4), modules=Modules()
    ),
    replace(
        _ENCODER, name="bert", types=(ModelType("bert", in_torch=True, architecture="BertModel"),)
    ),
    replace(
        _ENCODER,
        name="xlm-roberta",
        types=(ModelType("roberta", in_torch=True), ModelType("xlm-roberta", in_torch=True)),
        traits=replace(_ENCODER.traits, position_offset=2, token_types=1),
        offset_in_context=True,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


def architectures() -> Iterator[Architecture]:
    """All types of all families, in the order of `FAMILIES`."""
    for family in FAMILIES.values():
        for model_type in family.types:
            yield Architecture(model_type, family)


def architecture_of(fields: Mapping[str, Any]) -> Architecture | None:
    """The type that the fields of a `config.json` name; None: no such type."""
    name = fields.get("model_type")
    return next(
        (
            architecture
            for architecture in architectures()
            if architecture.type.name == name
            and (not architecture.type.marker or architecture.type.marker in fields)
        ),
        None,
    )


def torch_types(kind: Kind) -> dict[str, Architecture]:
    """The types of a kind that the torch engine runs, by name."""
    return {
        architecture.type.name: architecture
        for architecture in architectures()
        if architecture.type.in_torch and architecture.family.traits.kind == kind
    }


def random_types(kind: Kind) -> dict[str, Architecture]:
    """Those of `torch_types` of which random models are made."""
    return {name: a for name, a in torch_types(kind).items() if a.type.architecture}
