"""Stands in for `sgl_kernel`, of which there is no CPU build on PyPI.

SGLang imports names from it even where it never calls them. Every name can be imported; to call
one is an error, so that nothing is silently wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0+slo.bench"
__path__: list[str] = []  # a package: `import sgl_kernel.anything` is asked of the finder below


class _Kernel:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Kernel:
        return _kernel(f"{self.__name__}.{name}", name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self.__name__} has no CPU build; this is its stand-in")


def _kernel(path: str, name: str) -> _Kernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(path)


def __getattr__(name: str) -> _Kernel:
    return _kernel(f"sgl_kernel.{name}", name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        prefix = module.__name__
        module.__dict__["__getattr__"] = lambda name: _kernel(f"{prefix}.{name}", name)


sys.meta_path.append(_Finder())
