"""Loading, computing and storing KV layer by layer, all three at once.

Source: BanaServe (docs/papers.md), §4.3.3, Eq. 4-10 to 4-14, Fig. 4-5.
"""

from __future__ import annotations


def pipeline_s(layers: int, load_s: float, compute_s: float, store_s: float = 0.0) -> float:
    """Seconds until the last layer is computed; each argument is the time of all layers.

    While layer i is computed, the KV of layer i + 1 is loaded and that of layer i - 1 stored, each
    over a channel of its own. The slowest of the three sets the pace; the first layer has to be
    loaded before anything can be computed. The last layer is stored beside what comes next.
    """
    pace_s = max(load_s, compute_s, store_s)
    return (load_s + (layers - 1) * pace_s + compute_s) / layers
