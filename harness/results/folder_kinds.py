"""Folders that are no runs: what they are instead, and which command takes them."""

from __future__ import annotations

from pathlib import Path

CELLS = "cells.csv"
# By name: importing the tuner would take longer than many a report.
TUNED, TUNING, PLAN = "tune.json", "tune.toml", "plan.jsonl"


def not_a_run(folder: Path) -> str | None:
    """Which command takes a folder that is no run folder; None if it is one, or of unknown
    origin.
    """
    if (folder / CELLS).is_file():
        return None
    if (folder / TUNED).is_file():
        return (
            f"{folder} is a tuning run, not one to compare: slo-bench report {folder} shows it, "
            f"slo-bench run {folder / 'winner.toml'} makes a run of its winner"
        )
    if (folder / TUNING).is_file():
        return (
            f"{folder} is a tuning run that has not ended: slo-bench tune --resume --out {folder} "
            "continues it"
        )
    if (folder / PLAN).is_file():
        return (
            f"{folder} is a plan, not a run: its slo-bench plan shows it again with --resume, "
            f"slo-bench run {folder / 'experiment.toml'} makes a run of it"
        )
    return None
