"""The compiled core: what its classes tell the compiler.

`scripts/compile_core.py` compiles the modules of the simulator's inner loop; the same source runs
uncompiled (docs/development.md, "Compiled core").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**attributes: Any) -> Callable[[type], type]:
        """Attributes of a class that only the compiler reads; no package is needed to run."""
        return lambda decorated: decorated


__all__ = ["mypyc_attr"]
