"""HTML pages: one file each that needs no network, written whole or not at all.

A page forbids itself any request and any script but its own by a content security policy, and its
templates escape every value, so that no name in a run, however written, can run or load anything.
The one other script is plotly.js, of which `assets/` holds the partial bundle `basic`: all that the
figures need in a quarter of the whole library's size.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...workloads.errors import SloBenchError
from ...workloads.whole_file import write_whole
from ..figures.palette import as_css

_HERE = Path(__file__).parent


PlotlyJs = Literal["inline", "cdn", "file"]
"""Where a page has plotly.js from: itself, a content delivery network, or a file beside it."""

_BUNDLE = "plotly-basic.min.js"
_NOTICES = "plotly-basic.LICENSE"  # of all that the bundle contains


def write_page(text: str, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    if not out.parent.is_dir():
        raise SloBenchError(f"cannot write {out}: there is no folder {out.parent}")
    write_whole(out, [text.encode("utf-8")])
    beside = out.parent / bundle_name()
    if f'<script src="{beside.name}"></script>' in text:
        write_whole(beside, [asset(_BUNDLE).encode("utf-8")])
    return out


def page(
    template: str, data: Mapping[str, Any], *, plotly: PlotlyJs = "inline", **shown: object
) -> str:
    """The page that a template makes of the values `shown`; `data` is what its script draws."""
    script, bundle = asset("report.js"), asset(_BUNDLE)
    sources = [f"'{_digest(script, 'sha256')}'"]
    library: dict[str, object] = {}
    if data["figures"]:
        if plotly != "cdn":
            library["notices"] = asset(_NOTICES)
        if plotly == "inline":
            library["inline"] = bundle
            sources.append(f"'{_digest(bundle, 'sha256')}'")
        elif plotly == "cdn":
            library |= {"cdn": _CDN.format(plotly_version()), "digest": _digest(bundle, "sha384")}
            sources.append(str(library["cdn"]))
        else:
            library["file"] = bundle_name()
            sources.append("'self'")
    text: str = (
        _templates()
        .get_template(template)
        .render(
            shown,
            script=script,
            script_sources=" ".join(sources),
            library=library,
            style=Markup(as_css()) + asset("report.css"),
            data=Markup(json_for_html(data)),
        )
    )
    return text


_CDN = "https://cdn.jsdelivr.net/npm/plotly.js-basic-dist-min@{}/plotly-basic.min.js"


def _digest(text: str, algorithm: str) -> str:
    """As content security policies and the attribute `integrity` have it."""
    hashed = hashlib.new(algorithm, text.encode()).digest()
    return f"{algorithm}-{base64.b64encode(hashed).decode()}"


@cache
def plotly_version() -> str:
    """The version of plotly.js in `assets`."""
    match = re.search(r"plotly\.js \(basic - minified\) v([\d.]+)", asset(_BUNDLE)[:200])
    assert match is not None
    return match[1]


def bundle_name() -> str:
    """The name of plotly.js in a file of its own, with its version."""
    return f"plotly-basic-{plotly_version()}.min.js"


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["capital"] = _capital
    return environment


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
