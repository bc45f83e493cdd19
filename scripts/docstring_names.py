#!/usr/bin/env python3
"""Report docstrings of functions that name a parameter which the function does not have.

Two things are compared with the code: the names under "Args:", and single names in backticks that
are parameters somewhere in the package. Such a name must be known where it stands: to the function,
its class or its module. Names of elsewhere are qualified (`Workload.arrival_s`) or described.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
_BACKTICKED = re.compile(r"(?<!`)`([a-z_][a-z0-9_]*)`(?!`)")
_ARGS = re.compile(r"^Args:\n((?:[ ].*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    \*{0,2}(\w+):", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> set[str]:
    """Names of the parameters of a function."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def names_in(*nodes: ast.AST) -> set[str]:
    """All identifiers in the code of these nodes, and words of their short strings."""
    names: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)) | ast.alias(name=name):
                names.add(name.rpartition(".")[2])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Constant(value=str(text)) if len(text) < 200:
                names |= set(re.findall(r"\w+", text))
    return names


def _members(body: list[ast.stmt]) -> set[str]:
    """Names that statements of a module or class define or import."""
    names = {node.name for node in body if isinstance(node, Function | ast.ClassDef)}
    simple = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.If)
    return names | names_in(*(node for node in body if isinstance(node, simple)))


def _attributes(class_node: ast.ClassDef) -> set[str]:
    """Attributes of `self` that a class uses, its own or those of a base class."""
    return {
        node.attr
        for node in ast.walk(class_node)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }


def unknown_names(
    node: ast.AST,
    everywhere: set[str],
    defined: frozenset[str] = frozenset(),
    around: tuple[Function, ...] = (),
) -> Iterator[tuple[int, str, str]]:
    """Line, function and name of each parameter in a docstring that the function lacks.

    `everywhere`: names of the parameters of all functions; `defined`: names that the module and the
    classes around `node` have; `around`: functions in which it stands.
    """
    if isinstance(node, ast.Module | ast.ClassDef):
        defined |= _members(node.body)
    if isinstance(node, ast.ClassDef):
        defined |= _attributes(node)
    if isinstance(node, Function):
        text = ast.get_docstring(node) or ""
        listed = {name for args in _ARGS.findall(text + "\n") for name in _ENTRY.findall(args)}
        lacking = listed - parameters(node)
        named = set(_BACKTICKED.findall(text)) & everywhere - defined
        if named:
            lacking |= named - names_in(*around, node.args, *node.body[1:]) - {node.name}
        around = (*around, node)
        yield from ((node.lineno, node.name, name) for name in sorted(lacking))
    for inner in ast.iter_child_nodes(node):
        yield from unknown_names(inner, everywhere, defined, around)


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each such name; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the clone")
    root = parser.parse_args(arguments).root
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    everywhere = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        for name in parameters(node)
    }
    problems = [
        f"{path.relative_to(root)}:{line}: the docstring of {function} names {name!r}, which is no "
        "parameter of it"
        for path, tree in trees.items()
        for line, function, name in unknown_names(tree, everywhere)
    ]
    print("\n".join(problems) or f"docstrings of {len(files)} files name what there is")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
