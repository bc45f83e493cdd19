"""KV that moves between instances: what carries it, and the blocks that wait for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ....predictors.specs import LinkSpec
from ...core.instance import Instance
from ...core.network import InstanceNetwork, SwitchNetwork
from ...core.state import Phase, RequestState

_SWAPPED, _WAITING, _DONE = Phase.SWAPPED, Phase.WAITING, Phase.DONE


class KvNetwork:
    """KV over a network: every GPU of an instance sends its part over a link of its own."""

    def __init__(self, over: LinkSpec, network: InstanceNetwork | None = None) -> None:
        """`network` carries the bytes; by default a switch between all instances, with links
        `over`.
        """
        self.network: InstanceNetwork = network or SwitchNetwork(over)

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        moved_bytes = self.bytes_on_a_link(source, target, kv_tokens)
        return self.network.send(source.number, target.number, moved_bytes, now_s)

    @staticmethod
    def bytes_on_a_link(source: Instance, target: Instance, kv_tokens: int) -> int:
        """What the busiest link carries: the side with fewer GPUs sets it."""
        there, here = source.placement, target.placement
        gpus = there.gpus if there is here else min(there.gpus, here.gpus)
        return kv_tokens * there.kv_bytes_per_token // gpus


@dataclass
class ReservedBlocks:
    """Blocks that are set aside at instances for requests that have not entered there yet."""

    promised: defaultdict[int, dict[RequestState, int]] = field(  # in order
        default_factory=lambda: defaultdict(dict)
    )
    total: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def reserve(self, r: RequestState, kv_tokens: int, instance: Instance) -> bool:
        """Reserve blocks for so much KV of `r` and its next token, if it could enter with them if
        no other came.
        """
        blocks = kv_tokens // instance.kv_manager.block_size + 1
        if not instance.has_free(blocks + self.blocks(instance)):
            return False
        index = instance.index
        self.promised[index][r] = blocks
        self.total[index] += blocks
        return True

    def blocks(self, instance: Instance) -> int:
        """Reserved blocks of one instance. A reservation ends when its request has entered or has
        no KV to transfer; that is detected once all earlier reservations have ended, too.
        """
        index = instance.index
        promised = self.promised.get(index)
        while promised:
            r = next(iter(promised))
            phase = r.phase
            if phase is _SWAPPED or not (
                r.instance == index or phase is _WAITING or phase is _DONE
            ):
                return self.total[index]
            self.total[index] -= promised.pop(r)
        return 0

    def drop(self, r: RequestState, instance: Instance) -> None:
        """Cancel the reservation of `r`."""
        self.total[instance.index] -= self.promised[instance.index].pop(r, 0)
