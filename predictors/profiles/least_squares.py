"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np

from ...workloads.arrays import Floats

_ALIKE = 1e-9


def non_negative(terms: Floats, values: Floats) -> Floats:
    """Least squares under x >= 0 (Lawson and Hanson, Solving Least Squares Problems, ch. 23).

    Of terms that explain as much as each other the first is taken (SciPy's `nnls` may take any).
    """
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1.0
    scaled = terms / scale
    free = np.zeros(scaled.shape[1], dtype=np.bool_)
    x = np.zeros(scaled.shape[1])
    for _ in range(10 * len(x)):
        gain = scaled.T @ (values - scaled @ x)
        gain[free] = -np.inf
        best = int(np.argmax(gain >= (1 - _ALIKE) * gain.max()))
        if gain[best] <= 1e-10 * len(values):
            break
        free[best] = True
        while True:
            trial = np.zeros(len(x))
            trial[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            # Go from x towards the trial until the first coefficient reaches zero.
            falling = free & (trial <= 0)
            share = float((x[falling] / (x[falling] - trial[falling])).min())
            x = x + share * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                break
        x = trial if free.any() else x
    return np.asarray(x / scale)
