"""Fine-tuning with LoRA: seeded, stopped early, and resumable to the same weights.

Source: UELLM, §3.3.1. Every step draws from a seed of its own and the order of an epoch hangs on
the seed and the epoch alone, so a training that was killed goes on as if it had not been. The
state goes to one file, whole or not at all, every `checkpoint_steps` steps, every `CHECKPOINT_S`
seconds, and when the training is interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt, split_by_prompt
from ...workloads.whole_file import write_whole
from .distribution import (
    DEFAULT_EDGES,
    buckets_in,
    checked_edges,
    conformal_offset,
    neighbours_worth,
    recalibration,
    share_of,
)
from .held_signals import held_signals
from .length_network import (
    UNKNOWN_MODEL,
    LengthNetwork,
    LoadedBase,
    bf16_runs,
    checked_device,
    encode,
    load_base,
    waiting_loss,
)
from .length_samples import CALIBRATION, TEST, TRAIN, VALIDATION, Parts, pack, prompts_of, tokens_of
from .predictor import TrainedPredictor, raw_outputs
from .predictor_config import CONFIG, DEFAULT_BASE, HEADS, NetworkShape, PredictorConfig
from .tfidf import Encoded, TfIdfClassifier

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_S = 30.0  # at most, between two checkpoints; longer if a step is
_FEWEST = 20  # prompts to learn from
_WARMUP = 0.06
_TOKENS_AT_ONCE = 2048
_PAD_TO = 16  # tokens: with more lengths kernels keep more memory, and nothing is gained
_GROUPED = 20  # batches that are sorted by prompt length together
_NAMELESS = 0.05  # share of steps without the models' names
_TOP_RATE = 5.0  # times the adapters' learning rate: the head begins from nothing
_VALIDATION, _CALIBRATION = 0.05, 0.1


@dataclass(frozen=True)
class TrainSettings:
    """How to train. The defaults are what did best on two CPU cores."""

    head: str = "softmax"
    edges: tuple[int, ...] = DEFAULT_EDGES
    lora_r: int = 16
    epochs: int = 3
    batch: int = 24  # prompts of different texts in a step, each with all of its answers
    learning_rate: float = 1e-3
    waiting_weight: float = 0.0  # of `waiting_loss`, beside the head's loss
    max_tokens: int = 128
    patience: int = 2  # epochs without a better validation loss
    test_share: float = 0.05  # of the prompts, kept out for predict-eval
    seed: int = 0
    device: str = "auto"
    checkpoint_steps: int = 50

    def __post_init__(self) -> None:
        checked_edges(self.edges)
        if self.head not in HEADS:
            raise SloBenchError(f"head must be one of {', '.join(HEADS)} but is {self.head!r}")
        least = {"lora_r": 1, "epochs": 1, "batch": 1, "patience": 1, "max_tokens": 16}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise SloBenchError(f"{name} must be at least {low} but is {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise SloBenchError(
                f"learning_rate must be between 0 and 1 but is {self.learning_rate:g}"
            )
        if not 0 <= self.waiting_weight < math.inf:
            raise SloBenchError(f"waiting_weight must be at least 0 but is {self.waiting_weight:g}")
        if not 0 <= self.test_share <= 0.5:
            raise SloBenchError(f"test_share must be from 0 to 0.5 but is {self.test_share:g}")


@dataclass(frozen=True)
class Epoch:
    """Losses and time of one epoch."""

    number: int  # from 1
    train_loss: float
    validation_loss: float
    best: bool


Watch = Callable[[int, int], None]  # steps done, of how many
OnEpoch = Callable[[Epoch], None]


def train(
    rows: Sequence[LabelledPrompt],
    out: Path,
    *,
    labels: str,
    base: str = DEFAULT_BASE,
    settings: TrainSettings | None = None,
    resume: bool = False,
    progress: Watch = lambda done, total: None,
    on_epoch: OnEpoch = lambda epoch: None,
) -> PredictorConfig:
    """Train a predictor into the folder `out`.

    Args:
        rows: training data; split by prompt into parts for training, early stopping, calibration
            and test.
        out: a new or empty folder, or one where a training was interrupted.
        labels: the tokenizer of the lengths, for the report.
        base: the base model; see `network.load_base`.
        settings: settings of the training.
        resume: go on where an interrupted training of the same data and settings was.
        progress: called after every step.
        on_epoch: called with each epoch's figures.

    Raises:
        SloBenchError: the data holds nothing to learn, the folder is in use, or the base cannot be
            loaded.
    """
    settings = settings or TrainSettings()
    device = checked_device(settings.device)
    parts = _parts(rows, settings)
    models = tuple(sorted({row.model for row in parts[TRAIN]} - {"", UNKNOWN_MODEL}))
    shape = NetworkShape(
        settings.head, settings.edges, models, settings.max_tokens, settings.lora_r
    )
    _check_folder(out, resume)
    loaded = load_base(base, device=device, bf16=bf16_runs(device), learns=True, fetch=True)
    packed = pack(parts)
    # How often the state is kept and where it is computed does not change what is computed.
    settings_of_weights = {**asdict(settings), "checkpoint_steps": 0, "device": device}
    identity = [
        json.dumps(settings_of_weights),
        asdict(loaded.base),
        hashlib.sha256(packed).hexdigest(),
    ]
    same = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    training = _Training(loaded, shape, settings, parts, device)
    checkpoint = out / CHECKPOINT
    if checkpoint.exists():
        training.restore(checkpoint, same)
    else:
        training.keep(checkpoint, same)
    training.run(checkpoint, same, progress, on_epoch)
    weights = training.best
    words = tfidf_from(training.encoded, parts[TRAIN], shape)
    epochs = [asdict(epoch) for epoch in training.epochs]
    steps = training.step
    del training  # its model, before the next is read
    config = PredictorConfig(
        shape=shape,
        base=loaded.base,
        labels=labels,
        conformal_offset=0.0,
        words_share=0.0,
        neighbours=0.0,
        confusion=(),
        training={
            "settings": asdict(settings),
            "rows": {part: len(part_rows) for part, part_rows in parts.items()},
            "steps": steps,
            "epochs": epochs,
        },
    )
    del loaded
    save_weights(weights, words, out / config.weights_file)
    write_whole(out / config.samples_file, [packed])
    config = calibrated(config, out, parts[CALIBRATION], base=base, device=device)
    config.save(out)
    checkpoint.unlink()
    return config


def calibrated(
    config: PredictorConfig, folder: Path, rows: Sequence[LabelledPrompt], *, base: str, device: str
) -> PredictorConfig:
    """With the share of words, offset, worth of neighbours and confusion that suit these rows."""
    predictor = TrainedPredictor.load(folder, base=base, device=device, config=config)
    network, words = predictor.parts(prompts_of(rows))
    tokens = tokens_of(rows)
    words_share = share_of(words, network, tokens)
    lengths = network.blended(words, words_share)
    shares = recalibration(lengths, tokens)
    lengths = lengths.recalibrated(shares)
    neighbours = neighbours_worth(lengths, tokens)
    return replace(
        config,
        conformal_offset=conformal_offset(lengths, tokens),
        words_share=words_share,
        neighbours=neighbours,
        recalibration=shares,
        confusion=tuple(map(tuple, lengths.confusion(tokens, neighbours).tolist())),
    )


def tfidf_from(
    encoded: Encoded, rows: Sequence[LabelledPrompt], shape: NetworkShape
) -> TfIdfClassifier:
    """The linear model of answered prompts."""
    true = buckets_in(shape.edges, tokens_of(rows))
    return TfIdfClassifier.fit(encoded, true, len(shape.edges))


def save_weights(weights: Mapping[str, Tensor], words: TfIdfClassifier, path: Path) -> None:
    """Write the network's trained tensors and those of the words, whole or not at all."""
    from safetensors.torch import save

    linear = {name: torch.from_numpy(value) for name, value in words.tensors().items()}
    tensors = {name: weight.contiguous() for name, weight in weights.items()} | linear
    write_whole(path, [save(tensors)])


def _check_folder(out: Path, resume: bool) -> None:
    if (out / CONFIG).exists():
        raise SloBenchError(f"{out} holds a predictor already; name another folder")
    interrupted = (out / CHECKPOINT).exists()
    if interrupted and not resume:
        raise SloBenchError(
            f"{out} holds an interrupted training; go on with it by the same command and --resume"
        )
    if resume and not interrupted:
        raise SloBenchError(f"there is no interrupted training in {out} to resume")
    if out.exists() and not interrupted and any(out.iterdir()):
        raise SloBenchError(f"{out} is not empty; name a new folder")


def _parts(rows: Sequence[LabelledPrompt], settings: TrainSettings) -> Parts:
    rest = 1 - settings.test_share - _VALIDATION - _CALIBRATION
    kept_back = {VALIDATION: _VALIDATION, CALIBRATION: _CALIBRATION, TEST: settings.test_share}
    parts = split_by_prompt(rows, {TRAIN: rest, **kept_back}, settings.seed)
    prompts = len({row.prompt for row in parts[TRAIN]})
    if prompts < _FEWEST or not parts[VALIDATION] or not parts[CALIBRATION]:
        raise SloBenchError(
            f"{len({row.prompt for row in rows})} different prompts are too few: {prompts} would "
            f"be left to learn from, {len(parts[VALIDATION])} to stop early and "
            f"{len(parts[CALIBRATION])} to calibrate; give some hundreds"
        )
    tokens = tokens_of(parts[TRAIN])
    buckets = np.unique(buckets_in(settings.edges, tokens))
    if len(buckets) < 2:
        begin = settings.edges[int(buckets[0])]
        raise SloBenchError(
            f"all {len(tokens)} answers fall into the one bucket that begins at {begin} tokens: "
            "there is nothing to tell apart; give other data, or finer --buckets"
        )
    return parts


def tokens_tensor(rows: Sequence[LabelledPrompt]) -> Tensor:
    """Lengths of the answers of these rows, as losses take them."""
    return torch.tensor([float(row.output_tokens) for row in rows])


class _Training:
    """One training and all of its state."""

    def __init__(
        self,
        loaded: LoadedBase,
        shape: NetworkShape,
        settings: TrainSettings,
        parts: Parts,
        device: str,
    ) -> None:
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._device = device
        self._bf16 = bf16_runs(device)
        self._network = LengthNetwork(loaded.model, shape)
        self._weights = self._network.trained()
        rows, held = parts[TRAIN], parts[VALIDATION]
        self.encoded = encode(loaded.tokenizer, shape, prompts_of(rows))
        self._nameless = self.encoded.nameless()
        by_text = np.argsort(self.encoded.place, kind="stable")
        ends = np.cumsum(np.bincount(self.encoded.place))
        self._rows_of = np.split(by_text, ends[:-1])
        self._tokens = tokens_tensor(rows)
        self._held = encode(loaded.tokenizer, shape, prompts_of(held))
        self._held_tokens = tokens_tensor(held)
        self._per_epoch = -(-len(self._rows_of) // settings.batch)
        self._total = self._per_epoch * settings.epochs
        self._learner = Learner(
            self._network, settings.learning_rate, settings.waiting_weight, bf16=self._bf16
        )
        self.step = 0
        self._whole = True  # not in the midst of a step
        self.epochs: list[Epoch] = []
        self.best: dict[str, Tensor] = self._copy()
        self._loss_sum = 0.0

    def run(self, checkpoint: Path, same: str, progress: Watch, on_epoch: OnEpoch) -> None:
        """Train to the end, keeping the state now and then."""
        keep = partial(self.keep, checkpoint, same)
        kept_s = time.monotonic()
        kept_step = self.step
        try:
            progress(self.step, self._total)
            order: list[np.ndarray] = []
            while self.step < self._total and not self._stalled():
                epoch, place = divmod(self.step, self._per_epoch)
                if place == 0 or not order:
                    order = self._order(epoch)
                with held_signals(keep):
                    self._whole = False
                    self._learn(order[place])
                    ended = self.step % self._per_epoch == 0
                    if ended:
                        self._end_epoch()
                    self._whole = True
                if ended:
                    on_epoch(self.epochs[-1])
                late = time.monotonic() - kept_s >= CHECKPOINT_S
                if ended or late or self.step % self._settings.checkpoint_steps == 0:
                    keep()
                    kept_s, kept_step = time.monotonic(), self.step
                progress(self.step, self._total)
        except KeyboardInterrupt:
            if self._whole and self.step > kept_step:
                keep()
            raise

    def _learn(self, rows: np.ndarray) -> None:
        """Take one step on these rows."""
        rng = np.random.default_rng((self._settings.seed, 1, self.step))
        torch.manual_seed(int(rng.integers(2**31)))
        nameless = rng.random() < _NAMELESS
        encoded = self._nameless if nameless else self.encoded
        tokens = self._tokens[torch.from_numpy(rows)]
        self._loss_sum += self._learner.learn(encoded, rows, tokens, self.step / self._total)
        self.step += 1

    def _end_epoch(self) -> None:
        raw = raw_outputs(self._network, self._held, autocast=self._bf16)
        loss = float(self._learner.loss(raw, self._held_tokens))
        best = all(loss < epoch.validation_loss for epoch in self.epochs)
        epoch = Epoch(len(self.epochs) + 1, self._loss_sum / self._per_epoch, loss, best)
        self.epochs.append(epoch)
        self._loss_sum = 0.0
        if best:
            self.best = self._copy()

    def _stalled(self) -> bool:
        last = self.epochs[-self._settings.patience :]
        at_end = self.step % self._per_epoch == 0
        return at_end and len(last) == self._settings.patience and not any(e.best for e in last)

    def _order(self, epoch: int) -> list[np.ndarray]:
        """Batches of an epoch: texts of like length together, in random order."""
        rng = np.random.default_rng((self._settings.seed, 0, epoch))
        lengths = np.array([len(ids) for ids in self.encoded.ids])
        mixed = rng.permutation(len(lengths))
        batch = self._settings.batch
        batches: list[np.ndarray] = []
        for begin in range(0, len(mixed), batch * _GROUPED):
            group = mixed[begin : begin + batch * _GROUPED]
            group = group[np.argsort(lengths[group], kind="stable")]
            pieces = [group[offset : offset + batch] for offset in range(0, len(group), batch)]
            batches += [np.concatenate([self._rows_of[t] for t in piece]) for piece in pieces]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self._weights.items()}

    def keep(self, path: Path, same: str) -> None:
        """Everything that going on needs, in one file."""
        from safetensors.torch import save

        tensors = {f"now/{name}": weight for name, weight in self._copy().items()}
        tensors |= {f"best/{name}": weight for name, weight in self.best.items()}
        for name, weight in self._weights.items():
            moments = self._learner.optimizer.state.get(weight, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in moments:
                    tensors[f"{moment}/{name}"] = moments[moment].detach().cpu().contiguous()
        state = {
            "step": self.step,
            "loss_sum": self._loss_sum,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "same": same,
        }
        write_whole(path, [save(tensors, metadata={"state": json.dumps(state)})])

    def restore(self, path: Path, same: str) -> None:
        """The state that `keep` kept.

        Raises:
            SloBenchError: it is of other data, settings or base.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                state: dict[str, Any] = json.loads(file.metadata()["state"])
                if state["same"] != same:
                    raise SloBenchError(
                        f"{path.parent} holds a training of other data, settings or base model; "
                        "resume with what it was begun with, or name another folder"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FileFormatError(path, None, f"damaged: {error}") from error
        self.step = state["step"]
        self._loss_sum = state["loss_sum"]
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(tensors[f"now/{name}"])
                self.best[name] = tensors[f"best/{name}"]
                if f"exp_avg/{name}" in tensors:
                    self._learner.optimizer.state[weight] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": tensors[f"exp_avg/{name}"].to(weight.device),
                        "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(weight.device),
                    }


class Learner:
    """Trains a network by AdamW; only the head decays, and it learns faster.

    `waiting_weight` is that of `waiting_loss`, beside the head's loss.
    """

    def __init__(
        self, network: LengthNetwork, learning_rate: float, waiting_weight: float, *, bf16: bool
    ) -> None:
        self._network, self._bf16 = network, bf16
        self._rate, self._waiting_weight = learning_rate, waiting_weight
        weights = network.trained()
        lora = [w for name, w in weights.items() if "lora_" in name]
        top = [w for name, w in weights.items() if "lora_" not in name]
        groups = [
            {"params": lora, "weight_decay": 0.0, "times": 1.0},
            {"params": top, "weight_decay": 0.01, "times": _TOP_RATE},
        ]
        self.optimizer = torch.optim.AdamW(groups)

    def learn(self, encoded: Encoded, rows: np.ndarray, tokens: Tensor, done: float) -> float:
        """One step on one batch, after a share `done` of them; returns its loss before the step."""
        network = self._network
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * schedule(done) * group["times"]
        if not network.training:
            network.train()
        device = str(next(network.top.parameters()).device)
        self.optimizer.zero_grad(set_to_none=True)
        whole = 0.0
        for piece in _pieces(encoded, rows):
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=self._bf16):
                raw = network(*encoded.batch(rows[piece], device, pad_to=_PAD_TO))
            true = tokens[torch.from_numpy(piece)].to(device)
            loss = self.loss(raw.float(), true) * (len(raw) / len(rows))
            loss.backward()
            whole += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(network.trained().values(), 1.0)
        self.optimizer.step()
        return whole

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """The head's loss, and that of the order of lengths with its weight."""
        head = self._network.head
        loss = head.loss(raw, tokens)
        if self._waiting_weight:
            loss = loss + self._waiting_weight * waiting_loss(head.mean_log(raw), tokens)
        return loss


def _pieces(encoded: Encoded, rows: np.ndarray) -> list[np.ndarray]:
    """A batch in pieces of few tokens: their gradients add up, and memory stays small."""
    place = encoded.place[rows]
    texts = np.unique(place)
    each = max(1, _TOKENS_AT_ONCE // max(len(encoded.ids[text]) for text in texts))
    pieces = [texts[begin : begin + each] for begin in range(0, len(texts), each)]
    return [np.flatnonzero(np.isin(place, piece)) for piece in pieces]


def schedule(done: float) -> float:
    """Share of the learning rate: a short rise, then half a cosine down to nothing."""
    return min(1.0, (done + 1e-3) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
