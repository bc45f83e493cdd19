"""A trained predictor, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...workloads.arrays import Floats
from ...workloads.errors import FileFormatError, SloBenchError
from .distribution import PredictedDistributions
from .length_network import (
    LengthNetwork,
    LoadedBase,
    bf16_runs,
    checked_device,
    encode,
    load_base,
    pack_linears,
)
from .length_samples import Prompt
from .predictor_config import PredictorConfig, find_base
from .tfidf import PREFIX, SIZES, Encoded, TfIdfClassifier

_BATCH = 8  # prompts of like length; larger ones only pad more


class TrainedPredictor:
    """Predicts distributions of answers' lengths from prompts alone."""

    def __init__(self, config: PredictorConfig, network: LengthNetwork, loaded: LoadedBase) -> None:
        self.config = config
        self._network = network
        self._tokenizer = loaded.tokenizer
        self.device = str(next(network.top.parameters()).device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        base: str | None = None,
        device: str = "cpu",
        config: PredictorConfig | None = None,
    ) -> TrainedPredictor:
        """Read a predictor; `base` says where its base model lies if it was moved.

        Raises:
            SloBenchError: there is none, or the base is another than it was trained on.
        """
        config = config or PredictorConfig.load(folder)
        device = checked_device(device)
        loaded = load_base(find_base(base, folder, config), device=device)
        check_base(loaded, config, folder)
        network = LengthNetwork(loaded.model, config.shape)
        put_weights(network, folder / config.weights_file)
        network.merge()
        network.eval().requires_grad_(False)
        if bf16_runs(device):
            network.encoder.to(torch.bfloat16)
            if device == "cpu":
                pack_linears(network.encoder)
        return cls(config, network, loaded)

    def encode(self, prompts: Sequence[Prompt]) -> Encoded:
        """Token ids and numbers of prompts."""
        return encode(self._tokenizer, self.config.shape, prompts)

    def lengths(self, prompts: Sequence[Prompt]) -> PredictedDistributions:
        """Distributions of the lengths of their answers, in order."""
        raw = lengths_of(self._network, self.encode(prompts), self.config.words_share)
        return raw.recalibrated(self.config.recalibration)

    def parts(self, prompts: Sequence[Prompt]) -> tuple[PredictedDistributions, Floats]:
        """What the network says alone, and the bucket probabilities of the words alone."""
        encoded = self.encode(prompts)
        return lengths_of(self._network, encoded, 0.0), tfidf_of(self._network, encoded)


def check_base(loaded: LoadedBase, config: PredictorConfig, folder: Path) -> None:
    """Make sure that an adapter meets the weights and the tokenizer it was trained with.

    Raises:
        SloBenchError: it does not.
    """
    for part, loaded_sha256, trained_sha256 in (
        ("weights", loaded.base.weights_sha256, config.base.weights_sha256),
        ("tokenizer", loaded.base.tokenizer_sha256, config.base.tokenizer_sha256),
    ):
        if loaded_sha256 != trained_sha256:
            raise SloBenchError(
                f"{folder} was trained on {config.base.name} with {part} {trained_sha256[:12]}…, "
                f"but {loaded.base.name} has {loaded_sha256[:12]}…; give --base the model it was "
                "trained on"
            )


def put_weights(network: LengthNetwork, path: Path) -> None:
    """Fill the trained weights from a file.

    Raises:
        FileFormatError: it does not hold exactly those.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FileFormatError(path, None, f"the weights cannot be read: {error}") from error
    words = {name: tensors.pop(name).numpy() for name in list(tensors) if name.startswith(PREFIX)}
    parameters = network.trained()
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in parameters.items()}:
        raise FileFormatError(path, None, "the weights are of another network than predictor.json")
    shape = network.shape
    numbers = SIZES + len(shape.models)
    try:
        network.words = TfIdfClassifier.of_tensors(words, numbers=numbers, buckets=len(shape.edges))
    except ValueError as error:
        raise FileFormatError(path, None, str(error)) from error
    if not all(bool(torch.isfinite(weight).all()) for weight in tensors.values()):
        raise FileFormatError(path, None, "a weight is no number")
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(tensors[name])


def raw_outputs(
    network: LengthNetwork, encoded: Encoded, *, autocast: bool = False
) -> torch.Tensor:
    """Raw outputs in order, shape (n, outputs), on the CPU; texts of like length together."""
    if network.training:
        network.eval()
    device = str(next(network.top.parameters()).device)
    lengths = np.array([len(ids) for ids in encoded.ids])[encoded.place]
    order = np.lexsort((encoded.place, lengths))
    outputs = torch.zeros(len(encoded), network.head.outputs)
    kind = device.partition(":")[0]
    for begin in range(0, len(order), _BATCH):
        rows = order[begin : begin + _BATCH]
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=autocast):
            raw = network(*encoded.batch(rows, device))
        outputs[torch.from_numpy(rows)] = raw.float().cpu()
    return outputs


def lengths_of(
    network: LengthNetwork, encoded: Encoded, words_share: float, *, autocast: bool = False
) -> PredictedDistributions:
    """Distributions, in order; the words have their share in them."""
    lengths = network.head.lengths(raw_outputs(network, encoded, autocast=autocast))
    return lengths.blended(tfidf_of(network, encoded), words_share) if words_share else lengths


def tfidf_of(network: LengthNetwork, encoded: Encoded) -> Floats:
    """Bucket probabilities of the words alone, shape (n, buckets)."""
    assert network.words is not None  # a predictor was read
    return network.words.probabilities(encoded)
