"""Where the command begins. Ctrl-C while its modules are being read ends it as it does later."""

from __future__ import annotations

import sys

from .interrupts import watch


def main() -> None:
    """See `cli.main.main`."""
    try:
        watch()
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
