"""What a learnt predictor must beat: three predictors that read less or nothing of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.arrays import Floats
from ...workloads.extras import need
from ...workloads.labelled_prompts import LabelledPrompt
from .distribution import PredictedDistributions, buckets_in, recalibration
from .length_samples import tokens_of

_PSEUDO = 0.5  # of an answer in each bucket, before any was seen
_BINS = 20
_TERMS = 30_000

PredictLengths = Callable[[Sequence[LabelledPrompt]], PredictedDistributions]


@dataclass(frozen=True)
class Baseline:
    """A name, and what it tells of prompts."""

    name: str
    lengths: PredictLengths


def calibrated_on(baseline: Baseline, rows: Sequence[LabelledPrompt]) -> Baseline:
    """The same with quantiles that hold on these rows, which took no part in its fit."""
    shares = recalibration(baseline.lengths(rows), tokens_of(rows)) if rows else ()
    return Baseline(baseline.name, lambda prompts: baseline.lengths(prompts).recalibrated(shares))


def baselines(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> list[Baseline]:
    """All of them, fitted to `rows`."""
    return [
        Baseline("majority per model", _per_model(rows, edges)),
        Baseline("prompt length", _prompt_length(rows, edges)),
        tfidf(rows, edges),
    ]


def tfidf(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> Baseline:
    """Predictions of the TF-IDF model, the strongest baseline."""
    return Baseline("TF-IDF + logistic regression", _tfidf(rows, edges))


def _shares(buckets: np.ndarray, edges: tuple[int, ...]) -> Floats:
    counts = np.bincount(buckets, minlength=len(edges)) + _PSEUDO
    shares: Floats = counts / counts.sum()
    return shares


def _per_model(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> PredictLengths:
    """How long the answers of that model were; of an unknown model those of all."""
    true = buckets_in(edges, tokens_of(rows))
    everybody = _shares(true, edges)
    names = np.array([row.model for row in rows])
    shares_by_model = {str(name): _shares(true[names == name], edges) for name in np.unique(names)}

    def predict(prompts: Sequence[LabelledPrompt]) -> PredictedDistributions:
        shares = np.array([shares_by_model.get(row.model, everybody) for row in prompts])
        return PredictedDistributions.of_buckets(edges, shares.reshape(len(prompts), len(edges)))

    return predict


def _prompt_length(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> PredictLengths:
    """How long the answers to prompts of like length were."""
    tokens = np.array([row.prompt_tokens for row in rows])
    cuts = np.unique(np.quantile(tokens, np.linspace(0, 1, _BINS + 1)[1:-1]))
    place = np.searchsorted(cuts, tokens, side="right")
    true = buckets_in(edges, tokens_of(rows))
    table = np.array([_shares(true[place == bin_], edges) for bin_ in range(len(cuts) + 1)])

    def predict(prompts: Sequence[LabelledPrompt]) -> PredictedDistributions:
        places = np.searchsorted(cuts, [row.prompt_tokens for row in prompts], side="right")
        return PredictedDistributions.of_buckets(edges, table[places])

    return predict


def _tfidf(rows: Sequence[LabelledPrompt], edges: tuple[int, ...]) -> PredictLengths:
    """Words and pairs of words, the model's name and the prompt's length."""
    need("regressors", "TF-IDF")
    import scipy.sparse as sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    models = {name: column for column, name in enumerate(sorted({row.model for row in rows}))}
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, max_features=_TERMS)

    def numbers(prompts: Sequence[LabelledPrompt]) -> np.ndarray:
        features = np.zeros((len(prompts), len(models) + 1))
        for place, row in enumerate(prompts):
            if row.model in models:
                features[place, models[row.model]] = 1
            features[place, -1] = np.log1p(row.prompt_tokens) - 3
        return features

    def inputs(prompts: Sequence[LabelledPrompt], terms: object) -> object:
        return sparse.hstack([terms, sparse.csr_matrix(numbers(prompts))]).tocsr()

    true = buckets_in(edges, tokens_of(rows))
    x = inputs(rows, words.fit_transform([row.prompt for row in rows]))
    fitted = LogisticRegression(C=2, max_iter=200).fit(x, true)

    def predict(prompts: Sequence[LabelledPrompt]) -> PredictedDistributions:
        terms = words.transform([row.prompt for row in prompts])
        shares = np.full((len(prompts), len(edges)), 1e-6)
        shares[:, fitted.classes_] = fitted.predict_proba(inputs(prompts, terms))
        return PredictedDistributions.of_buckets(edges, shares)

    return predict
