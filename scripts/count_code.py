#!/usr/bin/env python3
"""Lines of code per folder: without blank lines, comments and docstrings.

Usage: scripts/count_code.py [--root DIR] [--depth N]

Counts the Python files that git tracks. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WITHOUT = "without tests and tools"


def code_lines(source: str) -> int:
    """How many lines of `source` hold code.

    A line counts once, however much it holds; a string over several lines that is no docstring
    counts with all of them.
    """
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def folder_of(path: str, depth: int) -> str:
    """The first `depth` folders of a file's path; `.` for one at the root."""
    return "/".join(path.split("/")[:-1][:depth]) or "."


def tracked_files(root: Path) -> list[str]:
    """Python files that git tracks below `root`."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "*.py"], check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print modules and lines of every folder and their sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="levels of folders")
    options = parser.parse_args(arguments)
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for name in tracked_files(options.root):
        folder = folder_of(name, options.depth)
        lines[folder] += code_lines((options.root / name).read_text())
        modules[folder] += 1
    width = max(len(WITHOUT), *map(len, lines)) if lines else 0
    print(f"{'folder':{width}}  {'modules':>7}  {'lines':>7}")
    package = [folder for folder in lines if folder.split("/")[0] not in ("tests", "tools")]
    for folder in sorted(lines):
        print(f"{folder:{width}}  {modules[folder]:7,}  {lines[folder]:7,}")
    for label, folders in ((WITHOUT, package), ("all", list(lines))):
        counts = sum(modules[f] for f in folders), sum(lines[f] for f in folders)
        print(f"{label:{width}}  {counts[0]:7,}  {counts[1]:7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
