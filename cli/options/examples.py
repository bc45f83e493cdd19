"""Format the examples printed below a command's help."""

from __future__ import annotations

from collections.abc import Sequence


def epilog(examples: Sequence[str]) -> str:
    """Each example on a line of its own, which blank lines between them achieve."""
    return "\n\n".join(["Examples:", *examples])
