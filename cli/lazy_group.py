"""A command group that imports a command's module when the command is looked up."""

from __future__ import annotations

import ast
from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import get_data
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ..workloads.errors import SloBenchError
from .options.parameters import epilog
from .short_help import ShortHelp, help_all_option, short_help
from .single_values import parse_single
from .trust_code import COMMANDS, trust_option


class LazyCommands(UserDict[str, Any]):
    """Commands of a group by name, in the order of the help; None until one is looked up.

    A command is the function of its name in the module of its name within
    `slo_bench.cli.commands`, or the module's `app`: a `typer.Typer` group or a function. A
    function's examples are its module's `EXAMPLES`; its short help shows its module's `SHOWN`, if
    any.
    """

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = self._make(name)
        return self.data[name]

    @staticmethod
    def _make(name: str) -> Any:
        module_name = name.replace("-", "_")
        module = import_module(f".commands.{module_name}", __package__)
        group_or_function = getattr(module, "app", None) or getattr(module, module_name)
        if isinstance(group_or_function, typer.Typer):
            app = group_or_function
        else:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            shown = getattr(module, "SHOWN", None)
            cls = None if shown is None else short_help(shown)
            app.command(name, epilog=epilog(module.EXAMPLES), cls=cls)(group_or_function)
        command = get_command(app)
        command.name = name
        for subcommand in getattr(command, "commands", {"": command}).values():
            subcommand.get_params = partial(_sparing, subcommand.get_params)
            subcommand.parse_args = partial(parse_single, subcommand.parse_args, subcommand)
            if name in COMMANDS:
                subcommand.params.append(trust_option())
            if isinstance(subcommand, ShortHelp):
                subcommand.params.append(help_all_option())
        return command


def _sparing(params_of: Callable[[Any], list[Any]], context: Any) -> list[Any]:
    """The parameters of a command, which keep a missing value, and text for text, as it is: typer
    builds a pydantic validator for each otherwise, a tenth of the start of `slo-bench run`.
    """
    params = params_of(context)
    for parameter in params:
        if not isinstance(parameter.process_value, partial):
            parameter.process_value = partial(_process, parameter, parameter.process_value)
    return params


def _process(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if (kind is Path and value == "") or (kind == list[Path] and "" in (value or ())):
        name = max(parameter.opts, key=len)
        name = name if name.startswith("-") else parameter.metavar.strip("[].")
        raise SloBenchError(f"{name} is an empty path, which would be this folder: write . for it")
    if parameter.required if value is None else not (kind is str and isinstance(value, str)):
        return convert(context, value)
    if value is None and (parameter.multiple or parameter.nargs == -1):
        value = ()
    callback = parameter.callback
    return value if callback is None else callback(context, parameter, value)


class LazyGroup(TyperGroup):
    """Command group with the commands of these names."""

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands(dict.fromkeys(self.names))

    def get_params(self, ctx: Any) -> list[Any]:
        """The group's own parameters, those that typer adds included."""
        return _sparing(super().get_params, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options by `parse_single`."""
        return parse_single(super().parse_args, self, ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with each command's text, and import none of them."""
        commands = self.commands
        self.commands = {name: TyperCommand(name, help=help_text(name)) for name in self.names}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = commands


def help_text(name: str) -> str:
    """The help of a command of `slo_bench.cli.commands`, read from its module's source."""
    module_name = name.replace("-", "_")
    source = get_data(__package__, f"commands/{module_name}.py") or ""  # also within a zip file
    texts: dict[str, str] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=function):
                texts[function] = ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id="app")], value=ast.Name(id=function)):
                return texts[function]
            case ast.Assign(targets=[ast.Name(id="app")], value=ast.Call(keywords=keywords)):
                [text] = [ast.literal_eval(k.value) for k in keywords if k.arg == "help"]
                return str(text)
    return texts[module_name]
