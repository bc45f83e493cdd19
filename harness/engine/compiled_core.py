"""Whether this installation has the compiled core (docs/development.md, "Compiled core")."""

from __future__ import annotations

from ..core.queues import wait_queue


def core_is_compiled() -> bool:
    """Whether the loop of this installation runs as machine code."""
    return not str(wait_queue.__file__).endswith(".py")
