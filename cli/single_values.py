"""Commands that refuse what they would drop: an option of one value that is given twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand, TyperOption

from ..workloads.errors import SloBenchError


class SingleValues(TyperCommand):
    """A command whose options of one value may be given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            SloBenchError: an option of one value is given twice; the first would not count.
        """
        if not ctx.resilient_parsing:
            *_, in_order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, times in Counter(in_order).items():
                if isinstance(parameter, TyperOption) and times > 1 and not _takes_all(parameter):
                    name = max(parameter.opts, key=len)
                    raise SloBenchError(f"{name} takes one value but is given {times} times")
        return super().parse_args(ctx, args)


def _takes_all(option: TyperOption) -> bool:
    return bool(option.multiple or option.is_flag or option.count)
