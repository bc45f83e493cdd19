"""`slo-bench tune`: which parameters, instances, placement and server settings carry the
most load?
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ..options.examples import epilog
from .tune_placement import PLACEMENT_EXAMPLES, tune_placement
from .tune_server import EXAMPLES as SERVER_EXAMPLES
from .tune_server import tune_server
from .tune_system import EXAMPLES as SYSTEM_EXAMPLES
from .tune_system import tune_system

_SYSTEM = "system"  # the command for a system or a file


class _SystemsByName(TyperGroup):
    """Command group in which `tune slo-odbs` means `tune system slo-odbs`, for every first word
    that is not a command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command `system` where the first word is not a command."""
        if _SYSTEM in self.commands and args and args[0] not in (*self.commands, "--help", "-h"):
            args = [_SYSTEM, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete command names and the arguments of `tune system`."""
        system = self.commands[_SYSTEM]
        within = system.context_class(system, info_name=_SYSTEM, parent=ctx)
        follows = system.shell_complete(within, incomplete)
        if not incomplete.startswith("-"):
            follows += system.params[0].shell_complete(within, incomplete)
        return [*super().shell_complete(ctx, incomplete), *follows]


app = typer.Typer(
    cls=_SystemsByName,
    help="Search for the parameters, instances, placement and server settings that carry the most.",
    no_args_is_help=True,
    epilog=epilog([*SYSTEM_EXAMPLES, SERVER_EXAMPLES[0], "slo-bench tune system --help"]),
)


@app.callback()
def tune() -> None:
    """Search for the parameters, instances, placement and server settings with the best
    objective.
    """


app.command(_SYSTEM, epilog=epilog(SYSTEM_EXAMPLES))(tune_system)
app.command("server", epilog=epilog(SERVER_EXAMPLES))(tune_server)
app.command("placement", epilog=epilog(PLACEMENT_EXAMPLES))(tune_placement)
app.command(  # UELLM's name for it, by which readers of the paper look for it
    "helr",
    help="The same command as `tune placement`; UELLM calls its procedure HELR.",
    epilog=epilog([PLACEMENT_EXAMPLES[0].replace(" placement ", " helr ")]),
)(tune_placement)
