"""Help of commands with many options: `--help` shows the main ones, `--help-all` all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperOption

from .options.parameters import added_flag

EXAMPLES = 4  # of a command, in its short help


class ShortHelp(TyperCommand):
    """A command whose `--help` shows the options `shown` alone."""

    shown: ClassVar[frozenset[str]] = frozenset()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; options that are not shown are hidden meanwhile."""
        options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
        less = [
            option for option in options if not self.shown & set(option.opts) and not option.hidden
        ]
        examples = self.epilog
        for option in less:
            option.hidden = True
        self.epilog = "\n\n".join((examples or "").split("\n\n")[: 1 + EXAMPLES])
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = examples
            for option in less:
                option.hidden = False
        typer.echo(f" {len(less)} more options: {ctx.command_path} --help-all\n")

    def write_all(self, ctx: Any) -> None:
        """Write the help with every option."""
        super().format_help(ctx, ctx.make_formatter())


def short_help(shown: Sequence[str]) -> type[TyperCommand]:
    """The class of a command whose `--help` shows these options, such as "--rates", alone."""
    names = frozenset((*shown, "--help-all"))
    return type("ShortHelpCommand", (ShortHelp,), {"shown": names})


def help_all_option() -> Any:
    """The option `--help-all`, which prints the help with every option and exits."""
    option = added_flag("--help-all", "Show every option and exit.", _write_all)
    option.is_eager = True
    return option


def _write_all(context: Any, option: Any, is_set: bool) -> None:
    if is_set and not context.resilient_parsing:
        context.command.write_all(context)
        raise typer.Exit
