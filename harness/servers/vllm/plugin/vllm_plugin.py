"""vLLM's entry point `vllm.general_plugins`: every process of the server calls `register`.

vLLM's streams leave out an output without a token, and its finish reason with it: the client of a
request that a policy rejected, dropped or offloaded would see an empty answer. So in the process
that talks to clients such an output becomes an error: status 503, or an error event of a stream.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from ....core.wire import DROPPED, FAILED, OFFLOADED, REJECTED
from ...plugin.contract import StepLog, asked_for, num_cpu_blocks
from .hooks import moved, server_version

# Where vLLM keeps the error that its handlers turn into an answer; it has moved between releases.
_ERRORS = (
    "vllm.exceptions:GenerationError",
    "vllm.entrypoints.openai.engine.protocol:GenerationError",
)


def register() -> None:
    """Register the swap connector and the errors of released requests, after checking this vLLM.

    Does nothing unless a policy or a step log is asked for.

    Raises:
        RuntimeError: a target of the hooks has changed. vLLM only logs this, but the scheduler then
            never reports to the process that started the server, which ends with an error.
    """
    if asked_for() is None:
        _watch()
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .connector import NAME

    _check(moved(swap=num_cpu_blocks() > 0))
    from vllm.v1.engine.async_llm import AsyncLLM

    answer_releases(AsyncLLM)
    registered = getattr(KVConnectorFactory, "_registry", {})
    if NAME not in registered:  # processes may come here more than once
        module = f"{__package__}.connector"
        KVConnectorFactory.register_connector(NAME, module, NAME)


def _watch() -> None:
    """Log the steps of an unchanged scheduler, if a step log is asked for."""
    log = StepLog()
    if not log.wanted:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    from .vllm_steps import StepWatch

    _check(moved(watched=True))
    if not hasattr(Scheduler, "slo_bench_watch"):  # a process may come here more than once
        Scheduler.slo_bench_watch = StepWatch(log)
        Scheduler.slo_bench_watch.install(Scheduler)


def _check(problems: list[str]) -> None:
    if problems:
        raise RuntimeError(
            f"slo-bench does not know this vLLM ({server_version()}): {'; '.join(problems)}"
        )


def answer_releases(engine: Any) -> None:
    """Wrap `generate` of vLLM's `AsyncLLM`; a second call does nothing."""
    generate = engine.generate
    if hasattr(generate, "slo_bench"):
        return

    @functools.wraps(generate)
    async def telling(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(generate(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    why = completion.stop_reason
                    if not isinstance(why, str):
                        continue
                    if why.startswith(FAILED):
                        raise _error(why, HTTPStatus.INTERNAL_SERVER_ERROR)
                    if why.startswith((REJECTED, DROPPED, OFFLOADED)):
                        raise _error(f"{why} by the policy", HTTPStatus.SERVICE_UNAVAILABLE)
                yield output

    telling.slo_bench = True  # type: ignore[attr-defined]
    engine.generate = telling


def _error(why: str, status: HTTPStatus) -> Exception:
    for name in _ERRORS:
        with contextlib.suppress(ImportError, AttributeError):
            error: Exception = pkgutil.resolve_name(name)(why)
            error.status_code = status  # type: ignore[attr-defined]
            return error
    return RuntimeError(why)
