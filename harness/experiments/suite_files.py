"""The experiments that come with the package, as files."""

from __future__ import annotations

from pathlib import Path


def suites() -> dict[str, Path]:
    """The experiments that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "suites").glob("*.toml"))}
