"""A command group that imports a command's module when the command is looked up."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .options.parameters import epilog
from .short_help import ShortHelp, help_all_option, short_help
from .trust_code import COMMANDS, trust_option


class LazyCommands(MutableMapping[str, Any]):
    """Commands of a group by name, in the order of the help.

    `functions` maps a command's name to "module:name" within `slo_bench.cli.commands`. The name is
    that of a function, whose examples are its module's `EXAMPLES` and whose short help shows its
    module's `SHOWN`, if any, or of a `typer.Typer` group.
    """

    def __init__(self, functions: dict[str, str]) -> None:
        self._functions = functions
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name, self._functions[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._functions.setdefault(name, "")
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._functions[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    @staticmethod
    def _make(name: str, place: str) -> Any:
        module_name, _, attribute = place.partition(":")
        module = import_module(f".commands.{module_name}", __package__)
        group_or_function = getattr(module, attribute)
        if isinstance(group_or_function, typer.Typer):
            app = group_or_function
        else:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            shown = getattr(module, "SHOWN", None)
            cls = None if shown is None else short_help(shown)
            app.command(name, epilog=epilog(module.EXAMPLES), cls=cls)(group_or_function)
        command = get_command(app)
        command.name = name
        for one in getattr(command, "commands", {"": command}).values():
            if name in COMMANDS:
                one.params.append(trust_option())
            if isinstance(one, ShortHelp):
                one.params.append(help_all_option())
        return command


class LazyGroup(TyperGroup):
    """Command group with the commands of `functions`."""

    functions: ClassVar[dict[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands(dict(self.functions))
