"""HTML pages: one file each that needs no network, written whole or not at all.

A page forbids itself any request and any script but its own by a content security policy, and its
templates escape every value, so that no name in a run, however written, can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...workloads.errors import SloBenchError
from ...workloads.whole_file import write_whole

_HERE = Path(__file__).parent


def write_page(text: str, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    if not out.parent.is_dir():
        raise SloBenchError(f"cannot write {out}: there is no folder {out.parent}")
    write_whole(out, [text.encode("utf-8")])
    return out


def page(template: str, data: Mapping[str, object], **shown: object) -> str:
    """The page that a template makes of the values `shown`; `data` is what `chart.js` draws."""
    script = asset("chart.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text: str = (
        _templates()
        .get_template(template)
        .render(
            shown,
            script=script,
            script_digest=digest,
            style=asset("report.css"),
            data=Markup(json_for_html(data)),
        )
    )
    return text


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["capital"] = _capital
    return found


def _capital(text: str) -> str:
    """`Trial`, but `req/s` and `p (Holm)` as they are."""
    word = text.partition(" ")[0].rstrip(",")
    return text[0].upper() + text[1:] if len(word) > 1 and word.isalpha() else text


def json_for_html(value: object) -> str:
    """JSON that no HTML parser reads as anything but text, also inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> Markup:
    """A file of the folder `assets`, which no page escapes."""
    return Markup((_HERE / "assets" / name).read_text(encoding="utf-8"))
