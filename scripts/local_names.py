#!/usr/bin/env python3
"""Vague names of variables, parameters and fields: their share, where they stand, and a budget.

Usage: scripts/local_names.py [--root DIR] [--list] [--folder FOLDER]

A vague name tells the history of a value (`found`, `asked`, `made`) and not what it is (`profile`,
`rows`, `bucket`). Counts every binding: assignments, parameters, targets of loops, `with` and
`except`. Exit code 1: there are more than `BUDGET` allows; with fewer, it says that the budget can
fall. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from count_code import tracked_files

VAGUE = {
    *("found", "one", "known", "of", "asked", "made", "told", "own", "given", "wanted", "most"),
    *("seen", "what", "at", "said", "meant", "taken", "got", "had", "it"),
    *("thing", "things", "stuff", "whole_thing"),
}
# Bindings with such a name that may stand. Those of the package are keys of files that are written
# or read; tools, scripts and examples count as the package.
BUDGET = {"package": 5, "tests": 70}


@dataclass(frozen=True)
class Binding:
    """A place that gives a name to a value."""

    file: str
    line: int
    name: str


def bindings(source: str, file: str = "") -> Iterator[Binding]:
    """Every binding of a module but `self` and `cls`."""
    for node in ast.walk(ast.parse(source, filename=file)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Binding(file, node.lineno, node.id)
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield Binding(file, node.lineno, node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield Binding(file, node.lineno, node.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print counts and shares; compare them with the budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--list", action="store_true", help="print every vague binding")
    parser.add_argument("--folder", default="", help="list those below this folder")
    options = parser.parse_args(arguments)
    names: dict[str, Counter[bool]] = {area: Counter() for area in BUDGET}
    for file in tracked_files(options.root):
        area = "tests" if file.startswith("tests/") else "package"
        for binding in bindings((options.root / file).read_text(), file):
            vague = binding.name in VAGUE
            names[area][vague] += 1
            if options.list and vague and file.startswith(options.folder):
                print(f"{file}:{binding.line} {binding.name}")
    status = 0
    for area, counts in names.items():
        number, budget = counts[True], BUDGET[area]
        share = number / counts.total()
        print(f"{area}: {number} of {counts.total()} names are vague ({share:.2%})")
        if number > budget:
            status = 1
            print(f"  the budget is {budget}: name what the values are (--list shows them)")
        elif number < budget:
            print(f"  the budget is {budget}: it can be lowered in this script")
    return status


if __name__ == "__main__":
    sys.exit(main())
