"""A gateway in a process of its own: it receives its plan, sends its address, ends at EOF."""

from __future__ import annotations

import sys

from ....workloads.child_process import Parent
from ....workloads.errors import SloBenchError
from ..launch.model_servers import ModelServers
from .running_gateway import GatewayPlan, serving


def main() -> None:
    """Run the gateway; the parent process sends its plan."""

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    parent = Parent()
    messages = parent.messages()
    try:
        plain = next(messages)
        if "models" in plain:
            served = ModelServers.from_plain(plain).served()
        else:
            served = serving(GatewayPlan.from_plain(plain), say=say)
        with served as url:
            parent.send(url)
            next(messages, None)  # until the parent closes the connection
    except SloBenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
