#!/usr/bin/env python3
"""Print a circle of modules of the package that import each other, if there is one: exit code 1.

Every import statement counts, also inside functions and under `TYPE_CHECKING`. The package itself
is left out: it only repeats public names. That folders import one way is in the contracts of
`[tool.importlinter]` of pyproject.toml, which `lint-imports` checks.

Usage: scripts/import_cycles.py [PACKAGE]
"""

from __future__ import annotations

import graphlib
import sys

import grimp


def circle(package: str) -> list[str]:
    """Modules of which each is imported by the next, the first one again at the end; else none.

    `package` is the name of one that can be imported.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    modules = graph.modules - {package}
    imported = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def main(arguments: list[str]) -> int:
    """Print the circle; return the exit code."""
    modules = circle(*(arguments or ["slo_bench"]))
    print(" → ".join(modules) or "no circle between modules")
    return 1 if modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
