"""Activation times against those that Prism publishes."""

from __future__ import annotations

import pytest

from slo_bench.predictors.activation import LINK_BYTES_PER_S, LOAD_LINKS, Loader, NaiveStart
from slo_bench.predictors.specs import model

_PUBLISHED_S = {"llama-3.1-8b": (0.7, 1), "qwen2.5-14b": (1.3, 1), "llama-3.1-70b": (1.5, 8)}


def _part(name: str) -> float:
    return model(name).weight_bytes() / _PUBLISHED_S[name][1]


def fitted_bandwidth(links: int) -> float:
    """Bytes a second of one link, least squares of the relative error over the two smaller."""
    parts = [(_part(name), _PUBLISHED_S[name][0]) for name in ("llama-3.1-8b", "qwen2.5-14b")]
    shares = [part_bytes / links / seconds for part_bytes, seconds in parts]
    return sum(share * share for share in shares) / sum(shares)


def test_activation_bandwidth_is_fitted_to_the_two_smaller_models() -> None:
    assert fitted_bandwidth(LOAD_LINKS) == pytest.approx(LINK_BYTES_PER_S, rel=0.01)


def test_activation_time_of_the_largest_model_is_predicted() -> None:
    predicted_s = Loader().activation_s(_part("llama-3.1-70b"), tp=8)
    assert predicted_s == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize("links", [1, 3])
def test_activation_time_with_other_link_counts_is_off(links: int) -> None:
    loader = Loader(links, fitted_bandwidth(links))
    assert loader.activation_s(_part("llama-3.1-70b"), tp=8) != pytest.approx(1.5, rel=0.4)


def test_naive_activation_is_slower_by_the_published_factor() -> None:
    for name, (_, tp) in _PUBLISHED_S.items():
        part = _part(name)
        times = NaiveStart().activation_s(part, tp) / Loader().activation_s(part, tp)
        assert 4.7 < times < 7.2
        if name == "qwen2.5-14b":
            assert times == pytest.approx(5.5, rel=0.05)


def test_activation_uses_at_most_one_link_per_gpu() -> None:
    loader = Loader(links=2, link_bytes_per_s=1e9)
    assert loader.activation_s(4e9, tp=1, node_gpus=1) == 4.0
    assert loader.activation_s(4e9, tp=1, node_gpus=8) == 2.0
    assert loader.activation_s(4e9, tp=2, node_gpus=3) == pytest.approx(8 / 3)
    assert loader.activation_s(4e9, tp=8, node_gpus=8) == 4.0
