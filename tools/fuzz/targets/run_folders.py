"""Run folders: reports of them, and going on with them."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from slo_bench import Experiment, write_report
from slo_bench.harness.results.engine_logs import read_log
from slo_bench.harness.results.read_run import read_requests, read_run, read_timeline
from slo_bench.harness.results.run_folder import read_rows
from slo_bench.reports.compare.comparing import read_results
from slo_bench.tuner.capacity.capacity_checkpoint import read_capacity

from .target import Target


def _trusted(folder: Path) -> None:
    """Take the checksums out: a reader with them looks no further than those."""
    table = folder / "cells.csv"
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with table.open("w", newline="", encoding="utf-8") as file:
        names = [name for name in rows[0] if name != "checksums"]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path = folder / "environment.json"
    kept = {k: v for k, v in json.loads(path.read_text("utf-8")).items() if "crc32" not in k}
    path.write_text(json.dumps(kept), "utf-8")


def targets(folder: Path) -> list[Target]:
    """A small run with one file edited."""
    sealed = folder / "sealed"
    shutil.rmtree(sealed, ignore_errors=True)
    Experiment(systems=["vllm", "orca"], rates=[2, 4], seeds=1, requests=20, records="csv").run(
        sealed, jobs=1
    )
    whole = folder / "run"
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(sealed, whole)
    _trusted(whole)
    (whole / "capacity.json").write_text(
        json.dumps({"targets": [0.9], "tolerance": 0.02, "searches": []}), "utf-8"
    )
    cell = read_rows(whole / "cells.csv")[0]["cell"]

    def report(path: Path) -> object:
        return write_report([path], folder / "report.html")

    def cells(path: Path) -> object:
        read_rows(path / "cells.csv")
        return read_run(path)

    def requests(path: Path) -> object:
        read_requests(path, str(cell))
        read_results(path)
        return read_log(path, str(cell))

    def resumed(path: Path) -> object:
        """A folder that is gone on with: what is there must be its own."""
        return Experiment.load(path / "experiment.toml").run(path, jobs=1, resume=True)

    def packed(name: str, read_path: Callable[[Path], object]) -> Target:
        """The content of a gzip file is edited, not its packing."""
        path = whole / name
        good = gzip.decompress(path.read_bytes())

        def read_bytes(data: bytes) -> object:
            path.write_bytes(gzip.compress(data, mtime=0, compresslevel=1))
            try:
                return read_path(whole)
            finally:
                path.write_bytes(gzip.compress(good, mtime=0))

        return Target(f"content of {name.partition('/')[0]}", [good], read_bytes)

    def plain(
        name: str,
        title: str,
        read_path: Callable[[Path], object],
        slow: bool,
        run: Path = whole,
    ) -> Target:
        path = run / name
        good = path.read_bytes()

        def read_bytes(data: bytes) -> object:
            kept = {p: p.read_bytes() for p in run.iterdir() if p.is_file()}
            path.write_bytes(data)
            try:
                return read_path(run)
            finally:
                for file, content in kept.items():
                    file.write_bytes(content)
                path.write_bytes(good)

        return Target(title, [good], read_bytes, slow)

    request_file, timeline_file = f"requests/{cell}.csv.gz", f"timelines/{cell}.csv.gz"
    return [
        plain("cells.csv", "cells.csv", cells, False),
        plain("environment.json", "environment.json", read_run, False),
        plain("capacity.json", "capacity.json", read_capacity, False),
        plain(request_file, "requests", requests, False),
        packed(request_file, requests),
        packed(timeline_file, lambda path: read_timeline(path, str(cell))),
        plain("cells.csv", "report from cells.csv", report, True),
        plain("experiment.toml", "report from experiment.toml", report, True),
        plain("environment.json", "report from environment.json", report, True),
        plain("capacity.json", "report from capacity.json", report, True),
        plain("cells.csv", "resumed from cells.csv", resumed, True, sealed),
    ]
