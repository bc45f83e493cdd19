"""Entry point of the command; Ctrl-C during the imports ends it as it does later."""

from __future__ import annotations

import sys

from .interrupts import watch


def main() -> None:
    """Run `slo-bench`; its modules are imported here."""
    try:
        watch()
        from .main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
