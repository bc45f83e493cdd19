"""A gateway in a process of its own: its plan is read, its address written, until there is EOF."""

from __future__ import annotations

import sys

from ....workloads.errors import SloBenchError
from .running import Plan, serving


def main() -> None:
    """See the module."""

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        with serving(Plan.from_json(sys.stdin.readline()), say=say) as url:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()
            sys.stdin.read()
    except SloBenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
