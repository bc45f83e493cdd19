"""Options that select the machines and processes: `--executor`, `--address`, `--jobs`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ...workloads.errors import SloBenchError, UnknownNameError

if TYPE_CHECKING:
    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.execution.workers import WorkerPool


def executor_of(name: str, address: str | None) -> OnRay | None:
    """The cluster, or None: this machine.

    Raises:
        SloBenchError: there is no such executor, or an address for none.
    """
    if name == "ray":
        from ...harness.experiments.execution.ray_pool import OnRay

        return OnRay(address)
    if name != "local":
        raise UnknownNameError("--executor", name, ("local", "ray"))
    if address is not None:
        raise SloBenchError("--address is that of a Ray cluster: add --executor ray")
    return None


def pool_of(where: OnRay | None, jobs: int) -> AbstractContextManager[WorkerPool | None]:
    """Return the executor of simulations: the Ray cluster, `jobs` local processes, or None (this
    process) for a single job.

    Raises:
        SloBenchError: there are less jobs than one.
    """
    if where is not None:
        return where.pool()
    if jobs == 1:
        return nullcontext()
    from ...harness.experiments.execution.local_pool import LocalPool

    return LocalPool(jobs)
