"""The servers that can be installed and started, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ....workloads.errors import UnknownNameError
from .recipe import Recipe
from .sglang import SGLANG
from .vllm import VLLM

RECIPES: Mapping[str, Recipe] = {recipe.backend: recipe for recipe in (VLLM, SGLANG)}


def recipe(backend: str) -> Recipe:
    """How this server is installed and started.

    Raises:
        UnknownNameError: no such server.
    """
    if backend not in RECIPES:
        raise UnknownNameError("backend", backend, RECIPES)
    return RECIPES[backend]
