"""Seconds until a model with weights in host memory can serve.

Source: Prism (see docs/papers.md), §5.2 (engine pool, parallel loading) and Fig. 9, on H100.

Published: 0.7 s (8B), 1.3 s (14B), 1.5 s (70B at tensor parallelism 8); 4.8 to 7.1 times faster
than a naive start, 5.5 times for 14B. `LINK_BYTES_PER_S` is fitted on the first two alone (least
squares of the relative error); the third is then predicted: every GPU loads its own eighth. The
paper does not say over how many GPUs' links one GPU's weights come; with one or three the third
would be off by half, so `LOAD_LINKS` is two.
"""

from __future__ import annotations

from dataclasses import dataclass

LOAD_LINKS = 2
LINK_BYTES_PER_S = 11.4e9  # of the 49 GB/s that a PCIe 5 link copies: the host is the narrow part

# A naive start makes an engine (and, for several GPUs, a group of processes), then copies over one
# link. Three numbers fitted on three: 7.1 times for 8B, 5.5 for 14B, 4.8 for 70B, where only the
# middle one is printed with its model. No prediction.
NAIVE_ENGINE_S = 2.4
NAIVE_GROUP_S = 2.2
NAIVE_BYTES_PER_S = 6.2e9


@dataclass(frozen=True, slots=True)
class Loader:
    """Prism's way: an engine from the pool, weights in parallel over `links` GPUs' host links."""

    links: int = LOAD_LINKS
    link_bytes_per_s: float = LINK_BYTES_PER_S

    def activation_s(self, part_bytes: float, tp: int = 1, node_gpus: int = 8) -> float:
        """Seconds to bring `part_bytes` to each of `tp` GPUs of a node.

        A node has one link a GPU: what its GPUs load at once shares them.
        """
        return tp * part_bytes / (self.links_used(tp, node_gpus) * self.link_bytes_per_s)

    def links_used(self, tp: int, node_gpus: int) -> int:
        """Host links that a load is spread over."""
        return min(max(tp * self.links, 1), max(node_gpus, tp))


@dataclass(frozen=True, slots=True)
class NaiveStart:
    """A server that is started: engine, process group, weights over each GPU's own link."""

    engine_s: float = NAIVE_ENGINE_S
    group_s: float = NAIVE_GROUP_S
    link_bytes_per_s: float = NAIVE_BYTES_PER_S

    def activation_s(self, part_bytes: float, tp: int = 1, node_gpus: int = 8) -> float:
        """Seconds until `tp` GPUs with `part_bytes` each serve."""
        group_s = self.group_s if tp > 1 else 0.0
        return self.engine_s + group_s + part_bytes / self.link_bytes_per_s

    def links_used(self, tp: int, node_gpus: int) -> int:
        """Host links that loads use: each GPU's own."""
        return tp
