"""docs/metrics.md says of every column what its declaration says."""

import re
from pathlib import Path

from slo_bench.harness.results.metrics import FIGURES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_metrics_page_has_every_declared_column_with_its_unit():
    units = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| `") and line.count("|") >= 4:
            names, unit = line.split("|")[1:3]
            units |= dict.fromkeys(re.findall(r"`(\w+)`", names), unit.strip())
    rows = {
        figure.name: f"| `{figure.name}` | {figure.unit} | {figure.help} |"
        for figure in FIGURES.values()
        if figure.is_column and figure.name != "count_NAME"  # has a table of its own
    }
    wrong = {row for name, row in rows.items() if units.get(name) != FIGURES[name].unit}
    assert not wrong, "rows of docs/metrics.md should say:\n" + "\n".join(sorted(wrong))
