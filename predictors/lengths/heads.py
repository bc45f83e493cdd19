"""What the last layer says of a length, and how wrong it was: three ways."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .distribution import Floats, PredictedDistributions, log_edges

_LEAST = 1e-7
_LEVELS = np.arange(0.05, 0.951, 0.05)  # of the quantile head
_DOUBT = 0.3  # in log(1 + tokens): so much longer or shorter an answer might have been
_USUAL = 4.0  # log(1 + tokens) of an answer of average length: where quantiles begin


class Head(Protocol):
    """Reads the network's raw outputs, shape (n, outputs)."""

    outputs: int

    def __init__(self, edges: tuple[int, ...]) -> None: ...

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """Mean loss for true lengths in tokens, shape (n,)."""

    def mean_log(self, raw: Tensor) -> Tensor:
        """Mean of log(1 + tokens), shape (n,)."""

    def lengths(self, raw: Tensor) -> PredictedDistributions:
        """Predicted distributions of the length."""


class Softmax:
    """A probability for each bucket; cross-entropy with labels that know their neighbours.

    An answer's label is a normal distribution of log(1 + tokens) about its length, so one near an
    edge is half its neighbour's (Imani and White 2018).
    """

    def __init__(self, edges: tuple[int, ...]) -> None:
        self._edges = edges
        self._inner = torch.tensor(log_edges(edges)[1:-1], dtype=torch.float32)
        self.outputs = len(edges)

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        length = tokens.log1p()[:, None]
        below = torch.special.ndtr((self._inner.to(length.device) - length) / _DOUBT)
        ends = torch.zeros_like(length), torch.ones_like(length)
        return functional.cross_entropy(raw, torch.cat([ends[0], below, ends[1]], 1).diff(dim=1))

    def mean_log(self, raw: Tensor) -> Tensor:
        return raw.softmax(1) @ _middles(self._edges).to(raw.device)

    def lengths(self, raw: Tensor) -> PredictedDistributions:
        return PredictedDistributions.of_buckets(self._edges, _numpy(raw.softmax(1)))


class Ordinal:
    """One score against rising thresholds: a cumulative link with a spread of its own.

    Outputs are score, log spread, the first threshold and the steps to the others, so thresholds
    differ between requests but always rise.
    """

    def __init__(self, edges: tuple[int, ...]) -> None:
        self._edges = edges
        self._inner = torch.tensor(edges[1:], dtype=torch.float32)
        self.outputs = len(edges) + 1

    def _probabilities(self, raw: Tensor) -> Tensor:
        score, spread = raw[:, :1], raw[:, 1:2].clamp(-2, 2).exp()
        steps = functional.softplus(raw[:, 3:] + 0.5)
        thresholds = raw[:, 2:3] - 3 + torch.cat([torch.zeros_like(score), steps.cumsum(1)], 1)
        below = torch.sigmoid((thresholds - score) * spread)
        ends = torch.zeros_like(score), torch.ones_like(score)
        cumulative = torch.cat([ends[0], below, ends[1]], 1)
        return cumulative.diff(dim=1).clamp_min(_LEAST)

    def loss(self, raw: Tensor, tokens: Tensor) -> Tensor:
        true = torch.bucketize(tokens, self._inner.to(tokens.device), right=True)
        return functional.nll_loss(self._probabilities(raw).log(), true)

    def mean_log(self, raw: Tensor) -> Tensor:
        return self._probabilities(raw) @ _middles(self._edges).to(raw.device)

    def lengths(self, raw: Tensor) -> PredictedDistributions:
        return PredictedDistributions.of_buckets(self._edges, _numpy(self._probabilities(raw)))


class Quantile:
    """Nineteen quantiles of log(1 + tokens), 5 % to 95 %; pinball loss."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        self._edges = edges
        self._levels = torch.tensor(_LEVELS, dtype=torch.float32)
        self.outputs = len(_LEVELS)

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


def _middles(edges: tuple[int, ...]) -> Tensor:
    """Middle of each bucket in log(1 + tokens)."""
    bounds = torch.tensor(log_edges(edges), dtype=torch.float32)
    return (bounds[1:] + bounds[:-1]) / 2


HEADS: dict[str, type[Head]] = {"softmax": Softmax, "ordinal": Ordinal, "quantile": Quantile}


def _numpy(values: Tensor) -> Floats:
    found: Floats = values.detach().double().cpu().numpy()
    return found
