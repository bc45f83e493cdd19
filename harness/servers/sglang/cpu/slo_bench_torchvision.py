"""Lets `import torchvision` succeed beside a CPU build of torch.

The torchvision on PyPI is linked against CUDA. Beside torch for CPU its compiled operators do not
load, and the import dies of the missing `nms`. Here it is tried again after the schemas of those
operators have been declared: transforms work, to call the operators is an error. Python imports
this at start-up (`slo_bench_torchvision.pth`); it does nothing until torchvision is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Twice(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
        else:
            return
        import torch

        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _BOXES)
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
        self._loader.exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Twice(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
