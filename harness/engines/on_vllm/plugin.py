"""vLLM's entry point `vllm.general_plugins`: every process of the server calls `register`."""

from __future__ import annotations

from ..plugged import asked_for, host_blocks


def register() -> None:
    """Make the swap connector known, after checking that this vLLM is as we know it.

    Does nothing unless a policy is asked for.

    Raises:
        RuntimeError: something that we hook into has moved. vLLM only logs this; but then the
            scheduler never announces itself, and whoever started the server finds that out.
    """
    if asked_for() is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .connector import NAME
    from .hooks import moved, vllm_version

    problems = moved(swap=host_blocks() > 0)
    if problems:
        raise RuntimeError(
            f"slo-bench does not know this vLLM ({vllm_version()}): {'; '.join(problems)}"
        )
    registered = getattr(KVConnectorFactory, "_registry", {})
    if NAME not in registered:  # processes may come here more than once
        module = f"{__package__}.connector"
        KVConnectorFactory.register_connector(NAME, module, NAME)
