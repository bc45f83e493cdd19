"""Whether what a plugin hooks into or calls in a server is still as we know it."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping


def moved(targets: Mapping[str, Iterable[str]]) -> list[str]:
    """What is not as we know it, in words; empty if everything is.

    Args:
        targets: names as `pkgutil.resolve_name` takes them, each with the parameters that come
            first, in this order; of one without any, it is enough that it is there.
    """
    found = (_problem(name, tuple(first)) for name, first in targets.items())
    return [problem for problem in found if problem]


def _problem(name: str, first: tuple[str, ...]) -> str:
    try:
        target = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return f"{name} is gone"
    if not first:
        return ""
    found = tuple(inspect.signature(target).parameters)
    if found[: len(first)] != first:
        return f"{name} takes ({', '.join(found)}), not ({', '.join(first)}, …)"
    return ""
