"""Accuracy of predictions, with baselines and the limit of what prompts can tell."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...workloads.arrays import Floats, Ints
from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt
from .distribution import PredictedDistributions, buckets_in, conformal_offset, neighbours_worth
from .length_baselines import baselines, calibrated_on
from .length_samples import CALIBRATION, TRAIN, Parts, prompts_of, tokens_of

if TYPE_CHECKING:
    from .predictor import TrainedPredictor

BINS = 10  # of the reliability figure and the calibration error
ALL = "all"  # corpora that it was trained on; where there are none, all the others
MODEL = "answers of "  # begins the name of a group of one model's answers
LORA = "LoRA"
_FOLDS = 5
_FEWEST_FOR_LEAK = 50
_BATCHES = {1: 64, 32: 20}  # size: how many are timed


@dataclass(frozen=True)
class Score:
    """How one predictor did on one corpus."""

    corpus: str
    predictor: str
    rows: int
    exact: float  # share of answers in the bucket that was named
    within_one: float  # or in a neighbour of it
    mae_tokens: float  # of the median
    kendall_tau: float  # order of medians against order of lengths; NaN if all are alike
    waiting_saved: float  # `waiting_saved`; NaN if all are alike
    calibration_error: float  # ECE of the likeliest bucket's probability, ten bins
    coverage: float  # share within the 90 % interval, after conformal correction
    interval_ratio: float  # median of upper end / lower end, each + 1
    longest_coverage: float  # share not above what nine in ten are said not to exceed


@dataclass(frozen=True)
class Bin:
    """Predictions of like confidence: what was said, and how often it was true."""

    said: float
    true: float
    rows: int


@dataclass(frozen=True)
class Latency:
    """Time of predicting one batch, text to distribution, on one thread.

    On a busy machine wall time says more of the others; CPU time (of a CPU's work) does not.
    """

    batch: int
    median_s: float
    p99_s: float
    cpu_median_s: float


@dataclass(frozen=True)
class PredictorEvaluation:
    """All that `predict-eval` shows. `leak` is what the answer's text would give, by corpus."""

    scores: tuple[Score, ...]
    reliability: tuple[Bin, ...]
    confusion: Ints = field(repr=False)  # (true, predicted), as `reliability` of what `all` covers
    latencies: tuple[Latency, ...]
    leak: Mapping[str, float]
    left_out: Mapping[str, int]  # rows by corpus whose prompt was in the training part
    unknown_models: tuple[str, ...]
    trained_on: frozenset[str]  # corpora by name


def evaluate(
    predictor: TrainedPredictor,
    samples: Parts,
    rows: Sequence[LabelledPrompt],
    took_part: Callable[[LabelledPrompt], bool],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictorEvaluation:
    """Hold a predictor and the baselines, made of the same samples, against new rows.

    Args:
        predictor: a trained one.
        samples: what it was made of.
        rows: answered prompts; those that `took_part` says were learnt from are left out.
        took_part: whether a row's prompt took part in training or calibration.
        progress: called with (steps done, of how many).
    """
    new = [row for row in rows if not took_part(row)]
    left_out: dict[str, int] = {}
    for row in rows:
        left_out[row.corpus] = left_out.get(row.corpus, 0) + int(took_part(row))
    config = predictor.config
    edges = config.shape.edges
    total = 6
    progress(0, total)
    predicted = predictor.lengths(prompts_of(new))
    progress(1, total)
    tokens = tokens_of(new)
    scored = [(LORA, predicted, config.conformal_offset, config.neighbours)]
    held = samples[CALIBRATION]
    held_tokens = tokens_of(held)
    for place, fitted in enumerate(baselines(samples[TRAIN], edges)):
        baseline = calibrated_on(fitted, held)
        of_held = baseline.lengths(held)
        offset = conformal_offset(of_held, held_tokens)
        neighbours = neighbours_worth(of_held, held_tokens)
        scored.append((baseline.name, baseline.lengths(new), offset, neighbours))
        progress(2 + place, total)
    corpora = list(dict.fromkeys(row.corpus for row in new))
    names = np.array([row.corpus for row in new])
    trained_on = frozenset(row.corpus for row in samples[TRAIN])
    home = [corpus for corpus in corpora if corpus in trained_on] or corpora
    groups = {ALL: np.flatnonzero(np.isin(names, home))} if len(home) > 1 else {}
    groups |= {corpus: np.flatnonzero(names == corpus) for corpus in corpora}
    answered = np.array([row.model for row in new])
    models = np.unique(answered)
    if len(models) > 1:  # the order of lengths within a model, not who answers
        groups |= {f"{MODEL}{name}": np.flatnonzero(answered == name) for name in models}
    scores = [
        score(corpus, name, lengths[indices], tokens[indices], offset, neighbours)
        for corpus, indices in groups.items()
        for name, lengths, offset, neighbours in scored
    ]
    judged = np.flatnonzero(np.isin(names, home))
    of_home, of_tokens = predicted[judged], tokens[judged]
    latencies = tuple(latency(predictor, new, size) for size in _BATCHES)
    progress(5, total)
    leak = {
        corpus: accuracy
        for corpus in corpora
        if (accuracy := leak_accuracy([new[index] for index in groups[corpus]], edges)) is not None
    }
    progress(6, total)
    trained_models = set(config.shape.models)
    return PredictorEvaluation(
        scores=tuple(scores),
        reliability=tuple(reliability(of_home, buckets_in(edges, of_tokens))),
        confusion=of_home.confusion(of_tokens, config.neighbours),
        latencies=latencies,
        leak=leak,
        left_out=left_out,
        unknown_models=tuple(sorted({row.model for row in new} - trained_models)),
        trained_on=trained_on,
    )


def write_predictions(
    predictor: TrainedPredictor, rows: Sequence[LabelledPrompt], path: Path
) -> None:
    """Write a CSV with a row for each prompt: its length, and what was predicted, in tokens.

    Raises:
        SloBenchError: the file cannot be written.
    """
    lengths = predictor.lengths(prompts_of(rows))
    config = predictor.config
    low, high = lengths.interval_tokens(config.conformal_offset)
    named = lengths.buckets(config.neighbours)
    true = buckets_in(lengths.edges, tokens_of(rows))
    columns = (true, named, lengths.median_tokens(), lengths.longest_tokens(), low, high)
    heads = ["corpus", "model", "prompt_tokens", "output_tokens", "bucket", "predicted_bucket"]
    heads += ["predicted_median", "predicted_q90", "interval_low", "interval_high", "prompt"]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(heads)
            for row, *numbers in zip(rows, *columns, strict=True):
                cells = [int(number) for number in numbers]
                first = (row.corpus, row.model, row.prompt_tokens, row.output_tokens)
                writer.writerow([*first, *cells, row.prompt])
    except OSError as error:
        raise SloBenchError(f"cannot write {path}: {error.strerror}") from error


def score(
    corpus: str,
    name: str,
    lengths: PredictedDistributions,
    tokens: Ints,
    offset: float,
    neighbours: float = 0.0,
) -> Score:
    """One row of the table; `offset` and `neighbours` come from rows of their own."""
    from scipy.stats import kendalltau

    true, named = buckets_in(lengths.edges, tokens), lengths.buckets(neighbours)
    median = lengths.median_tokens()
    low, high = lengths.interval_tokens(offset)
    varied = len(np.unique(median)) > 1 and len(np.unique(tokens)) > 1
    bins = reliability(lengths, true)
    return Score(
        corpus=corpus,
        predictor=name,
        rows=len(tokens),
        exact=float((true == named).mean()),
        within_one=float((np.abs(true - named) <= 1).mean()),
        mae_tokens=float(np.abs(median - tokens).mean()),
        kendall_tau=float(kendalltau(median, tokens).statistic) if varied else float("nan"),
        waiting_saved=waiting_saved(median, tokens),
        calibration_error=sum(abs(b.said - b.true) * b.rows for b in bins) / len(tokens),
        coverage=float(((tokens >= low) & (tokens <= high)).mean()),
        longest_coverage=float((tokens <= lengths.longest_tokens()).mean()),
        interval_ratio=float(np.median((1 + high) / (1 + low))),
    )


def waiting_saved(scores: Floats | Ints, tokens: Ints) -> float:
    """Waiting that the order of `scores` saves over random order, as a share of shortest first's.

    For requests of lengths `tokens` that all wait for one server: of two, the later one waits for
    the length of the earlier one. 1: the order of true lengths; 0: as random; NaN: all are alike.
    Kendall's tau with each pair weighted by the difference of its lengths.
    """

    def saved(by: Floats | Ints) -> float:
        """Sum of the differences of pairs in the right order, less those in the wrong one."""
        ordered = np.sort(by)
        below = np.searchsorted(ordered, by, "left")
        above = len(by) - np.searchsorted(ordered, by, "right")
        return float((tokens * (below - above)).sum())

    best = saved(tokens)
    return saved(scores) / best if best else float("nan")


def reliability(lengths: PredictedDistributions, true: Ints) -> list[Bin]:
    """Predictions by the probability of their likeliest bucket."""
    probabilities = lengths.bucket_probabilities()
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == true
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        for bin_ in range(BINS)
        if (inside := place == bin_).any()
    ]


def latency(predictor: TrainedPredictor, rows: Sequence[LabelledPrompt], size: int) -> Latency:
    """Time batches of `size` prompts, one after the other on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompts = prompts_of(rows)
        wall_s: list[float] = []
        cpu_s: list[float] = []
        for batch in range(_BATCHES[size] + 2):
            chosen = [prompts[(batch * size + offset) % len(prompts)] for offset in range(size)]
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            predictor.lengths(chosen).median_tokens()
            wall_s.append(time.perf_counter() - begin_s)
            cpu_s.append(time.thread_time() - begin_cpu_s)
    finally:
        torch.set_num_threads(threads)
    timed = np.array(wall_s[2:])  # the first ones set things up
    median_s, p99_s = np.quantile(timed, (0.5, 0.99)).tolist()
    return Latency(size, median_s, p99_s, float(np.median(cpu_s[2:])))


def leak_accuracy(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> float | None:
    """Exact buckets that the answer's text gives away; None where too few texts are there.

    Five-fold least squares on counts of characters, words, lines, digits and other signs: no
    predictor at all, but what one that sees the answer amounts to.
    """
    rows = [row for row in rows if row.answer]
    if len(rows) < _FEWEST_FOR_LEAK:
        return None
    x = np.array([_counts(row.answer or "") for row in rows])
    y = np.array([row.output_tokens for row in rows], dtype=np.float64)
    fold = np.arange(len(rows)) % _FOLDS
    guess = np.empty(len(rows))
    for number in range(_FOLDS):
        held = fold == number
        weight = 1 / np.sqrt(y[~held])  # a token more matters most in short answers
        fitted = np.linalg.lstsq(x[~held] * weight[:, None], y[~held] * weight, rcond=None)[0]
        guess[held] = x[held] @ fitted
    guessed_buckets = buckets_in(edges, np.rint(np.clip(guess, 1, None)).astype(np.int64))
    return float((guessed_buckets == buckets_in(edges, y.astype(np.int64))).mean())


def _counts(text: str) -> Floats:
    letters = sum(c.isalnum() for c in text)
    spaces = sum(c.isspace() for c in text)
    digits = sum(c.isdigit() for c in text)
    foreign = sum(ord(c) > 127 for c in text)
    signs = len(text) - letters - spaces
    return np.array(
        [1, letters, len(text.split()), text.count("\n"), digits, foreign, signs], dtype=np.float64
    )
