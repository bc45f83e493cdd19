"""Entry point of the command; handles Ctrl-C during the imports, too."""

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
