"""What every page of ours is: one HTML file that needs no network, written whole or not at all.

A page forbids itself any request and any script but its own by a content security policy, so that
no name in a run, however written, can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ...harness.results.run_folder import write_whole
from ...workloads.errors import SloBenchError


def write_page(text: str, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    if not out.parent.is_dir():
        raise SloBenchError(f"cannot write {out}: there is no folder {out.parent}")
    write_whole(out, [text.encode("utf-8")])
    return out


def page(title: str, body: str, data: Mapping[str, object]) -> str:
    """The whole page around a body; `data` is what `page/chart.js` draws."""
    script = asset("chart.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{asset("report.css")}</style>
</head>
<body>{body}
<script type="application/json" id="report-data">{json_for_html(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_for_html(value: object) -> str:
    """JSON that no HTML parser reads as anything but text, also inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """A file of the folder `page`."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def table(label: str, heads: Sequence[str], rows: Sequence[Sequence[str]], more: str = "") -> str:
    """Rows of plain text as an HTML table, the first column their heads; nothing without rows.

    `more` are CSS classes beside those of every table.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="card scroll{more and f" {more}"}" tabindex="0" role="region" '
        f'aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
