"""Reads the shipped catalogues and lays the user's own files over them."""

from __future__ import annotations

import os
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError, SloBenchError
from ..workloads.file_cache import depends_on, depends_on_variable, file_cache

CATALOGUE_VARIABLE = "SLO_BENCH_CATALOGUE"
SECTIONS = ("gpus", "links", "models")

Entry = dict[str, Any]


def entries(section: str) -> dict[str, Entry]:
    """All entries of `section` (gpus, links, models) by name; `_file` in each says where from.

    A user's TOML file holds tables such as `[gpus.a100-80g]`; its fields replace those of the
    shipped entry of that name, or make a new entry. Files: the one, or all of the folder, that
    SLO_BENCH_CATALOGUE names; else the TOML files of `~/.config/slo-bench`.

    Raises:
        FileFormatError: a file is not TOML or holds something other than these tables.
        SloBenchError: SLO_BENCH_CATALOGUE names nothing that exists.
    """
    return _merged(_user_files())[section]


def price_basis() -> Entry:
    """`basis` and `date` of the prices in the shipped catalogue of GPUs."""
    shipped = files(__package__) / "catalogues" / "gpus.toml"
    found: Entry = tomllib.loads(shipped.read_text(encoding="utf-8"))["prices"]
    return found


def _user_files() -> tuple[Path, ...]:
    for variable in (CATALOGUE_VARIABLE, "XDG_CONFIG_HOME", "HOME"):
        depends_on_variable(variable)
    named = os.environ.get(CATALOGUE_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if path.is_file():
            return (path,)
        if path.is_dir():
            depends_on(path)
            return tuple(sorted(path.glob("*.toml")))
        raise SloBenchError(
            f"{CATALOGUE_VARIABLE} names {named!r}, which does not exist; "
            "it should be a TOML file or a folder of them"
        )
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    folder = home / "slo-bench"
    depends_on(folder)
    return tuple(sorted(folder.glob("*.toml")))


@file_cache(maxsize=8)
def _merged(user_files: tuple[Path, ...]) -> dict[str, dict[str, Entry]]:
    shipped = files(__package__) / "catalogues"
    merged: dict[str, dict[str, Entry]] = {}
    for section in SECTIONS:
        file = shipped / f"{section}.toml"
        table = tomllib.loads(file.read_text(encoding="utf-8"))[section]
        merged[section] = {
            name: {**entry, "_file": f"{section}.toml"} for name, entry in table.items()
        }
    for path in user_files:
        for section, table in _read(path).items():
            for name, entry in table.items():
                known = merged[section].get(name, {})
                merged[section][name] = {**known, **entry, "_file": str(path)}
    return merged


def _read(path: Path) -> dict[str, dict[str, Entry]]:
    depends_on(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(path, None, f"not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from None
    for section, table in content.items():
        if section not in SECTIONS:
            expected = ", ".join(f"[{name}.NAME]" for name in SECTIONS)
            raise FileFormatError(path, None, f"unknown table [{section}]; use {expected}")
        if not isinstance(table, dict) or not all(isinstance(e, dict) for e in table.values()):
            raise FileFormatError(path, None, f"{section} must hold tables [{section}.NAME]")
    return content
