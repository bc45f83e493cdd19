"""Metrics in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4"
Sample = tuple[str, str, float]  # name, labels as `labels` writes them, value


def labels(**values: object) -> str:
    """Labels as they stand behind a metric's name; empty where there are none."""
    if not values:
        return ""
    escaped = {
        name: str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def exposition(kinds: Mapping[str, str], samples: Iterable[Sample]) -> str:
    """The samples of the metrics in `kinds` (gauge or counter by name), in its order."""
    samples = list(samples)
    lines: list[str] = []
    for name, kind in kinds.items():
        metric_lines = [f"{n}{label_text} {value}" for n, label_text, value in samples if n == name]
        lines += [f"# TYPE {name} {kind}", *metric_lines] if metric_lines else []
    return "".join(f"{line}\n" for line in lines)
