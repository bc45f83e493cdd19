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
    seen = [(_part(name), _PUBLISHED_S[name][0]) for name in ("llama-3.1-8b", "qwen2.5-14b")]
    shares = [part_bytes / links / seconds for part_bytes, seconds in seen]
    return sum(share * share for share in shares) / sum(shares)


def test_the_bandwidth_is_that_of_the_two_smaller_models() -> None:
    assert fitted_bandwidth(LOAD_LINKS) == pytest.approx(LINK_BYTES_PER_S, rel=0.01)


def test_it_predicts_the_largest() -> None:
    predicted_s = Loader().activation_s(_part("llama-3.1-70b"), tp=8)
    assert predicted_s == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize("links", [1, 3])
def test_another_number_of_links_would_not(links: int) -> None:
    loader = Loader(links, fitted_bandwidth(links))
    assert loader.activation_s(_part("llama-3.1-70b"), tp=8) != pytest.approx(1.5, rel=0.4)


def test_a_naive_start_takes_as_many_times_longer_as_published() -> None:
    for name, (_, tp) in _PUBLISHED_S.items():
        part = _part(name)
        times = NaiveStart().activation_s(part, tp) / Loader().activation_s(part, tp)
        assert 4.7 < times < 7.2
        if name == "qwen2.5-14b":
            assert times == pytest.approx(5.5, rel=0.05)


def test_a_node_has_no_more_links_than_gpus() -> None:
    loader = Loader(links=2, link_bytes_per_s=1e9)
    assert loader.activation_s(4e9, tp=1, node_gpus=1) == 4.0
    assert loader.activation_s(4e9, tp=1, node_gpus=8) == 2.0
    assert loader.activation_s(4e9, tp=2, node_gpus=3) == pytest.approx(8 / 3)
    assert loader.activation_s(4e9, tp=8, node_gpus=8) == 4.0
