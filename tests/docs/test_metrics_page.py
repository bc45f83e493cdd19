"""docs/metrics.md names every column that is declared."""

import re
from pathlib import Path

from slo_bench.harness.results.metrics import FIGURES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_metrics_page_names_every_declared_column():
    named = set(re.findall(r"`(\w+)`", PAGE.read_text("utf-8")))
    missing = {
        f"| `{figure.name}` | {figure.help} |"
        for figure in FIGURES.values()
        if figure.is_column and figure.name not in named
    }
    assert not missing, "rows that docs/metrics.md lacks:\n" + "\n".join(sorted(missing))
