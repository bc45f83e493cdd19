"""vLLM's entry point `vllm.general_plugins`: every process of the server calls `register`."""

from __future__ import annotations

from ..contract import StepLog, asked_for, num_cpu_blocks


def register() -> None:
    """Make the swap connector known and drops visible, if this vLLM is as we know it.

    Does nothing unless a policy is asked for, or a log of the steps without one.

    Raises:
        RuntimeError: something that we hook into has moved. vLLM only logs this; but then the
            scheduler never announces itself, and whoever started the server finds that out.
    """
    if asked_for() is None:
        _watch()
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from . import timeouts as goodbye
    from .connector import NAME
    from .hooks import moved, vllm_version

    problems = moved(swap=num_cpu_blocks() > 0)
    if problems:
        raise RuntimeError(
            f"slo-bench does not know this vLLM ({vllm_version()}): {'; '.join(problems)}"
        )
    from vllm.v1.engine.async_llm import AsyncLLM

    goodbye.install(AsyncLLM)
    registered = getattr(KVConnectorFactory, "_registry", {})
    if NAME not in registered:  # processes may come here more than once
        module = f"{__package__}.connector"
        KVConnectorFactory.register_connector(NAME, module, NAME)


def _watch() -> None:
    """Log the steps of a scheduler that is left as it is, where that is asked for."""
    log = StepLog()
    if not log.wanted:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    from .hooks import moved, vllm_version
    from .steps import StepWatch

    if problems := moved(watched=True):
        raise RuntimeError(
            f"slo-bench does not know this vLLM ({vllm_version()}): {'; '.join(problems)}"
        )
    if not hasattr(Scheduler, "slo_bench_watch"):  # a process may come here more than once
        Scheduler.slo_bench_watch = StepWatch(log)
        Scheduler.slo_bench_watch.install(Scheduler)
