"""Commands that refuse what they would drop: an option of one value that is given twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand, TyperOption

from ..workloads.errors import SloBenchError


class SingleValues(TyperCommand):
    """A command whose options of one value may be given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; errors are those of `check_repeated`."""
        check_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def check_repeated(command: Any, ctx: Any, args: list[str]) -> None:
    """Check the options of a command or group.

    Raises:
        SloBenchError: one of one value, or a flag and its opposite, is given twice; the first would
            not count.
    """
    if ctx.resilient_parsing:
        return
    *_, in_order = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, times in Counter(in_order).items():
        if isinstance(parameter, TyperOption) and times > 1 and not _takes_all(parameter):
            name = max(parameter.opts, key=len)
            raise SloBenchError(f"{name} takes one value but is given {times} times")


def _takes_all(option: TyperOption) -> bool:
    is_switch = option.is_flag and not option.secondary_opts
    return bool(option.multiple or is_switch or option.count)
