"""Predictors of the output length, which policies read before the true length is known.

Source: UELLM, Eq. 3-1 (buckets) and Eq. 3-2 (the bucket's representative value stands for the
length). The thesis reports 99.51 % of buckets right from the prompt alone; `noisy(accuracy=…)` says
what a predictor of any stated accuracy would be worth, `spread(…)` one that knows how unsure it is,
`oracle` a perfect one and `constant(…)` none. `learned(DIR)`, or the folder alone, is a predictor
that `slo-bench predict-train` made.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..workloads.arrays import Floats, Ints
from ..workloads.call_parser import build, parse_call
from ..workloads.errors import SloBenchError, UnknownNameError
from ..workloads.extras import need
from ..workloads.file_cache import file_cache
from ..workloads.length_buckets import BUCKET_EDGES, bucket_middle_tokens
from ..workloads.lengths import normal_cumulative, normal_quantile
from ..workloads.workload import Workload
from .lengths.distribution import buckets_in, error_shares
from .lengths.predictor_config import PredictorConfig, find_base

if TYPE_CHECKING:
    from .lengths.distribution import PredictedDistributions
    from .lengths.length_baselines import Baseline
    from .lengths.length_samples import Prompt
    from .lengths.online_predictor import LengthPrediction, OnlineLengthPredictor
    from .lengths.predictor import TrainedPredictor


_MIDDLES = np.array([bucket_middle_tokens(bucket) for bucket in range(len(BUCKET_EDGES))])


def buckets_of(tokens: Ints) -> Ints:
    """The index of the bucket that holds each length."""
    return buckets_in(BUCKET_EDGES, tokens)


def _drawn_from(shares: Floats, rows: Ints, rng: np.random.Generator) -> Ints:
    """A column for each of `rows`, with the probabilities in that row of `shares`."""
    cumulative = np.cumsum(shares, axis=1)
    above = rng.random(len(rows))[:, None] >= cumulative[rows]
    columns: Ints = np.minimum(above.sum(axis=1), shares.shape[1] - 1)
    return columns


class LengthPredictor(Protocol):
    """Tells lengths of answers in advance. A learnt one reads `Workload.texts`."""

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        """Predicted output tokens of each request, at least 1."""


@dataclass(frozen=True)
class Oracle:
    """The true length, token by token."""

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        return workload.output_tokens


@dataclass(frozen=True)
class NoisyOracle:
    """The middle of the true bucket with probability `accuracy`, else of one that a real predictor
    told instead (`lengths.distribution`); all times `factor`, for predictors that tell too little
    or too much throughout.
    """

    accuracy: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise SloBenchError(f"noisy accuracy must be from 0 to 1 but is {self.accuracy:g}")
        if not 0 < self.factor <= 100:
            raise SloBenchError(
                f"noisy factor must be above 0, at most 100, but is {self.factor:g}"
            )

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        true = buckets_of(workload.output_tokens)
        wrong = rng.random(len(true)) >= self.accuracy
        named = _drawn_from(error_shares(), true, rng)
        predicted: Ints = np.rint(self.factor * _MIDDLES[np.where(wrong, named, true)])
        return np.maximum(predicted, 1).astype(np.int64)


_Z90 = 1.2815515655446004  # the standard normal's 90 % quantile


@dataclass(frozen=True)
class SpreadLength:
    """A distribution for each request, of which it tells the median. For a share `unsure` it sees a
    signal with this `correlation` to the normal score of the length's rank among all lengths; the
    other lengths it knows. Its quantiles hold among the requests with any one prediction.
    """

    correlation: float
    unsure: float = 0.5

    def __post_init__(self) -> None:
        for name, share in (("correlation", self.correlation), ("unsure", self.unsure)):
            if not 0 <= share <= 1:
                raise SloBenchError(f"spread {name} must be from 0 to 1 but is {share:g}")

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        return self._quantile(workload.output_tokens, rng, 0.0)

    def longest(self, workload: Workload, rng: np.random.Generator) -> Ints:
        """What nine in ten such answers do not exceed."""
        return self._quantile(workload.output_tokens, rng, _Z90)

    def _quantile(self, tokens: Ints, rng: np.random.Generator, z: float) -> Ints:
        n, order = len(tokens), np.argsort(tokens, kind="stable")
        score = np.empty(n)
        score[order] = normal_quantile((np.arange(n) + 0.5) / n)
        r = np.where(rng.random(n) < self.unsure, self.correlation, 1.0)
        rest = np.sqrt(1 - r**2)
        signal = r * score + rest * rng.standard_normal(n)
        below = normal_cumulative(r * signal + rest * z)  # share of all lengths
        quantile: Ints = tokens[order][np.minimum(n - 1, (below * n).astype(np.int64))]
        return quantile


@dataclass(frozen=True)
class ConstantLength:
    """The same for every request: no prediction at all."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SloBenchError(f"constant tokens must be at least 1 but is {self.tokens}")

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        return np.full(len(workload), self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class LearnedLength:
    """Output length by a trained predictor: the median of its distribution. For a request without
    text, a bucket is drawn with the predictor's confusion probabilities on its calibration part,
    and its middle is the prediction. `model` is the name of the answering model in the predictor;
    by default the workload's. `base` is the present path of the base model. With `online`, a number
    of answers, it learns during the run. Simulated: after each such number of requests, in order of
    arrival, their lengths correct and train it, in memory alone. With real servers each answer
    corrects it on completion, and each such number trains it (`lengths.online_predictor`).
    """

    folder: str
    model: str = ""
    base: str = ""
    online: int = 0

    def __post_init__(self) -> None:
        if self.online < 0:
            raise SloBenchError(f"learned online must be at least 0 but is {self.online}")

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        return self._predicted(workload, rng, 0)

    def longest(self, workload: Workload, rng: np.random.Generator) -> Ints:
        """What nine in ten such answers do not exceed; without a text what is drawn."""
        return self._predicted(workload, rng, 1)

    def _predicted(self, workload: Workload, rng: np.random.Generator, which: int) -> Ints:
        lengths = self._drawn(workload.output_tokens, rng)
        if workload.texts is None:
            return lengths
        prompts = {row: self.prompt(workload, row) for row in range(len(workload))}
        prompt_by_row = {row: prompt for row, prompt in prompts.items() if prompt is not None}
        if prompt_by_row:
            present_prompts = tuple(prompt_by_row.values())
            if self.online:
                answers = tuple(int(workload.output_tokens[row]) for row in prompt_by_row)
                predictions = _followed(
                    self.folder, self.base, self.online, present_prompts, answers
                )
            else:
                predictions = _read(self.folder, self.base, present_prompts)
            lengths[list(prompt_by_row)] = predictions[which]
        return lengths

    def at_dispatch(
        self, workload: Workload, rng: np.random.Generator, followed: Path | None = None
    ) -> AtDispatch:
        """The same for single requests of a workload, when they are due; loads the network.

        To follow the run it needs a folder of its own, `followed`, where a copy of the predictor
        learns: whoever runs next begins with what this one began with.

        Raises:
            SloBenchError: it cannot be loaded, or is to follow and there is no such folder.
        """
        return AtDispatch(self, workload, self._drawn(workload.output_tokens, rng), followed)

    def follower(self, say: Callable[[str], None]) -> OnlineLengthPredictor:
        """Predictor for single prompts; with `online` it learns in the predictor's own folder.

        Raises:
            SloBenchError: it cannot be loaded, or another process has locked the folder.
        """
        need("torch", "a learnt length predictor")
        from .lengths.online_predictor import OnlineLengthPredictor

        return OnlineLengthPredictor(
            Path(self.folder), base=self.base or None, online=self.online, device="auto", say=say
        )

    def prompt(self, workload: Workload, row: int) -> Prompt | None:
        """What is known of a request; None where it has no text."""
        text = None if workload.texts is None else workload.texts[row]
        if not text:
            return None
        from .lengths.length_samples import Prompt

        model = self.model or workload.model_names[workload.model_index[row]]
        _warn_of_unknown(self.folder, model)
        return Prompt(text, int(workload.prompt_tokens[row]), model)

    def _drawn(self, tokens: Ints, rng: np.random.Generator) -> Ints:
        config = PredictorConfig.load(Path(self.folder))
        edges = np.array([*config.shape.edges, 2 * config.shape.edges[-1]])
        counts = np.array(config.confusion, dtype=float)
        # A bucket that the calibration part lacks is predicted without error.
        counts[np.diag_indices(len(counts))] += counts.sum(axis=1) == 0
        true = buckets_in(config.shape.edges, tokens)
        buckets = _drawn_from(counts / counts.sum(axis=1, keepdims=True), true, rng)
        middles: Ints = np.maximum(1, (edges[buckets] + edges[buckets + 1]) // 2).astype(np.int64)
        return middles


@file_cache(maxsize=64)
def _warn_of_unknown(folder: str, model: str) -> None:
    """Once for each model: predictions for one that was not trained on have larger errors."""
    models = PredictorConfig.load(Path(folder)).shape.models
    if models and model not in models:
        which = f"knows no model {model!r}" if model else "is not told which model answers"
        warnings.warn(
            f"the length predictor {folder} {which}, so its errors are larger; it "
            f"knows {', '.join(models)}: name one, as learned({folder}, model={models[0]})",
            stacklevel=2,
        )


class AtDispatch:
    """A trained predictor for the requests of one workload; for use on one thread."""

    def __init__(
        self, learned: LearnedLength, workload: Workload, drawn: Ints, followed: Path | None
    ) -> None:
        self._learned = learned
        self._workload = workload
        self._drawn = drawn
        if not learned.online:
            self.follower = _reader(learned.folder, learned.base)
        elif followed is None:
            raise SloBenchError(f"learned(…, online={learned.online}) needs a folder to learn in")
        else:
            self.follower = _copy_that_follows(learned, followed)

    def lengths(self, rows: Sequence[int]) -> list[tuple[int, int, LengthPrediction | None]]:
        """Tokens that half of such answers do not exceed, and nine in ten, at least 1; and what
        the follower takes with the answer, where there is a text.
        """
        length_by_row: dict[int, tuple[int, int, LengthPrediction | None]] = {
            row: (int(self._drawn[row]), int(self._drawn[row]), None) for row in rows
        }
        prompts = {row: self._learned.prompt(self._workload, row) for row in rows}
        prompt_by_row = {row: prompt for row, prompt in prompts.items() if prompt is not None}
        if prompt_by_row:
            predictions = self.follower.read(list(prompt_by_row.values()))
            length_by_row |= {
                row: (o.median, o.p90, o) for row, o in zip(prompt_by_row, predictions, strict=True)
            }
        return [length_by_row[row] for row in rows]


def _copy_that_follows(learned: LearnedLength, folder: Path) -> OnlineLengthPredictor:
    from .lengths.online import QUEUE
    from .lengths.online_predictor import OnlineLengthPredictor

    source = Path(learned.folder)
    base = find_base(learned.base or None, source, PredictorConfig.load(source))
    shutil.rmtree(folder, ignore_errors=True)  # of a level that was not finished
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(QUEUE, ".*"))
    return OnlineLengthPredictor(folder, base=base, online=learned.online, device="auto")


@dataclass(frozen=True)
class TfIdf:
    """What words alone say: TF-IDF and logistic regression on the samples of a trained predictor.

    All requests need texts.
    """

    folder: str
    model: str = ""

    def __post_init__(self) -> None:
        PredictorConfig.load(Path(self.folder))

    def predict(self, workload: Workload, rng: np.random.Generator) -> Ints:
        """Predicted output tokens of each request, at least 1.

        Raises:
            SloBenchError: a request has no text.
        """
        return self._lengths(workload).median_tokens()

    def longest(self, workload: Workload, rng: np.random.Generator) -> Ints:
        """What nine in ten such answers do not exceed."""
        return self._lengths(workload).longest_tokens()

    def _lengths(self, workload: Workload) -> PredictedDistributions:
        from ..workloads.labelled_prompts import LabelledPrompt

        texts = workload.texts or [None] * len(workload)
        if not all(texts):
            raise SloBenchError(f"tfidf reads prompts, and {workload.name} has some without text")
        rows = [
            LabelledPrompt(
                text or "",
                int(workload.prompt_tokens[row]),
                1,
                self.model or workload.model_names[workload.model_index[row]],
                "",
            )
            for row, text in enumerate(texts)
        ]
        return _tfidf(self.folder).lengths(rows)


@file_cache(maxsize=4)
def _tfidf(folder: str) -> Baseline:
    from .lengths.length_baselines import calibrated_on, tfidf
    from .lengths.length_samples import CALIBRATION, TRAIN, read_samples

    config = PredictorConfig.load(Path(folder))
    samples = read_samples(Path(folder) / config.samples_file)
    return calibrated_on(tfidf(samples[TRAIN], config.shape.edges), samples[CALIBRATION])


@file_cache(maxsize=4)
def _reader(folder: str, base: str) -> OnlineLengthPredictor:
    return LearnedLength(folder, base=base).follower(lambda line: None)


@file_cache(maxsize=4)
def _loaded(folder: str, base: str) -> TrainedPredictor:
    from .lengths.predictor import TrainedPredictor

    return TrainedPredictor.load(Path(folder), base=base or None, device="auto")


@file_cache(maxsize=64)
def _read(folder: str, base: str, prompts: tuple[Prompt, ...]) -> tuple[Ints, Ints]:
    """Medians, and what nine in ten do not exceed; kept, since every system and rate of a seed has
    the same prompts.
    """
    lengths = _loaded(folder, base).lengths(prompts)
    return lengths.median_tokens(), lengths.longest_tokens()


@file_cache(maxsize=4)
def _followed(
    folder: str, base: str, every: int, prompts: tuple[Prompt, ...], answers: tuple[int, ...]
) -> tuple[Ints, Ints]:
    """As `_read`, with the answers of each `every` requests known before the next prediction."""
    from ..workloads.labelled_prompts import LabelledPrompt
    from .lengths.online import FEWEST, OnlinePredictor

    online = OnlinePredictor(Path(folder), base=base or None, device="auto", keep_queue=False)
    rows = [
        LabelledPrompt(prompt.text, prompt.tokens, tokens, prompt.model, "")
        for prompt, tokens in zip(prompts, answers, strict=True)
    ]
    parts: list[tuple[Ints, Ints]] = []
    for first in range(0, len(rows), every):
        came = rows[first : first + every]
        lengths = online.lengths(came)
        parts.append((lengths.median_tokens(), lengths.longest_tokens()))
        online.observe(came)
        if first + every < len(rows) and len(online.fresh()) >= FEWEST:
            online.update()
    return np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])


_KINDS: dict[str, type[LengthPredictor]] = {
    "oracle": Oracle,
    "noisy": NoisyOracle,
    "spread": SpreadLength,
    "constant": ConstantLength,
    "learned": LearnedLength,
    "tfidf": TfIdf,
}


def length_predictor(text: str) -> LengthPredictor:
    """`oracle`, `noisy(accuracy=0.8)`, `spread(correlation=0.5)`, `constant(256)`,
    `learned(DIR, model=NAME)` or just DIR, or `tfidf(DIR)`.

    Raises:
        UnknownNameError: there is no such predictor, or it has no such setting.
        SloBenchError: a value is missing or out of range, or the folder holds no predictor.
    """
    if Path(text).is_dir():
        return LearnedLength(text)
    call = parse_call(text)
    if call.name not in _KINDS:
        raise UnknownNameError("length predictor", call.name, _KINDS)
    return build(_KINDS[call.name], call)


def check_installed(predictor: LengthPredictor, *, reads_texts: bool) -> None:
    """Check that the extra of a predictor is there, before a run begins.

    Args:
        predictor: what predicts the lengths of a workload.
        reads_texts: whether the workload has texts; without them no network is loaded.

    Raises:
        SloBenchError: it is not installed.
    """
    if isinstance(predictor, LearnedLength) and reads_texts:
        need("torch", "a learnt length predictor")
    if isinstance(predictor, TfIdf):
        need("regressors", "the length predictor tfidf")


def longest_tokens(
    predictor: LengthPredictor, workload: Workload, rng: np.random.Generator
) -> Ints | None:
    """What nine in ten such answers do not exceed; None: the predictor knows no distribution."""
    if isinstance(predictor, LearnedLength | TfIdf | SpreadLength):
        return predictor.longest(workload, rng)
    return None


def bucket_accuracy(predicted: Ints, true: Ints) -> float:
    """Share of lengths predicted into the bucket that they fall into."""
    return float((buckets_of(predicted) == buckets_of(true)).mean())
