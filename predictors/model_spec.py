"""A transformer by its shape: parameters, weight bytes and KV bytes follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import AUTO, SIXTEEN_BIT_BYTES, kv_dtype, weight_dtype
from .families import FAMILIES, Kind, Traits
from .model_parts import (
    Experts,
    LatentAttention,
    LinearAttention,
    SlidingWindow,
    SparseAttention,
)

SET_ASIDE_TOKENS = 256  # windows up to this have room of their own


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a transformer. All counts are for the whole model, not for one GPU.

    With `latent` attention `kv_heads` is 1 and `head_dim` the width of the latent vector.
    `intermediate` is the width of a plain MLP, and that of the layers without `experts`.
    Of the layers `mixers_alone` have no MLP and `mlps_alone` neither attention nor a recurrence
    (Nemotron-H, whose layers are one or the other). `checkpoint_dtype` and `checkpoint_kv_dtype`
    are the formats of weights and KV with which the model is published. The image encoder takes
    memory alone: requests with images are not simulated. `own_traits` stand in place of the
    family's, where the model is of none and its parts were read.
    """

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
    experts: Experts | None = None
    latent: LatentAttention | None = None
    sparse: SparseAttention | None = None  # beside `latent`
    window: SlidingWindow | None = None
    linear: LinearAttention | None = None
    image_encoder_parameters: int = 0
    checkpoint_dtype: str = "bf16"
    checkpoint_kv_dtype: str = "bf16"
    checkpoint_beside_dtype: str = ""
    mixers_alone: int = 0
    mlps_alone: int = 0
    own_traits: Traits | None = None

    def dtype_of(self, weights: str) -> str:
        """The weight format called `weights`; `auto`: that of the checkpoint."""
        return self.checkpoint_dtype if weights == AUTO else weights

    def kv_dtype_of(self, kv: str) -> str:
        """The KV format called `kv`; `auto`: that of the checkpoint."""
        return self.checkpoint_kv_dtype if kv == AUTO else kv

    @property
    def is_plain(self) -> bool:
        """A dense model all of whose layers attend to all tokens."""
        parts = (self.experts, self.latent, self.window, self.linear)
        return all(part is None for part in parts)

    @property
    def traits(self) -> Traits:
        """What the family says about the shape, or the file itself."""
        return self.own_traits or FAMILIES[self.family].traits

    @property
    def kind(self) -> Kind:
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
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.mlp_layers - self.experts.dense_layers if self.experts else 0

    @property
    def mlp_layers(self) -> int:
        """Layers with an MLP, plain or of experts."""
        return self.layers - self.mixers_alone

    @property
    def full_kv_layers(self) -> int:
        """Layers whose KV is counted for every token: those that keep it, and those whose windows
        are not set aside, an upper bound.
        """
        return self.attention_layers - self._set_aside_layers

    @property
    def _set_aside_layers(self) -> int:
        """Layers for whose windows room is set aside: of short windows beside full attention.

        The room for many long windows would be mostly empty.
        """
        window = self.window
        if window is None or window.tokens > SET_ASIDE_TOKENS:
            return 0
        return window.layers if window.layers < self.attention_layers else 0

    @property
    def attention_layers(self) -> int:
        """Layers with attention, sliding or full; the others are linear, or MLPs alone."""
        linear = self.linear
        replaced = linear.layers if linear and not linear.beside_attention else 0
        return self.layers - replaced - self.mlps_alone

    @property
    def sparse_layers(self) -> int:
        """Layers with an indexer of sparse attention."""
        return (self.sparse.layers or self.attention_layers) if self.sparse else 0

    @property
    def routed_parameters(self) -> int:
        """Parameters in the matrices of the routed experts, all layers together."""
        if self.experts is None:
            return 0
        width = self.experts.width or self.hidden
        matrices = self.traits.mlp_matrices * width * self.experts.intermediate
        return self.expert_layers * self.experts.routed * matrices

    @property
    def matrix_parameters(self) -> int:
        """Parameters in the matrices of all layers: projections, MLPs, routers and experts."""
        if self.experts is None:
            return self._mixing_parameters + self.mlp_layers * self._mlp(self.intermediate)
        experts = self.experts
        always = self.hidden * (experts.routed + 2 * experts.width)
        always += self._mlp(experts.shared_intermediate)
        return (
            self._mixing_parameters
            + experts.dense_layers * self._mlp(self.intermediate)
            + self.expert_layers * always
            + self.routed_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, token embeddings left out."""
        if self.experts is None:
            return self.streamed_parameters
        idle = self.experts.routed - self.experts.per_token
        return self.streamed_parameters - self.routed_parameters // self.experts.routed * idle

    def _mlp(self, intermediate: int) -> int:
        return self.traits.mlp_matrices * self.hidden * intermediate

    @property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            gate = self.heads * self.latent.value_dim if self.traits.output_gate else 0
            return self.latent.parameters(self.hidden, self.heads) + self.hidden * gate
        gate = self.query_width if self.traits.output_gate else 0
        return self.hidden * (2 * (self.query_width + self.kv_width) + gate)

    @property
    def _mixing_parameters(self) -> int:
        """Parameters that mix tokens, of all layers: attention, full or linear."""
        total = self.attention_layers * self._attention_parameters
        if self.linear is not None:
            total += self.linear.layers * self.linear.parameters(self.hidden)
        if self.sparse is not None:
            rank = (self.latent.query_rank if self.latent else 0) or self.hidden
            total += self.sparse_layers * self.sparse.parameters(self.hidden, rank)
        return total

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one layer (rounded up where layers differ)."""
        return -(-self.matrix_parameters // self.layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, biases and norms included."""
        return self.layer_matrix_parameters + self._layer_vector_parameters

    @property
    def _layer_vector_parameters(self) -> int:
        traits = self.traits
        biases = 0
        if traits.biases != "none":
            biases += self.query_width + 2 * self.kv_width
        if traits.biases == "all":
            biases += 2 * self.hidden + self.intermediate
        if traits.biases == "all" and self.experts:
            biases += self.experts.routed * (2 * self.experts.intermediate + self.hidden)
        biases += self.heads if traits.sinks else 0
        norms = traits.norms_per_layer * self._norm_parameters
        if traits.qk_norm:
            over_heads = traits.qk_norm_over_heads
            norms += self.query_width + self.kv_width if over_heads else 2 * self.head_dim
        return biases + norms

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
        return self.parameters - self.lookup_parameters - self.image_encoder_parameters

    @property
    def parameters(self) -> int:
        """All parameters, shared ones counted once."""
        total = self.matrix_parameters + self.layers * self._layer_vector_parameters
        total += self.embedding_parameters
        total += self._table_rows * self.hidden
        if self.kind == "encoder":  # norm over the embeddings, and the pooler
            return total + self._norm_parameters + self.hidden * (self.hidden + 1)
        total += self._norm_parameters if self.traits.final_norm else 0
        total += self.image_encoder_parameters
        return total + (0 if self.tied_embeddings else self.embedding_parameters)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes that one more token leaves in the KV cache of all layers; 0 for an encoder.

        Keys and values, or the latent vector, and the keys of an indexer. Layers whose windows are
        set aside are left out: they hold `window_bytes` a sequence.
        """
        if self.kind == "encoder":
            return 0
        of_attention = self.full_kv_layers * self.layer_kv_elements * kv_dtype(dtype).bytes
        of_indexers = self.sparse_layers * self.sparse.key_bytes if self.sparse else 0
        return round(of_attention + of_indexers)

    @property
    def layer_kv_elements(self) -> int:
        """Elements that one token leaves in the KV cache of one layer."""
        return (1 if self.latent else 2) * self.kv_width

    def window_bytes(self, dtype: str = "bf16") -> int:
        """KV bytes that are set aside for the windows of one sequence."""
        held = self._set_aside_layers * (self.window.tokens if self.window else 0)
        return round(held * self.layer_kv_elements * kv_dtype(dtype).bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes that layers with linear attention keep of one sequence."""
        return self.linear.layers * self.linear.state_bytes if self.linear else 0

    def dense_dtype(self, dtype: str) -> str:
        """The format of all but the routed experts where those have `dtype`; of a dense model that
        of its MLPs.

        Formats below 8 bits hold for the experts alone, as in the checkpoints that are served
        (gpt-oss in MXFP4, Kimi in INT4, DeepSeek in NVFP4): attention stays at 16 bits, unless
        the checkpoint says otherwise.
        """
        if self.experts is None:
            return dtype
        return self._beside(dtype) or ("bf16" if weight_dtype(dtype).bytes < 1 else dtype)

    def mixing_dtype(self, dtype: str) -> str:
        """The format of attention and recurrences where the experts, or MLPs, have `dtype`."""
        return self._beside(dtype) or self.dense_dtype(dtype)

    def _beside(self, dtype: str) -> str:
        return self.checkpoint_beside_dtype if dtype == self.checkpoint_dtype else ""

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all weights.

        Below 16 bits only the layers' matrices shrink, as in the checkpoints that are served:
        embeddings, output head, norms and biases stay at 16 bits (see also `dense_dtype`).
        """
        return self._bytes(self.parameters, self.matrix_parameters, dtype)

    def routed_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the matrices of the routed experts."""
        return round(self.routed_parameters * weight_dtype(dtype).bytes)

    def streamed_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the weights that every pass reads (see `streamed_parameters`)."""
        return self._bytes(self.streamed_parameters, self.matrix_parameters, dtype)

    def layer_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of one layer's weights (their mean where layers differ)."""
        return self._bytes(self.layer_parameters, self.layer_matrix_parameters, dtype)

    def _bytes(self, parameters: int, matrices: int, dtype: str) -> int:
        width = weight_dtype(dtype).bytes
        if width >= SIXTEEN_BIT_BYTES:
            return round(parameters * width)
        aside, beside = 0, weight_dtype(self.mixing_dtype(dtype)).bytes
        if beside != width:  # of all but the experts, or of what mixes tokens
            aside = self._mixing_parameters
            if self.experts is not None:
                aside = self.matrix_parameters - self.routed_parameters
        low = matrices - round(matrices * (aside / self.matrix_parameters))
        rest = matrices - low
        return round((parameters - matrices) * SIXTEEN_BIT_BYTES + low * width + rest * beside)
