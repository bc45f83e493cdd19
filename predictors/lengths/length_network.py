"""The network: a base model with LoRA adapters, mean pooling, and a small head.

Source: UELLM, §3.3.1 (LoRA on a language model, classes of length); the name of the model that
will answer and the prompt's size are inputs too, for they decide more than any wording does.

A head reads lengths from what the last layer says, and how wrong they were, in one of three ways.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError
from .distribution import PredictedDistributions, log_edges
from .length_samples import Prompt
from .predictor_config import DEFAULT_BASE, Base, NetworkShape, packaged
from .tfidf import SIZES, Encoded, TfIdfClassifier

_LEAST = 1e-7
_LEVELS = np.arange(0.05, 0.951, 0.05)  # of the quantile head
_DOUBT = 0.3  # in log(1 + tokens): so much longer or shorter an answer might have been
_USUAL = 4.0  # log(1 + tokens) of an answer of average length: where quantiles begin


class Head(ABC):
    """Reads the network's raw outputs, shape (n, outputs)."""

    def __init__(self, edges: tuple[int, ...], outputs: int) -> None:
        self._edges = edges
        self.outputs = outputs

    @abstractmethod
    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """Mean loss for true lengths in tokens, shape (n,)."""

    def _probabilities(self, raw: Tensor) -> Tensor:
        """The probability of each bucket, shape (n, buckets)."""
        raise NotImplementedError

    def mean_log(self, raw: Tensor) -> Tensor:
        """Mean of log(1 + tokens), shape (n,)."""
        bounds = torch.tensor(log_edges(self._edges), dtype=torch.float32)
        return self._probabilities(raw) @ ((bounds[1:] + bounds[:-1]) / 2).to(raw.device)

    def lengths(self, raw: Tensor) -> PredictedDistributions:
        """Predicted distributions of the length."""
        return PredictedDistributions.of_buckets(self._edges, _numpy(self._probabilities(raw)))


def _shares(below: Tensor) -> Tensor:
    """The share of each bucket from the shares below the inner edges, shape (n, edges)."""
    none, every = torch.zeros_like(below[:, :1]), torch.ones_like(below[:, :1])
    return torch.cat([none, below, every], 1).diff(dim=1)


class Softmax(Head):
    """A probability for each bucket; cross-entropy with labels that know their neighbours.

    An answer's label is a normal distribution of log(1 + tokens) about its length, so one near an
    edge is half its neighbour's (Imani and White 2018).
    """

    def __init__(self, edges: tuple[int, ...]) -> None:
        super().__init__(edges, len(edges))
        self._inner = torch.tensor(log_edges(edges)[1:-1], dtype=torch.float32)

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        length = tokens.log1p()[:, None]
        below = torch.special.ndtr((self._inner.to(length.device) - length) / _DOUBT)
        return functional.cross_entropy(raw, _shares(below))

    def _probabilities(self, raw: Tensor) -> Tensor:
        return raw.softmax(1)


class Ordinal(Head):
    """One score against rising thresholds: a cumulative link with a spread of its own.

    Outputs are score, log spread, the first threshold and the steps to the others, so thresholds
    differ between requests but always rise.
    """

    def __init__(self, edges: tuple[int, ...]) -> None:
        super().__init__(edges, len(edges) + 1)
        self._inner = torch.tensor(edges[1:], dtype=torch.float32)

    def _probabilities(self, raw: Tensor) -> Tensor:
        score, spread = raw[:, :1], raw[:, 1:2].clamp(-2, 2).exp()
        steps = functional.softplus(raw[:, 3:] + 0.5)
        thresholds = raw[:, 2:3] - 3 + torch.cat([torch.zeros_like(score), steps.cumsum(1)], 1)
        below = torch.sigmoid((thresholds - score) * spread)
        return _shares(below).clamp_min(_LEAST)

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        true = torch.bucketize(tokens, self._inner.to(tokens.device), right=True)
        return functional.nll_loss(self._probabilities(raw).log(), true)


class Quantile(Head):
    """Nineteen quantiles of log(1 + tokens), 5 % to 95 %; pinball loss."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        super().__init__(edges, len(_LEVELS))
        self._levels = torch.tensor(_LEVELS, dtype=torch.float32)

    def _quantiles(self, raw: Tensor) -> Tensor:
        steps = functional.softplus(raw[:, 1:] - 2).cumsum(1)
        first = raw[:, :1] + _USUAL - 1
        return torch.cat([first, first + steps], 1)

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        off = tokens.log1p()[:, None] - self._quantiles(raw)
        level = self._levels.to(off.device)
        return torch.maximum(level * off, (level - 1) * off).sum(1).mean()

    def mean_log(self, raw: Tensor) -> Tensor:
        return self._quantiles(raw).mean(1)

    def lengths(self, raw: Tensor) -> PredictedDistributions:
        """Predicted distributions; beyond the outermost quantiles they continue with the nearest
        slope.
        """
        q = _numpy(self._quantiles(raw))
        low = 2 * q[:, :1] - q[:, 2:3]
        high = 2 * q[:, -1:] - q[:, -3:-2]
        x = np.maximum(np.hstack([low, q, high]), 0)
        top = np.full((len(x), 1), max(float(log_edges(self._edges)[-1]), float(x.max()) + 1e-6))
        x = np.maximum.accumulate(np.hstack([x, np.maximum(top, x[:, -1:])]), axis=1)
        below = np.concatenate([[0.0], _LEVELS, [1.0 - 1e-6, 1.0]])
        return PredictedDistributions(self._edges, x, np.broadcast_to(below, x.shape))


def waiting_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    """How much longer requests wait, in order of `scores`, than shortest first; shapes (n,).

    Of two requests that wait, the second waits for the first: in the wrong order by as much longer
    as their lengths differ. The logistic loss of each pair's order, weighted by the difference of
    their lengths in tokens; 0 where all lengths are equal.
    """
    longer = tokens[:, None] - tokens[None, :]
    weights = longer.clamp_min(0)
    wrong = functional.softplus((scores[None, :] - scores[:, None]) / _DOUBT)
    return (weights * wrong).sum() / weights.sum().clamp_min(1)


HEADS: dict[str, Callable[[tuple[int, ...]], Head]] = {
    "softmax": Softmax,
    "ordinal": Ordinal,
    "quantile": Quantile,
}


def _numpy(values: Tensor) -> Floats:
    array: Floats = values.detach().double().cpu().numpy()
    return array


UNKNOWN_MODEL = "unknown"  # name of an unknown model
_HIDDEN = 128
_DROPOUT = 0.1


@dataclass(frozen=True)
class LoadedBase:
    """A base model and its tokenizer, as they were found."""

    model: Any
    tokenizer: Any
    base: Base


def load_base(
    name: str, *, device: str = "cpu", bf16: bool = False, learns: bool = False, fetch: bool = False
) -> LoadedBase:
    """A base model: of a local folder, the package of the extra "encoder", or the hub.

    `learns`: it will be trained, so its attention is the one with the quicker backward pass.
    `fetch`: the user named it, so that a model of the hub that is not cached is fetched; the hub is
    not contacted for a name in a predictor's folder.

    Raises:
        SloBenchError: there is none, or it is no model of text that this can load.
    """
    import huggingface_hub
    import transformers

    local = packaged(name) or Path(name).expanduser()
    looks_local = local.is_absolute() or name.startswith(".") or local.exists()
    if looks_local and not (local / "config.json").is_file():
        raise SloBenchError(f"there is no model in {name}: it has no config.json")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        where = str(local) if looks_local else name
        if not looks_local and not fetch:
            where = huggingface_hub.snapshot_download(name, local_files_only=True)
        # A model's own code is never run, and nobody is asked to.
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model = transformers.AutoModel.from_pretrained(
            where,
            trust_remote_code=False,
            use_safetensors=True,  # never pickle
            dtype=torch.bfloat16 if bf16 else torch.float32,
            # SDPA's backward pass takes nearly half of a step on a CPU.
            attn_implementation="eager" if learns and device == "cpu" else "sdpa",
        )
    except Exception as error:  # what the three libraries raise has nothing else in common
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        way = "" if fetch or looks_local else f"; `hf download {name}` fetches it"
        raise SloBenchError(
            f"cannot load the base model {name!r}: {first}; give --base a folder with config.json, "
            f"weights and tokenizer, or a name on the hub{way}"
        ) from error
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # we take the mean of all tokens
    found_at = str(local.absolute()) if looks_local and name != DEFAULT_BASE else name
    base = Base(found_at, weights_sha256(model), _tokenizer_sha256(tokenizer))
    return LoadedBase(model.to(device), tokenizer, base)


def weights_sha256(model: nn.Module) -> str:
    """Hash of the names, shapes, and the first and last thousand values of each weight, in
    bfloat16.

    It identifies a model of many gigabytes in a moment, in any precision.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        if not weight.is_floating_point():
            continue
        flat = weight.detach().reshape(-1)
        ends = torch.cat([flat[:1000], flat[-1000:]]).to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(ends.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _tokenizer_sha256(tokenizer: Any) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


class LengthNetwork(nn.Module):
    """Base, adapters and head; gives the head's raw outputs for a batch."""

    def __init__(self, base: nn.Module, shape: NetworkShape) -> None:
        from peft import LoraConfig, TaskType, get_peft_model

        super().__init__()
        self.shape = shape
        self.head: Head = HEADS[shape.head](shape.edges)
        self.words: TfIdfClassifier | None = None  # what its distribution is blended with
        config: Any = base.config
        lora = LoraConfig(
            task_type=TaskType.FEATURE_EXTRACTION,
            r=shape.lora_r,
            lora_alpha=2 * shape.lora_r,
            lora_dropout=0.0,
            bias="none",
            target_modules="all-linear",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
            self.encoder: Any = get_peft_model(base, lora)
        _share_dropout(self.encoder)
        inputs = int(config.hidden_size) + SIZES + len(shape.models)
        self.top = nn.Sequential(
            nn.Linear(inputs, _HIDDEN),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(_HIDDEN, self.head.outputs),
        ).to(next(base.parameters()).device)

    def forward(
        self, ids: Tensor, mask: Tensor | None, types: Tensor | None, about: Tensor, place: Tensor
    ) -> Tensor:
        """Raw outputs, shape (batch, head.outputs), in float32; nothing is padded, so there is no
        mask.

        `ids` are of different texts; `place` (batch,) is the text of each request.
        """
        more = {} if types is None else {"token_type_ids": types}
        hidden = self.encoder(input_ids=ids, attention_mask=mask, **more).last_hidden_state
        if mask is None:
            mean = hidden.mean(1)
        else:
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * weight).sum(1) / weight.sum(1)
        mean = nn.functional.normalize(mean.float(), dim=1) * 4
        with torch.autocast(ids.device.type, enabled=False):
            outputs: Tensor = self.top(torch.cat([mean[place], about], dim=1))
        return outputs

    def trained(self) -> dict[str, Tensor]:
        """The weights that training changes, by name."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

    def merge(self) -> None:
        """Put the adapters into the base: quicker, and not to be trained on."""
        self.encoder = self.encoder.merge_and_unload(safe_merge=True)


class PackedLinear(nn.Module):
    """A linear layer in bfloat16 on a CPU with its weight in the layout of the kernel. A plain
    layer converts the layout at every call, which takes a third of a short prompt's time.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, as `nn.Linear` does."""
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return outputs


def _replace(encoder: nn.Module, kind: type, replacement: Callable[[Any], nn.Module]) -> None:
    """Put a replacement in the place of each module of that type."""
    for module in list(encoder.modules()):
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, replacement(child))


def pack_linears(encoder: nn.Module) -> None:
    """Put packed layers in place of all linear ones, where this torch has the kernel."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return
    _replace(encoder, nn.Linear, PackedLinear)


class SharedDropout(nn.Module):
    """Dropout of the same features in all tokens of a prompt, which costs next to nothing.

    Drawing a number for every token and feature takes a third of a step on a CPU.
    """

    p = 0.0  # what attention asks its dropout for: none

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply dropout to `hidden`, shape (batch, tokens, features)."""
        if not self.training or hidden.dim() != 3:
            return hidden
        mask = torch.empty_like(hidden[:, :1]).bernoulli_(1 - _DROPOUT)
        return hidden * (mask / (1 - _DROPOUT))


def _share_dropout(encoder: nn.Module) -> None:
    """Put it where the base has dropout; attention has none."""
    _replace(encoder, nn.Dropout, lambda plain: SharedDropout() if plain.p else nn.Identity())
    for module in encoder.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def encode(tokenizer: Any, shape: NetworkShape, prompts: Sequence[Prompt]) -> Encoded:
    """The prompt's first tokens; its size and the model that will answer as numbers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # No token has this many characters; tokenizing a whole book would take long.
    beginnings = [prompt.text[: 32 * shape.max_tokens] for prompt in prompts]
    texts = {text: index for index, text in enumerate(dict.fromkeys(beginnings))}
    encoding = tokenizer(list(texts), truncation=True, max_length=shape.max_tokens)
    which = np.array([texts[text] for text in beginnings], dtype=np.int64)
    about = np.zeros((len(prompts), SIZES + len(shape.models)), dtype=np.float32)
    place = {name: column for column, name in enumerate(shape.models)}
    for row, prompt in enumerate(prompts):
        about[row, 0] = math.log1p(prompt.tokens) - 3
        about[row, 1] = (math.log1p(len(prompt.text)) - 4.5) / 2
        about[row, 2] = math.log1p(prompt.text.count("\n")) / 2
        if prompt.model in place:
            about[row, SIZES + place[prompt.model]] = 1
    return Encoded(encoding["input_ids"], encoding.get("token_type_ids"), which, about)


def bf16_runs(device: str) -> bool:
    """Whether bfloat16 is quicker here than float32."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bool(has())


def checked_device(device: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there.

    Raises:
        SloBenchError: it is not.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not device.startswith("cuda"):
        raise SloBenchError(f"--device must be auto, cpu or cuda but is {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SloBenchError(f"--device {device}: torch sees no CUDA device here; use cpu")
    return device
