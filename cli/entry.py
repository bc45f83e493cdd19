"""Entry point of the command; handles Ctrl-C during the imports, too."""

from __future__ import annotations

import sys

from .interrupts import leave, settle, watch
from .streams import exit_code_of, lost_output, prepare


def main() -> None:
    """Run `slo-bench`; its modules are imported here."""
    try:
        watch()
        prepare()
        from .main import main as run

        try:
            run()
        finally:
            settle()
            if (lost := lost_output()) is not None:
                sys.exit(exit_code_of(lost))
    except KeyboardInterrupt:
        leave()


if __name__ == "__main__":
    main()
