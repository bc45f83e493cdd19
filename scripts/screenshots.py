"""Make the pictures of README and docs in headless Chromium.

    python scripts/screenshots.py            # all
    python scripts/screenshots.py growth

`report` runs an experiment and opens its report; it is simulated with fixed seeds, so that the
picture changes with the simulator and the page alone. `growth` draws the table of
docs/measurements/speed.md that tells how the cost of a request grows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from page_outputs import test_module
from plotly.subplots import make_subplots

from slo_bench import Experiment, write_report
from slo_bench.reports.figures.palette import LIGHT, colour, symbol

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SPEED = ROOT / "docs" / "measurements" / "speed.md"
GROWTH_TABLE = "| what grows | system | number | requests | CPU s | CPU us a request | peak MB |"
WIDTH, HEIGHT = 1280, 1545


def main() -> None:
    """Write the pictures that are named, or all."""
    makers = {"report": report, "growth": growth}
    headless = test_module("reports", "headless")
    program = headless.find_chromium()
    if program is None:
        raise SystemExit("no chromium on this machine (Debian: apt-get install chromium)")
    for name in sys.argv[1:] or makers:
        if name not in makers:
            raise SystemExit(f"unknown picture {name!r}; known: {', '.join(makers)}")
        browser = headless.Browser(program)
        try:
            with tempfile.TemporaryDirectory() as there:
                picture = makers[name](browser, Path(there))
        finally:
            browser.close()
        print(picture.relative_to(ROOT))


def report(browser: Any, there: Path) -> Path:
    """Of a report."""
    folder = there / "run"
    Experiment(
        systems=("vllm", "sarathi", "orca", "vllm-v0", "sglang"),
        rates=(0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5),
        requests=(500,),
        seeds=3,
    ).run(folder)
    page_path = write_report([folder], there / "report.html")
    page = browser.open(page_path.as_uri(), width=WIDTH, height=HEIGHT)
    page.send("Emulation.setScrollbarsHidden", hidden=True)
    page.run(_DRAWN)
    page.settle()
    return Path(page.picture(IMAGES / "report.png"))


def growth(browser: Any, there: Path) -> Path:
    """Of the CPU time of a request as the work grows, a part for each thing that grows."""
    table = SPEED.read_text("utf-8").partition(GROWTH_TABLE)[2].partition("\n\n")[0]
    _, _, *lines = table.splitlines()  # the rest of the head, and the line below it
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    parts: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for quantity, system, number, _, _, each_us, _ in rows:
        point = float(number.replace(",", "")), float(each_us)
        parts.setdefault(quantity, {}).setdefault(system, []).append(point)
    systems = [*dict.fromkeys(system for by_system in parts.values() for system in by_system)]
    figure = make_subplots(rows=1, cols=len(parts), shared_yaxes=True, subplot_titles=[*parts])
    for column, by_system in enumerate(parts.values(), 1):
        for system, points in by_system.items():
            place = systems.index(system)
            x, y = zip(*points, strict=True)
            trace: dict[str, Any] = {"type": "scatter", "x": x, "y": y, "mode": "lines+markers"}
            trace |= {"line": {"color": colour(place)}, "marker": {"symbol": symbol(place)}}
            trace |= {"name": system, "legendgroup": system}
            shown = not any(other["name"] == system for other in figure.data)
            figure.add_trace({**trace, "showlegend": shown}, row=1, col=column)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", dtick="D2", gridcolor=LIGHT["grid"])
    figure.update_yaxes(title="CPU time of a request, µs", col=1)
    figure.update_layout(
        width=WIDTH - 30, height=400, plot_bgcolor=LIGHT["card"], margin={"t": 50, "b": 40, "r": 20}
    )
    page_path = there / "growth.html"
    figure.write_html(page_path, config={"displayModeBar": False})
    page = browser.open(page_path.as_uri(), width=WIDTH, height=450)
    page.send("Emulation.setScrollbarsHidden", hidden=True)
    page.settle()
    return Path(page.picture(IMAGES / "growth.png"))


# Fulfilled when every figure in sight is drawn.
_DRAWN = """new Promise(done => {
  const look = () => charts.every(c => !c.seen || c.plot.querySelector('.main-svg'))
    && charts.some(c => c.seen) ? done(true) : requestAnimationFrame(look);
  look();
})"""


if __name__ == "__main__":
    main()
