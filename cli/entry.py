"""Entry point of the command; handles Ctrl-C during the imports, too."""

from __future__ import annotations

import gc
import sys

from .interrupts import leave, settle, watch
from .standard_streams import exit_code_of, lost_output, prepare

# Objects between two collections, and before the first: what starts a run makes 130,000, and most
# of them stay.
COLLECT_AFTER, _FIRST_AFTER = 20_000, 250_000


def _collect_as_usual(phase: str, info: dict[str, int]) -> None:
    """The first collection begins: from now on as often as before."""
    gc.callbacks.remove(_collect_as_usual)
    gc.set_threshold(COLLECT_AFTER)


def main() -> None:
    """Run `slo-bench`; its modules are imported here."""
    gc.set_threshold(_FIRST_AFTER)
    gc.callbacks.append(_collect_as_usual)
    try:
        watch()
        prepare()
        try:
            from .main import main as run
        except ImportError as error:
            from ..workloads.extras import import_failure

            if (failure := import_failure(error)) is None:
                raise
            print(f"error: {failure}", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        try:
            run()
        finally:
            gc.freeze()  # Python collects four times as it ends: nothing is left that would matter
            settle()
            if (lost := lost_output()) is not None:
                sys.exit(exit_code_of(lost))
    except KeyboardInterrupt:
        leave()


if __name__ == "__main__":
    main()
