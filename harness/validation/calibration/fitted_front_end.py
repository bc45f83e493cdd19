"""The front end of a server, learned from a client's log: what of the TTFT is no step.

With the step times of a calibration the simulation tells when the engine had each first token; what
the client waited longer is the front end's. It is fitted by a constant and a share a prompt token.
Requests that come together queue in one thread; how long each holds it is the time of a short list
whose simulation is nearest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ....predictors.operators.front_end import FrontEnd
from ....workloads.arrays import Floats, Mask
from .equations import CLOCK_S, SHARE

_REQUEST_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
# By how much a server's is usually another than the catalogue's: requests that come alone do not
# tell it from the constant.
_SPREAD = math.log(3)


class Waited(NamedTuple):
    """Of requests: tokens of the prompt, TTFT as measured, and without the time of passing."""

    prompt_tokens: Floats
    real_s: Floats
    engine_s: Floats


def fitted_front_end(
    usual: FrontEnd,
    waited_with: Callable[[FrontEnd], Sequence[Waited]],
    chosen: Sequence[Mask],
    first_s: float | None = None,
) -> FrontEnd:
    """The front end that is nearest to the requests `chosen` of each log.

    Args:
        usual: of the server by the catalogue; it stands where a log tells nothing.
        waited_with: the TTFTs of each log, simulated with a front end that only queues.
        chosen: requests of each log.
        first_s: how long each request holds the thread where the search begins; by default that of
            the catalogue.
    """
    tried: dict[int, tuple[float, FrontEnd]] = {}

    def loss(place: int) -> float:
        if place not in tried:
            queued = FrontEnd(usual.server, _REQUEST_S[place], 0.0, 0.0)
            logs = zip(waited_with(queued), chosen, strict=True)
            columns = zip(*((c[rows] for c in waited) for waited, rows in logs), strict=True)
            waited = Waited(*(np.concatenate(column) for column in columns))
            tried[place] = _fitted(usual, _REQUEST_S[place], waited)
        return tried[place][0]

    begin_s = usual.request_s if first_s is None else first_s
    best = int(np.argmin(np.abs(np.array(_REQUEST_S) - begin_s)))
    while True:
        beside = [place for place in (best - 1, best + 1) if 0 <= place < len(_REQUEST_S)]
        nearer = min(beside, key=loss)
        if loss(nearer) >= loss(best):
            return tried[best][1]
        best = nearer


def _fitted(usual: FrontEnd, request_s: float, waited: Waited) -> tuple[float, FrontEnd]:
    """Twice the loss, and the front end with its least."""
    from scipy.optimize import least_squares

    late_s = waited.real_s - waited.engine_s
    parts_s = np.stack(
        [np.full(len(late_s), usual.latency_s), usual.token_s * waited.prompt_tokens], axis=1
    )
    weight = 1 / (CLOCK_S + SHARE * waited.real_s)

    def residuals(shares: Floats) -> Floats:
        return np.concatenate([weight * (parts_s @ shares - late_s), shares - 1])

    solution = least_squares(residuals, np.ones(2), loss="cauchy", bounds=(0.0, 100.0))
    latency, token = solution.x.tolist()
    learned = dataclasses.replace(
        usual,
        request_s=request_s,
        latency_s=round(latency * usual.latency_s, 6),
        token_s=round(token * usual.token_s, 9),
    )
    another = math.log(request_s / usual.request_s) / _SPREAD
    return 2 * float(solution.cost) + another**2, learned
