"""A commented experiment file: what is set, and every other setting with its default."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from .experiment_file import TABLES, to_toml
from .schema import ExperimentSchema
from .setting import Declared, declared

_HEAD = """\
# An experiment. Run it with
#
#     slo-bench run {file}
#
# A list compares its values: tp = [1, 2]. Settings behind # have the value that is shown, or none.
"""
_PARAMETERS = """\
# ------------------------------------------------------------ Parameters of systems

# `slo-bench list systems sarathi` shows them.
# [parameters.sarathi]
# chunk_tokens = [512, 2048]
"""
_WIDTH = 100


def template(file: str, experiment: Mapping[str, Any]) -> str:
    """The text of an experiment file with these settings and tables, as read from TOML.

    Settings stand under the headings of `slo-bench run --help-all`; tables come last.
    """
    declarations = declared(ExperimentSchema)
    panels: dict[str, list[str]] = {}
    for path, declaration in declarations.items():
        panels.setdefault(declaration.setting.panel, []).append(path)
    blocks = [_HEAD.format(file=file)]
    opened = ""
    for panel, paths in sorted(panels.items(), key=lambda item: "." in item[1][0]):
        blocks.append(f"# {'-' * 60} {panel}\n")
        for path in paths:
            table, _, name = path.rpartition(".")
            if table != opened:
                blocks.append(f"[{table}]\n")
                opened = table
            values = experiment.get(table, {}) if table else experiment
            blocks.append(_entry(declarations[path], name, values))
    others = {
        name: value for name, value in experiment.items() if name not in {*declarations, *TABLES}
    }
    return "\n".join([*blocks, to_toml(others) if others else _PARAMETERS])


def _entry(declaration: Declared, name: str, values: Mapping[str, Any]) -> str:
    text = textwrap.fill(declaration.help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if name in values:
        return f"{text}\n{name} = {_toml(values[name])}\n"
    several = declaration.several and len(declaration.default or ()) > 1
    default = declaration.default if several else declaration.first
    return f"{text}\n# {name} = {'…' if default is None else _toml(default)}\n"


def _toml(value: Any) -> str:
    """A value on one line; what JSON writes of texts, numbers and lists is TOML as well."""
    return json.dumps(value, ensure_ascii=False)
