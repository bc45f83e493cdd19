"""A Grafana dashboard of the metrics that `--live` and `slo-bench watch` serve to Prometheus.

Dashboard JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...workloads.errors import SloBenchError
from ..live import CELL_METRICS

Json = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS = {"attainment": "percentunit", "requests": "short"}
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_BY = "{{system}} · {{rate_rps}} req/s · seed {{seed}}"
_FILTER = '{system=~"$system"}'


def export(folder: Path, destination: str | None) -> str:
    """Write the dashboard to the file `destination`, by default grafana.json in the folder."""
    file = Path(destination) if destination is not None else folder / "grafana.json"
    try:
        file.write_text(json.dumps(dashboard(folder.resolve().name), indent=2) + "\n", "utf-8")
    except OSError as error:
        raise SloBenchError(f"{file} cannot be written: {error.strerror}") from None
    return f"{file}; import it into Grafana, with a Prometheus that reads /metrics of `watch`"


def dashboard(title: str) -> Json:
    """The dashboard: cells finished, and a panel for each metric of a cell by system and rate."""
    panels: list[Json] = [
        {
            "id": 1,
            "type": "stat",
            "title": "Cells finished",
            "datasource": _SOURCE,
            "gridPos": {"x": 0, "y": 0, "w": 2 * _WIDTH, "h": 4},
            "targets": [_target("slo_bench_cells_finished", "cells")],
        }
    ]
    for number, column in enumerate(CELL_METRICS):
        row, place = divmod(number, _COLUMNS)
        panels.append(
            {
                "id": number + 2,
                "type": "bargauge",
                "title": column,
                "datasource": _SOURCE,
                "gridPos": {
                    "x": place * _WIDTH,
                    "y": 4 + row * _HEIGHT,
                    "w": _WIDTH,
                    "h": _HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": _unit(column)}, "overrides": []},
                "options": {"orientation": "horizontal", "displayMode": "basic"},
                "targets": [_target(f"slo_bench_cell_{column}{_FILTER}", _BY)],
            }
        )
    return {
        "title": f"slo-bench: {title}",
        "uid": "slo-bench",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "system",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(slo_bench_cell_attainment, system)",
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": panels,
    }


def _unit(column: str) -> str:
    if column.endswith("_rps"):
        return "reqps"
    return "s" if column.endswith("_s") else _UNITS.get(column, "short")


def _target(expression: str, legend: str) -> Json:
    return {
        "refId": "A",
        "datasource": _SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "instant": True,
    }
