#!/usr/bin/env python3
"""Circles between modules and between folders of the package, and imports that go upward.

Every import statement counts, also inside functions and under `TYPE_CHECKING`. The folders and
their order are those of the layers contract in `[tool.importlinter]` of pyproject.toml, so that
there is one list. Needs the standard library alone.

Usage: scripts/import_cycles.py [--folders-only] [--root DIR]

Exit code 1: folders form a circle, an import goes upward, or a module is in no folder of the list.
Circles between modules of one folder are printed and are no error.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One import statement: `importer` at `line` imports `imported`."""

    importer: str
    line: int
    imported: str


@dataclass(frozen=True)
class Layers:
    """The folders of the contract, from the highest to the lowest."""

    package: str
    level: Mapping[str, int]  # of every folder; 0 is the highest

    def folder_of(self, module: str) -> str | None:
        """The folder that holds a module, or None."""
        name = module
        while name:
            if name in self.level:
                return name
            name = name.rpartition(".")[0]
        return None

    def is_upward(self, importer: str, imported: str) -> bool:
        """Whether a folder may not import the other by the contract's order."""
        return self.level[importer] > self.level[imported]


def read_layers(pyproject: Path) -> Layers:
    """The first layers contract of `[tool.importlinter]`, which has one folder a line."""
    settings = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]
    contract = next(c for c in settings["contracts"] if c["type"] == "layers")
    level = {folder: number for number, folder in enumerate(contract["layers"])}
    return Layers(settings["root_package"], level)


def find_modules(root: Path, layers: Layers) -> dict[str, Path]:
    """Name to file of every module: those at the root, and those below the folders' top folders."""
    files = [*root.glob("*.py")]
    for top in {name.split(".")[1] for name in layers.level}:
        files += (root / top).rglob("*.py")
    files_by_module = {}
    for path in sorted(files):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        files_by_module[".".join((layers.package, *parts))] = path
    return files_by_module


def find_imports(modules: Mapping[str, Path]) -> Iterator[Import]:
    """Every import of one module of the package by another."""
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.Import):
                targets: Iterable[str] = (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                targets = _targets(node, package, modules)
            else:
                continue
            for target in targets:
                imported = _longest_known(target, modules)
                if imported is not None and imported != module:
                    yield Import(module, node.lineno, imported)


def _targets(node: ast.ImportFrom, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        if alias.name.startswith("__"):  # `from .. import __version__` needs no module but the root
            continue
        inner = f"{base}.{alias.name}"
        yield inner if inner in modules else base


def _longest_known(name: str, modules: Mapping[str, Path]) -> str | None:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """The shortest circle through each node, each circle once, the shortest first."""
    normalised = set()
    for start in sorted(graph):
        circle = _shortest_circle(graph, start)
        if circle is not None:
            first = circle.index(min(circle))
            normalised.add(circle[first:] + circle[:first])
    return sorted(normalised, key=lambda circle: (len(circle), circle))


def _shortest_circle(graph: Graph, start: str) -> tuple[str, ...] | None:
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for target in sorted(graph.get(node, ())):
            if target == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return tuple(reversed(path))
            if target not in came_from:
                came_from[target] = node
                queue.append(target)
    return None


def graph_of(pairs: Iterable[tuple[str, str]]) -> Graph:
    """Who imports whom, without imports of oneself."""
    graph: Graph = {}
    for importer, imported in pairs:
        if importer != imported:
            graph.setdefault(importer, set()).add(imported)
    return graph


@dataclass(frozen=True)
class Found:
    """What is wrong with the imports of a package."""

    module_circles: list[tuple[str, ...]]
    folder_circles: list[tuple[str, ...]]
    upward: list[Import]
    homeless: list[str]  # modules in no folder of the list
    by_folders: Mapping[tuple[str, str], list[Import]]

    @property
    def is_wrong(self) -> bool:
        """Whether the exit code is 1."""
        return bool(self.folder_circles or self.upward or self.homeless)


def check(root: Path) -> Found:
    """Read the package at `root` and hold its imports against the contract."""
    layers = read_layers(root / "pyproject.toml")
    modules = find_modules(root, layers)
    imports = list(find_imports(modules))
    homeless = [module for module in modules if _is_homeless(module, layers)]
    upward = []
    by_folders: dict[tuple[str, str], list[Import]] = {}
    for edge in imports:
        importer, imported = layers.folder_of(edge.importer), layers.folder_of(edge.imported)
        if importer is None:  # modules at the root re-export what is below
            continue
        if imported is None:
            if _is_at_root(edge.imported, layers):
                upward.append(edge)
        elif importer != imported:
            by_folders.setdefault((importer, imported), []).append(edge)
            if layers.is_upward(importer, imported):
                upward.append(edge)
    return Found(
        module_circles=circles(graph_of((i.importer, i.imported) for i in imports)),
        folder_circles=circles(graph_of(by_folders)),
        upward=upward,
        homeless=homeless,
        by_folders=by_folders,
    )


def _is_at_root(module: str, layers: Layers) -> bool:
    return module == layers.package or module.rpartition(".")[0] == layers.package


def _is_homeless(module: str, layers: Layers) -> bool:
    """Whether a module is in no folder, is not at the root and holds no folders either."""
    holds_folders = any(name.startswith(f"{module}.") for name in layers.level)
    at_root = _is_at_root(module, layers)
    return layers.folder_of(module) is None and not holds_folders and not at_root


def report(findings: Found, package: str, *, folders_only: bool) -> Iterator[str]:
    """The counts, each circle and each wrong import, as lines."""

    def short(name: str) -> str:
        return name.removeprefix(f"{package}.").replace(".", "/")

    def one_circle(circle: Sequence[str]) -> str:
        return "  " + " → ".join(map(short, (*circle, circle[0])))

    if not folders_only:
        yield f"circles between modules: {len(findings.module_circles)}"
        yield from map(one_circle, findings.module_circles)
    yield f"circles between folders: {len(findings.folder_circles)}"
    for circle in findings.folder_circles:
        yield one_circle(circle)
        for pair in zip(circle, (*circle[1:], circle[0]), strict=True):
            example = min(findings.by_folders[pair], key=lambda i: (i.importer, i.line))
            count = len(findings.by_folders[pair])
            yield (
                f"    {short(example.importer)}.py:{example.line} imports "
                f"{short(example.imported)} ({count} such imports)"
            )
    yield f"imports that go upward: {len(findings.upward)}"
    for edge in findings.upward:
        yield f"  {short(edge.importer)}.py:{edge.line} imports {short(edge.imported)}"
    yield f"modules in no folder of the contract: {len(findings.homeless)}"
    for module in findings.homeless:
        yield f"  {short(module)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folders-only", action="store_true", help="leave circles of modules out")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="folder of pyproject.toml"
    )
    options = parser.parse_args(arguments)
    findings = check(options.root)
    package = read_layers(options.root / "pyproject.toml").package
    print("\n".join(report(findings, package, folders_only=options.folders_only)))
    return 1 if findings.is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
