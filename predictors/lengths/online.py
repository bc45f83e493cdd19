"""A predictor at work: corrected at once by what comes, taught now and then, never made worse.

Source: UELLM, §3.3.3 (mispredicted requests go to a queue for incremental fine-tuning). Taught are
all recent answers with as many of the old ones: mispredictions alone make it forget and swing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...workloads.arrays import Floats
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt, split_by_prompt
from ...workloads.parsing import parse_json
from ...workloads.whole_file import write_whole
from .distribution import PredictedDistributions, buckets_in
from .length_network import LengthNetwork, bf16_runs, checked_device, encode, load_base
from .length_samples import (
    CALIBRATION,
    TRAIN,
    VALIDATION,
    labelled_prompts_of,
    pack,
    prompts_of,
    read_samples,
    seen_in,
    tokens_of,
    without_answer,
)
from .predictor import check_base, lengths_of, put_weights, raw_outputs
from .predictor_config import PredictorConfig, find_base
from .train import Learner, calibrated, save_weights, tfidf_from, tokens_tensor

QUEUE = "queue.jsonl"
FEWEST = 30  # new answers that are worth an update
EPOCHS = 3  # passes over what is new
_BATCH = 16  # of new answers in a step, with as many old ones
_GENTLY = 0.3  # share of the learning rate that it was trained with
_STEPS = (1.0, 0.5, 0.25)  # shares of what was learnt that are tried, the largest first
_DOUBT = 2.0  # standard errors of the loss on old answers that prove nothing,
_TOLERATED = 0.05  # and how much of it (nats) is borne even if proven
RECENT = 300  # answers that an update teaches, new ones and those taught lately
_PRIOR = 20.0  # answers that what was predicted counts as
_FORGET = 0.995  # weight of an answer, after one more
_SHARES = {TRAIN: 0.8, VALIDATION: 0.1, CALIBRATION: 0.1}

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Update:
    """What came of teaching: losses on answers that were kept back from it.

    Of old ones as the predictor was loaded and after; of new ones before and after.
    """

    step: float  # share of what was learnt that was taken, 0 if refused
    rows: int
    old_loaded: float
    old_after: float
    new_before: float
    new_after: float

    @property
    def accepted(self) -> bool:
        """Whether a part of the update was accepted."""
        return self.step > 0

    @property
    def verdict(self) -> str:
        """The decision in a few words."""
        if not self.accepted:
            return "refused"
        return "taken" if self.step == 1 else f"{self.step:.0%} of it taken"

    def summary(self) -> str:
        """Summary of the update in one line."""
        verdict = self.verdict if self.accepted else "refused, the predictor is as it was"
        return (
            f"update with {self.rows:,} new answers {verdict}: loss on new ones "
            f"{self.new_before:.3f} → {self.new_after:.3f}, on old ones kept back "
            f"{self.old_loaded:.3f} → {self.old_after:.3f}"
        )


class PriorCorrection:
    """The odds of buckets by (model, workload), moved by every answer at once.

    Bucket b's odds are multiplied by how often it came over how often it was predicted, both lately
    and both smoothed (label shift, Saerens, Latinne and Decaestecker 2002).
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._observed: dict[tuple[str, str], Floats] = {}
        self._expected: dict[tuple[str, str], Floats] = {}

    def observe(self, key: tuple[str, str], probabilities: Floats, bucket: int) -> None:
        """An answer fell into `bucket`; `probabilities` are those of all buckets, uncorrected."""
        observed = self._observed.setdefault(key, np.zeros(self._buckets))
        expected = self._expected.setdefault(key, np.zeros(self._buckets))
        observed *= _FORGET
        expected *= _FORGET
        observed[bucket] += 1
        expected += probabilities

    def weights(self, key: tuple[str, str]) -> Floats:
        """What to multiply the odds of each bucket with."""
        if key not in self._observed:
            return np.ones(self._buckets)
        expected_shares = self._expected[key] / self._expected[key].sum()
        ratios: Floats = (self._observed[key] + _PRIOR * expected_shares) / (
            (self._observed[key].sum() + _PRIOR) * np.maximum(expected_shares, 1e-6)
        )
        return ratios

    def forget(self) -> None:
        """Discard all observations."""
        self._observed.clear()
        self._expected.clear()


class OnlinePredictor:
    """A predictor that learns from observed output lengths. Observations stay in a queue on disk
    until `save` has written the update into the folder, so none is lost if the process ends.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base: str | None = None,
        device: str = "cpu",
        seed: int = 0,
        keep_queue: bool = True,
    ) -> None:
        self.config = PredictorConfig.load(folder)
        self._folder = folder
        self._keep_queue = keep_queue
        self._device = checked_device(device)
        self._bf16 = bf16_runs(self._device)
        self._base = find_base(base, folder, self.config)
        loaded = load_base(self._base, device=self._device, bf16=self._bf16, learns=True)
        check_base(loaded, self.config, folder)
        self._tokenizer = loaded.tokenizer
        self._network = LengthNetwork(loaded.model, self.config.shape)
        put_weights(self._network, folder / self.config.weights_file)
        self.samples = read_samples(folder / self.config.samples_file)
        self._seen = seen_in(self.samples, test=True)
        self._rng = np.random.default_rng((seed, self.config.generation))
        self._old = list(self.samples[VALIDATION])
        self._as_loaded = self._losses(self._old)
        self._prior = PriorCorrection(len(self.config.shape.edges))
        self._lately: deque[tuple[LabelledPrompt, str]] = deque(maxlen=RECENT)
        self._taught: list[LabelledPrompt] = []  # by updates of this process
        self.queue: list[LabelledPrompt] = []
        if keep_queue and (folder / QUEUE).exists():
            self.queue = read_queue(folder / QUEUE)

    def lengths(self, rows: Sequence[LabelledPrompt], workload: str = "") -> PredictedDistributions:
        """Distributions for prompts, corrected by what came of (model, workload) lately."""
        predicted = self.uncorrected(rows)
        weights = np.array([self._prior.weights((row.model, workload)) for row in rows])
        return predicted.reweighted(weights.reshape(len(rows), len(self.config.shape.edges)))

    def observe(self, rows: Sequence[LabelledPrompt], workload: str = "") -> None:
        """Answers came: their lengths correct at once, and wait in the queue to be learnt from."""
        if self._keep_queue:
            with (self._folder / QUEUE).open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(without_answer(row)) + "\n")
        self.queue += rows
        self._lately.extend((row, workload) for row in rows)
        self._correct(rows, [workload] * len(rows))

    def fresh(self) -> list[LabelledPrompt]:
        """What waits in the queue and was not learnt from yet."""
        return [row for row in self.queue if not self._seen(row)]

    def update(self, *, epochs: int = EPOCHS, progress: Watch = lambda done, total: None) -> Update:
        """Teach the network the queue, what it was taught lately, and as many old answers again.

        Of what was learnt the largest step is taken with which new answers kept back fare better
        and old ones not notably worse than when the predictor was loaded, however many updates
        ago. Without one nothing changes.

        Raises:
            SloBenchError: too few new answers wait.
        """
        new = self.fresh()
        if len(new) < FEWEST:
            raise SloBenchError(
                f"{len(new)} new answers are too few for an update; it needs {FEWEST}"
            )
        parts = split_by_prompt(new, _SHARES, self.config.generation)
        before = self._copy()
        new_rows = parts[VALIDATION] or parts[TRAIN]
        new_before = float(self._losses(new_rows).mean())
        self._teach([*self._taught, *parts[TRAIN]][-RECENT:], epochs, progress)
        after = self._copy()
        for step in _STEPS:
            self._put({name: before[name].lerp(after[name], step) for name in before})
            worse = self._losses(self._old) - self._as_loaded
            new_after = float(self._losses(new_rows).mean())
            borne = max(_TOLERATED, _DOUBT * float(worse.std()) / np.sqrt(len(worse)))
            if float(worse.mean()) <= borne and new_after < new_before:
                break
        else:
            step = 0.0
            self._put(before)
        if step:
            for part, rows in parts.items():
                self.samples[part] += rows
            self._taught = [*self._taught, *parts[TRAIN]][-RECENT:]
            self._seen = seen_in(self.samples, test=True)
            taught = self.samples[TRAIN]
            encoded = encode(self._tokenizer, self.config.shape, prompts_of(taught))
            self._network.words = tfidf_from(encoded, taught, self.config.shape)
            self._prior.forget()
            recent = list(self._lately)
            self._correct([row for row, _ in recent], [workload for _, workload in recent])
        loaded = float(self._as_loaded.mean())
        return Update(step, len(new), loaded, loaded + float(worse.mean()), new_before, new_after)

    def save(self) -> None:
        """Put what was learnt into the folder as its next generation, and empty the queue."""
        last = self.config
        config = replace(last, generation=last.generation + 1)
        assert self._network.words is not None  # it was read
        save_weights(
            {name: weight.detach().cpu() for name, weight in self._network.trained().items()},
            self._network.words,
            self._folder / config.weights_file,
        )
        write_whole(self._folder / config.samples_file, [pack(self.samples)])
        held = self.samples[CALIBRATION]
        config = calibrated(config, self._folder, held, base=self._base, device=self._device)
        config.save(self._folder)
        self.config = config
        done = (last.weights_file, last.samples_file, *((QUEUE,) if self._keep_queue else ()))
        for name in done:
            (self._folder / name).unlink(missing_ok=True)
        self.queue.clear()

    def uncorrected(self, rows: Sequence[LabelledPrompt]) -> PredictedDistributions:
        """Distributions as the network has them."""
        encoded = encode(self._tokenizer, self.config.shape, prompts_of(rows))
        share = self.config.words_share
        raw = lengths_of(self._network, encoded, share, autocast=self._bf16)
        return raw.recalibrated(self.config.recalibration)

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self._network.trained().items()}

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._network.trained().items():
                weight.copy_(weights[name])

    def _correct(self, rows: Sequence[LabelledPrompt], workloads: Sequence[str]) -> None:
        if not rows:
            return
        predictions = self.uncorrected(rows).bucket_probabilities()
        buckets = buckets_in(self.config.shape.edges, tokens_of(rows))
        for row, workload, probabilities, bucket in zip(
            rows, workloads, predictions, buckets, strict=True
        ):
            self._prior.observe((row.model, workload), probabilities, int(bucket))

    def _losses(self, rows: Sequence[LabelledPrompt]) -> Floats:
        """Loss of each row, shape (n,)."""
        encoded = encode(self._tokenizer, self.config.shape, prompts_of(rows))
        raw = raw_outputs(self._network, encoded, autocast=self._bf16)
        tokens = tokens_tensor(rows)
        head = self._network.head
        each = [float(head.loss(raw[k : k + 1], tokens[k : k + 1])) for k in range(len(rows))]
        return np.array(each)

    def _teach(self, new: Sequence[LabelledPrompt], epochs: int, progress: Watch) -> None:
        shape = self.config.shape
        old = self.samples[TRAIN]
        trained = self.config.training["settings"]
        rate, waiting = _GENTLY * float(trained["learning_rate"]), trained.get("waiting_weight")
        learner = Learner(self._network, rate, float(waiting or 0.0), bf16=self._bf16)
        steps = -(-epochs * len(new) // _BATCH)
        order = np.concatenate([self._rng.permutation(len(new)) for _ in range(epochs)])
        for step in range(steps):
            torch.manual_seed(int(self._rng.integers(2**31)))
            chosen = [new[index] for index in order[step * _BATCH : (step + 1) * _BATCH]]
            again = self._rng.choice(len(old), size=min(len(chosen), len(old)), replace=False)
            rows = chosen + [old[index] for index in again]
            encoded = encode(self._tokenizer, shape, prompts_of(rows))
            learner.learn(encoded, np.arange(len(rows)), tokens_tensor(rows), step / steps)
            progress(step + 1, steps)


def update_predictor(
    folder: Path,
    rows: Sequence[LabelledPrompt],
    *,
    base: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    epochs: int = EPOCHS,
    progress: Watch = lambda done, total: None,
) -> Update:
    """Teach the predictor in a folder what is new in `rows` and in its queue.

    Raises:
        SloBenchError: there is no predictor, another base, or too little that is new.
    """
    online = OnlinePredictor(folder, base=base, device=device, seed=seed)
    online.queue += rows
    outcome = online.update(epochs=epochs, progress=progress)
    if outcome.accepted:
        online.save()
    return outcome


def write_queue(path: Path, rows: Sequence[LabelledPrompt]) -> None:
    """Put a queue in the place of the one that is there, whole or not at all."""
    lines = (json.dumps(without_answer(row)) + "\n" for row in rows)
    write_whole(path, map(str.encode, lines))


def read_queue(path: Path) -> list[LabelledPrompt]:
    """Answers that wait to be learnt from. A last line that was cut off is left out.

    Raises:
        FileFormatError: it is damaged.
    """
    rows = []
    whole, end, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if end else (), 1):
        try:
            rows.append(labelled_prompts_of(parse_json(line)))
        except (ValueError, TypeError) as error:
            raise FileFormatError(path, number, f"damaged: {error}") from error
    return rows
