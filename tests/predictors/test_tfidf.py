"""The linear model of words that the network's distribution is blended with."""

from __future__ import annotations

import numpy as np
import pytest

for module in ("torch", "transformers", "peft", "safetensors", "sklearn"):
    pytest.importorskip(module, reason="learnt predictors need the extra torch")

from slo_bench.predictors.lengths.distribution import PredictedDistributions, share_of  # noqa: E402
from slo_bench.predictors.lengths.tfidf import Encoded, TfIdfClassifier  # noqa: E402

pytestmark = pytest.mark.torch

EDGES = (0, 8, 16, 32)


def encoded(ids, numbers=None):
    about = np.zeros((len(ids), 4)) if numbers is None else numbers
    return Encoded(ids, None, np.arange(len(ids)), about.astype(np.float32))


def telling(rng, rows):
    """Bucket 3 where 7 comes right after 5, bucket 1 where 5 comes right after 7."""
    true = rng.choice([1, 3], rows)
    pairs = {1: [7, 5], 3: [5, 7]}
    return [[*rng.integers(10, 40, 3), *pairs[t], *rng.integers(10, 40, 3)] for t in true], true


def test_tfidf_learns_from_token_pairs():
    rng = np.random.default_rng(0)
    ids, true = telling(rng, 300)
    words = TfIdfClassifier.fit(encoded(ids), true, len(EDGES))
    new, expected = telling(rng, 100)
    predicted = words.probabilities(encoded(new))
    assert (predicted.argmax(axis=1) == expected).all()
    assert predicted.sum(axis=1) == pytest.approx(1)
    assert (predicted[:, [0, 2]] < 1e-4).all()  # no answer was ever so long


def test_tfidf_equals_scikit_learn():
    """TF-IDF with logistic regression, by the library's own classes."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 30, rng.integers(1, 12)).tolist() for _ in range(200)]
    true = np.minimum(3, np.array([row[0] for row in ids]) // 8)
    texts = [" ".join(f"t{token}" for token in row) for row in ids]
    terms = TfidfVectorizer(
        ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"\S+"
    ).fit(texts)
    theirs = LogisticRegression(C=2, max_iter=200).fit(terms.transform(texts), true)
    ours = TfIdfClassifier.fit(encoded(ids), true, len(EDGES)).probabilities(encoded(ids))
    assert ours == pytest.approx(theirs.predict_proba(terms.transform(texts)), abs=2e-3)


def test_tfidf_reads_a_text_of_several_models_once():
    rng = np.random.default_rng(2)
    ids, true = telling(rng, 100)
    who = np.array([[0.0], [1.0]])
    twice = Encoded(ids, None, np.repeat(np.arange(100), 2), np.tile(who, (100, 1)).astype("f4"))
    words = TfIdfClassifier.fit(twice, np.repeat(true, 2) - np.tile([0, 1], 100), len(EDGES))
    predicted = words.probabilities(twice).argmax(axis=1)
    assert (predicted == np.repeat(true, 2) - np.tile([0, 1], 100)).mean() > 0.95


def test_tfidf_ignores_unseen_tokens():
    ids, true = telling(np.random.default_rng(3), 100)
    words = TfIdfClassifier.fit(encoded(ids), true, len(EDGES))
    nothing, unknown = words.probabilities(encoded([[], [10_000, 10_001]]))
    assert nothing == pytest.approx(unknown)


def test_tfidf_survives_its_tensors():
    ids, true = telling(np.random.default_rng(4), 60)
    words = TfIdfClassifier.fit(encoded(ids), true, len(EDGES))
    again = TfIdfClassifier.of_tensors(words.tensors(), numbers=4, buckets=4)
    assert (again.probabilities(encoded(ids)) == words.probabilities(encoded(ids))).all()
    for lost in words.tensors():
        some = {name: value for name, value in words.tensors().items() if name != lost}
        with pytest.raises(ValueError, match="must have the shapes"):
            TfIdfClassifier.of_tensors(some, numbers=4, buckets=4)
    with pytest.raises(ValueError, match="must have the shapes"):
        TfIdfClassifier.of_tensors(words.tensors(), numbers=3, buckets=4)


def test_tfidf_share_is_large_where_it_alone_helps():
    rng = np.random.default_rng(5)
    true = rng.integers(0, 4, 400)
    knows = np.full((400, 4), 0.1)
    knows[np.arange(400), true] = 0.7
    guesses = rng.dirichlet(np.ones(4), 400)
    tokens = np.array([2, 10, 20, 40])[true]
    assert share_of(guesses, PredictedDistributions.of_buckets(EDGES, knows), tokens) == 0
    assert share_of(knows, PredictedDistributions.of_buckets(EDGES, guesses), tokens) > 0.8
    half = PredictedDistributions.of_buckets(EDGES, knows).blended(knows, 0.5)
    assert half.bucket_probabilities() == pytest.approx(knows)
