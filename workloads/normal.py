"""The standard normal distribution over arrays, which numpy does not offer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def _poly(x: Floats, *coefficients: float) -> Floats:
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def quantile(u: Floats) -> Floats:
    """Inverse cumulative distribution at 0 < u < 1, to about seven digits.

    Source: M. J. Wichura, "Algorithm AS 241: The percentage points of the normal
    distribution", Applied Statistics 37 (1988), routine PPND7.
    """
    u = np.clip(u, 1e-300, 1 - 1e-16)
    q = u - 0.5
    r = 0.180625 - q * q
    middle = (
        q
        * _poly(r, 3.3871327179, 50.434271938, 159.29113202, 59.109374720)
        / _poly(r, 1.0, 17.895169469, 78.757757664, 67.187563600)
    )
    r = np.sqrt(-np.log(np.minimum(u, 1 - u)))
    near = _poly(r - 1.6, 1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103) / _poly(
        r - 1.6, 1.0, 0.73700164250, 0.12021132975
    )
    far = _poly(r - 5, 6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997) / _poly(
        r - 5, 1.0, 0.24197894225, 0.012258202635
    )
    tail = np.where(r <= 5, near, far)
    return np.where(np.abs(q) <= 0.425, middle, np.sign(q) * tail)


def cumulative(z: Floats) -> Floats:
    """P(Z <= z), to 1e-7.

    Source: M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 26.2.17.
    """
    t = 1 / (1 + 0.2316419 * np.abs(z))
    upper = (
        np.exp(-z * z / 2)
        / np.sqrt(2 * np.pi)
        * t
        * _poly(t, 0.319381530, -0.356563782, 1.781477937, -1.821255978, 1.330274429)
    )
    below: Floats = np.where(z >= 0, 1 - upper, upper)
    return below
