"""A dense transformer by its shape: parameters, weight bytes and KV bytes follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .dtypes import SIXTEEN_BIT_BYTES, kv_dtype, weight_dtype


@dataclass(frozen=True, slots=True)
class Family:
    """What models of one family have in common and their sizes do not say."""

    gated_mlp: bool = True  # three matrices (SwiGLU) instead of two
    biases: Literal["none", "qkv", "all"] = "none"
    norm_bias: bool = False  # LayerNorm (scale and shift) instead of RMSNorm
    norms_per_layer: int = 2
    qk_norm: bool = False
    final_norm: bool = True
    position_offset: int | None = None  # learned positions: rows beyond the context; None: rotary
    token_types: int = 0
    kind: Literal["decoder", "encoder"] = "decoder"


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen": Family(biases="qkv"),
    "qwen2": Family(biases="qkv"),
    "qwen3": Family(qk_norm=True),
    "opt": Family(gated_mlp=False, biases="all", norm_bias=True, position_offset=2),
    "chatglm": Family(gated_mlp=False, biases="all", norm_bias=True),
    "chatglm2": Family(biases="qkv"),  # ChatGLM2, ChatGLM3, GLM-4-9B in their own code's config
    "glm": Family(biases="qkv"),
    "glm4": Family(biases="qkv", norms_per_layer=4),
    "bert": Family(
        gated_mlp=False,
        biases="all",
        norm_bias=True,
        final_norm=False,
        position_offset=0,
        token_types=2,
        kind="encoder",
    ),
    "xlm-roberta": Family(
        gated_mlp=False,
        biases="all",
        norm_bias=True,
        final_norm=False,
        position_offset=2,
        token_types=1,
        kind="encoder",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a dense transformer. All counts are for the whole model, not for one GPU."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    tied_embeddings: bool = False
    origin: str = ""

    @property
    def traits(self) -> Family:
        """What the family says about the shape."""
        return FAMILIES[self.family]

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        """A decoder generates; an encoder embeds and has no KV cache."""
        return self.traits.kind

    @property
    def query_width(self) -> int:
        """Columns of the query projection, all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection, all KV heads together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one layer: attention projections and MLP."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        mlp = (3 if self.traits.gated_mlp else 2) * self.hidden * self.intermediate
        return attention + mlp

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, biases and norms included."""
        traits = self.traits
        biases = 0
        if traits.biases != "none":
            biases += self.query_width + 2 * self.kv_width
        if traits.biases == "all":
            biases += 2 * self.hidden + self.intermediate
        norms = traits.norms_per_layer * self._norm_parameters
        if traits.qk_norm:
            norms += 2 * self.head_dim
        return self.layer_matrix_parameters + biases + norms

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.traits.norm_bias else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one vocabulary-sized matrix."""
        return self.vocab * self.hidden

    @property
    def lookup_parameters(self) -> int:
        """Parameters that are only looked up: token (where not tied), position, type tables."""
        tokens = 0 if self.tied_embeddings and self.kind == "decoder" else self.embedding_parameters
        return tokens + self._table_rows * self.hidden

    @property
    def _table_rows(self) -> int:
        traits = self.traits
        if traits.position_offset is None:
            return traits.token_types
        return traits.token_types + traits.position_offset + self.context_tokens

    @property
    def streamed_parameters(self) -> int:
        """Parameters that every pass reads and multiplies: the layers and the output head."""
        return self.parameters - self.lookup_parameters

    @property
    def parameters(self) -> int:
        """All parameters, shared ones counted once."""
        total = self.layers * self.layer_parameters + self.embedding_parameters
        total += self._table_rows * self.hidden
        if self.kind == "encoder":  # norm over the embeddings, and the pooler
            return total + self._norm_parameters + self.hidden * (self.hidden + 1)
        total += self._norm_parameters if self.traits.final_norm else 0
        return total + (0 if self.tied_embeddings else self.embedding_parameters)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes of keys and values that one token leaves in all layers; 0 for an encoder."""
        if self.kind == "encoder":
            return 0
        return round(2 * self.layers * self.kv_width * kv_dtype(dtype).bytes)

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all weights.

        Below 16 bits only the layers' matrices shrink, as in the checkpoints that are served:
        embeddings, output head, norms and biases stay at 16 bits.
        """
        return self._bytes(self.parameters, self.layers, dtype)

    def streamed_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the weights that every pass reads (see `streamed_parameters`)."""
        return self._bytes(self.streamed_parameters, self.layers, dtype)

    def layer_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of one layer's weights."""
        return self._bytes(self.layer_parameters, 1, dtype)

    def _bytes(self, parameters: int, layers: int, dtype: str) -> int:
        width = weight_dtype(dtype).bytes
        if width >= SIXTEEN_BIT_BYTES:
            return round(parameters * width)
        matrices = layers * self.layer_matrix_parameters
        return round((parameters - matrices) * SIXTEEN_BIT_BYTES + matrices * width)
