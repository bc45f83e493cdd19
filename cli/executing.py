"""Where work is done: `--executor` and `--address`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..workloads.errors import SloBenchError, UnknownNameError

if TYPE_CHECKING:
    from ..harness.on_ray import OnRay


def executor_of(name: str, address: str | None) -> OnRay | None:
    """The cluster, or None: this machine.

    Raises:
        SloBenchError: there is no such executor, or an address for none.
    """
    if name == "ray":
        from ..harness.on_ray import OnRay

        return OnRay(address)
    if name != "local":
        raise UnknownNameError("--executor", name, ("local", "ray"))
    if address is not None:
        raise SloBenchError("--address is that of a Ray cluster: add --executor ray")
    return None
