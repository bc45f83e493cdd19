"""Commands refuse what they would drop: an option of one value that is given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from typer.core import TyperOption

from ..workloads.errors import SloBenchError


def parse_single(
    parse: Callable[[Any, list[str]], list[str]], command: Any, context: Any, args: list[str]
) -> list[str]:
    """Parse the arguments of a command or group by its own `parse`.

    Raises:
        SloBenchError: an option of one value, or a flag and its opposite, is given twice; the first
            would not count.
    """
    if not context.resilient_parsing:
        *_, in_order = command.make_parser(context).parse_args(args=list(args))
        for parameter, times in Counter(in_order).items():
            if isinstance(parameter, TyperOption) and times > 1 and not _takes_all(parameter):
                name = max(parameter.opts, key=len)
                raise SloBenchError(f"{name} takes one value but is given {times} times")
    return parse(context, args)


def _takes_all(option: TyperOption) -> bool:
    return bool(option.multiple or option.count or (option.is_flag and not option.secondary_opts))
