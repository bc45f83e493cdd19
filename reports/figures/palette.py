"""Colours, markers and dashes of all pages and figures; figures are made with the light ones.

The colours of series are Okabe and Ito's, darkened where they would be faint on white; they stay
apart for colour-blind eyes, and beyond eight series dashes tell curves apart.
"""

from __future__ import annotations

LIGHT = {
    **{"card": "#ffffff", "ink": "#16191d", "soft": "#565e69", "grid": "#eceef1"},
    **{"line": "#c9ced5", "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#bd5f98"},
    **{"s4": "#c98a00", "s5": "#45a4de", "s6": "#3b4252", "s7": "#882255"},
    **{"cause0": "#4b5563", "cause1": "#8b95a3", "cause2": "#c6ccd5", "cause3": "#e6a11a"},
    **{"cause4": "#b3471d", "cause5": "#7556b3", "cause6": "#1f8a80", "phase0": "#aab2bd"},
    **{"phase1": "#e6a11a", "phase2": "#9b4f96", "phase3": "#2f7ab5"},
}
DARK = {
    **{"card": "#191d21", "ink": "#e9ecef", "soft": "#a3abb5", "grid": "#262b31"},
    **{"line": "#434b54", "s0": "#4ba3e3", "s1": "#f5793a", "s2": "#35c297", "s3": "#e58fc0"},
    **{"s4": "#e9b335", "s5": "#a0d8f7", "s6": "#cfd5de", "s7": "#cf6a94"},
    **{"cause0": "#727d8c", "cause1": "#9aa4b1", "cause2": "#cfd5dc", "cause3": "#e9b335"},
    **{"cause4": "#d9673a", "cause5": "#a48be0", "cause6": "#3fb5a8", "phase0": "#7f8995"},
    **{"phase1": "#e9b335", "phase2": "#c98bc4", "phase3": "#4ba3e3"},
}
SYMBOLS = (
    *("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "hourglass"),
    "star",
)
_DASHES = ("solid", "dash", "dot")


def colour(series: int) -> str:
    """The colour of a series, by its place."""
    return LIGHT[f"s{series % 8}"]


def symbol(series: int) -> str:
    """The marker of a series or class, by its place."""
    return SYMBOLS[series % len(SYMBOLS)]


def dash(series: int) -> str:
    """The dashes of a series, by its place."""
    return _DASHES[series // 8 % len(_DASHES)]


def darkened() -> dict[str, str]:
    """What a dark page shows for each light colour."""
    return {LIGHT[name]: dark for name, dark in DARK.items()}


def as_css() -> str:
    """The colours as CSS properties: light, and dark where a screen asks for it."""
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in colours.items())
        for colours in (LIGHT, DARK)
    )
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
