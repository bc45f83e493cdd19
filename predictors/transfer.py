"""What it takes to move KV blocks between GPU and host, and between instances."""

from __future__ import annotations

from .placement import Placement
from .specs import LinkSpec


def swap_s(placement: Placement, blocks: int) -> float:
    """Seconds to move `blocks` blocks one way between the GPUs and their hosts.

    One message a GPU, all GPUs at once; 0 for no blocks.
    """
    if blocks <= 0:
        return 0.0
    return placement.host_link.latency_s + blocks * placement.swap_s_per_block


def migrate_s(placement: Placement, kv_tokens: int, over: LinkSpec) -> float:
    """Seconds to send the KV of `kv_tokens` tokens to another instance.

    Every GPU sends its own part over its own link `over`; 0 for no tokens.
    """
    if kv_tokens <= 0:
        return 0.0
    return over.transfer_s(kv_tokens * placement.kv_bytes_per_token / placement.gpus)
