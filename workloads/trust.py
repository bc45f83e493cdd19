"""Consent to what a file of somebody else would do: run code, or reach a place that it names.

A library caller trusts the files that it names. The command line asks (`asking`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

_consent: Callable[[str], None] | None = None
_trusted: set[str] = set()


@contextlib.contextmanager
def asking(consent: Callable[[str], None], trusted: Iterable[str]) -> Iterator[None]:
    """Ask `consent` within the block about all but the `trusted`; it raises SloBenchError to
    refuse.
    """
    global _consent
    _consent = consent
    _trusted.clear()
    _trusted.update(trusted)
    try:
        yield
    finally:
        _consent = None


def check(location: str, claim: str) -> None:
    """Ask for consent to the use of `location`, a file or an address; once for each.

    Args:
        location: absolute path or URL.
        claim: sentence that says what would be done with it.

    Raises:
        SloBenchError: it was refused.
    """
    if _consent is not None and location not in _trusted:
        _consent(claim)
        _trusted.add(location)
