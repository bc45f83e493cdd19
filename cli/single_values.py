"""Commands tell what they drop: an option of one value that is given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperOption


def parse_single(
    parse: Callable[[Any, list[str]], list[str]], command: Any, context: Any, args: list[str]
) -> list[str]:
    """Parse the arguments of a command or group by its own `parse`; of an option of one value, and
    of a flag and its opposite, the last counts (so scripts replace their defaults), and a line
    says so.
    """
    if not context.resilient_parsing:
        *_, in_order = command.make_parser(context).parse_args(args=list(args))
        for parameter, times in Counter(in_order).items():
            if isinstance(parameter, TyperOption) and times > 1 and not _takes_all(parameter):
                name = max(parameter.opts, key=len)
                typer.echo(
                    f"{name} takes one value but is given {times} times: the last counts", err=True
                )
    return parse(context, args)


def _takes_all(option: TyperOption) -> bool:
    return bool(option.multiple or option.count or (option.is_flag and not option.secondary_opts))
