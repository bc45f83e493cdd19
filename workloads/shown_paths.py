"""Absolute paths as results show them: without the folders of the user's machine."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePath

_QUOTED = re.compile(r"""(["'])[~/][^"'\n]*/([^/"'\n]*)\1""")
_BARE = re.compile(r"""(?<![\w.:/~…-])~?/(?:[^/\s"'`,;:()<>|&]+/)+([^/\s"'`,;:()<>|&]*)""")


def without_folders(text: str) -> str:
    """The text with `…/name` in place of each absolute path; addresses stay."""
    return _BARE.sub(r"…/\1", _QUOTED.sub(r"\1…/\2\1", text))


def short_paths(texts: Collection[str]) -> dict[str, str]:
    """Each text, and of those that are absolute paths as few of the last parts as tell them all
    apart.
    """
    paths = {text: PurePath(text).parts for text in texts if text.startswith("/")}
    longest = max(map(len, paths.values()), default=1)
    for count in range(1, longest):
        names = {text: "/".join(parts[-count:]) for text, parts in paths.items()}
        shown = {text: names.get(text, text) for text in texts}
        if len(set(shown.values())) == len(shown):
            return shown
    return {text: text for text in texts}
