"""A request that a policy lets go before it has begun ends as an error that says so.

vLLM's streams leave out what brings no token, its finish reason with it: a client would see an
empty answer and not know why. So in the process that talks to clients, what the scheduler says of
such a request becomes an error: status 503, or, streaming, an error event of that code.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from ....core.wire import DROPPED, OFFLOADED, REJECTED

# Where vLLM keeps the error that its handlers turn into an answer; it has moved between releases.
_ERRORS = (
    "vllm.exceptions:GenerationError",
    "vllm.entrypoints.openai.engine.protocol:GenerationError",
)


def install(engine: Any) -> None:
    """Wrap `generate` of vLLM's `AsyncLLM`; once, however often it is called."""
    generate = engine.generate
    if hasattr(generate, "slo_bench"):
        return

    @functools.wraps(generate)
    async def telling(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(generate(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                for one in output.outputs:
                    why = one.stop_reason
                    if isinstance(why, str) and why.startswith((REJECTED, DROPPED, OFFLOADED)):
                        raise _error(why)
                yield output

    telling.slo_bench = True  # type: ignore[attr-defined]
    engine.generate = telling


def _error(why: str) -> Exception:
    for name in _ERRORS:
        with contextlib.suppress(ImportError, AttributeError):
            error: Exception = pkgutil.resolve_name(name)(f"{why} by the policy")
            error.status_code = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]
            return error
    return RuntimeError(f"{why} by the policy")
