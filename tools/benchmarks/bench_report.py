"""What the report, `compare` and `gate` of a large sweep cost, and how the page feels.

Run `python tools/benchmarks/bench_report.py` (10 cells of a million requests) and
`python tools/benchmarks/bench_report.py --systems vllm,sarathi,orca,vllm-v0,sglang --rates
1:10.5:0.5 --seeds 5 --requests 20000` (500 cells). Every request is simulated, none is made up:
some three minutes of CPU time, which `--folder` keeps for the next time. Each line is a process of
its own, with the CPU time and the peak memory that the operating system says it took; of `run` with
`--jobs` above 1 the peak is that of the largest process. `compare` and `gate` hold the run against
itself: what they read and resample is that of two different runs. The page is then opened in
headless Chromium, if there is one: how long from navigation to the first picture and until all that
is in sight is drawn (with the CPU time of the page's main thread, which a busy machine does not
lengthen), how long the longest frame took while it was scrolled from end to end, and how
long until another rate was drawn. Aims on an idle machine: first picture within 1.5 s, also of 500
cells within 4 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_SCROLL = """new Promise(done => {
  const end = document.documentElement.scrollHeight;
  let at = 0, last = performance.now(), longest = 0;
  const step = now => {
    longest = Math.max(longest, now - last);
    last = now;
    at += 400;
    scrollTo(0, at);
    if (at < end) requestAnimationFrame(step); else done(longest);
  };
  requestAnimationFrame(step);
})"""
_WATCH = """(() => {
  const drawn = '.plot :is(.js-line, .bars .point path, path.point)';
  const found = new MutationObserver(() => {
    if (!document.querySelector(drawn)) return;
    found.disconnect();
    requestAnimationFrame(() => { window.firstPictureMs = performance.now(); });
  });
  found.observe(document, { childList: true, subtree: true });
})()"""
_IN_SIGHT = """new Promise(done => {
  const look = () => window.firstPictureMs && charts.every(c => !c.seen || !c.stale)
    ? done([window.firstPictureMs, performance.now()]) : requestAnimationFrame(look);
  look();
})"""
_CHOOSE = """new Promise(done => {
  const select = document.querySelector('#rate');
  if (!select) { done(0); return; }
  const begin = performance.now();
  select.selectedIndex = 0;
  select.dispatchEvent(new Event('change'));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def cost_of(*arguments: str) -> Cost:
    """`slo-bench …` in a process of its own; its workers count, too."""
    command = [sys.executable, "-m", "slo_bench.cli.main", *arguments]
    quiet = os.open(os.devnull, os.O_WRONLY)
    begin_s = time.monotonic()
    child = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, quiet, 1)]
    )
    _, status, usage = os.wait4(child, 0)
    wall_s = time.monotonic() - begin_s
    os.close(quiet)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return Cost(usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss * 1024)


def show(label: str, cost: Cost) -> None:
    """One line of the table."""
    print(
        f"{label:24} {cost.cpu_s:8.1f} {cost.wall_s:8.1f} {cost.peak_bytes / 1e6:9.0f}", flush=True
    )


def headless() -> ModuleType:
    """The browser of the report's tests; tests are no package, so it is loaded by its path."""
    path = Path(__file__).parents[2] / "tests" / "reports" / "headless.py"
    spec = importlib.util.spec_from_file_location("headless", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["headless"] = module
    spec.loader.exec_module(module)
    return module


def browse(page_path: Path) -> None:
    """Open the page, scroll through it, choose another rate."""
    driver = headless()
    program = driver.find_chromium()
    if program is None:
        print("no Chromium: the page was not opened")
        return
    browser = driver.Browser(program)
    page = browser.open("about:blank", width=1100, height=1600, before=_WATCH)
    page.send("Performance.enable", timeDomain="threadTicks")
    page.send("Page.navigate", url=page_path.absolute().as_uri())
    page.settle()
    first_ms, drawn_ms = page.run(_IN_SIGHT)
    metrics = {
        metric["name"]: metric["value"] for metric in page.send("Performance.getMetrics")["metrics"]
    }
    nodes = page.run("document.getElementsByTagName('*').length")
    scroll_ms, chosen_ms = page.run(_SCROLL), page.run(_CHOOSE)
    page.close()
    browser.close()
    print(
        f"{page_path.stat().st_size / 1e6:.2f} MB, {nodes:,} elements; first picture after "
        f"{first_ms / 1000:.2f} s, all in sight after {drawn_ms / 1000:.2f} s with "
        f"{metrics['TaskDuration']:.2f} s of CPU time, longest frame while scrolling "
        f"{scroll_ms:.0f} ms, another rate drawn in {chosen_ms:.0f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each cell")
    parser.add_argument("--systems", default="vllm,sarathi")
    parser.add_argument("--rates", default="2,4,5,6,8")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--records", default="csv", choices=("csv", "parquet"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the run here, or use the one that is")
    options = parser.parse_args(arguments)
    print(f"{'':24} {'CPU s':>8} {'wall s':>8} {'peak MB':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "run"
        page = Path(scratch) / "report.html"
        if not (folder / "cells.csv").is_file():
            systems = [word for name in options.systems.split(",") for word in ("--system", name)]
            cost = cost_of(
                *("run", *systems, "--workload", "azure-conv", "--model", "llama-3-8b"),
                *(
                    "--gpu",
                    "a100-80g",
                    "--rates",
                    options.rates,
                    "--requests",
                    str(options.requests),
                ),
                *(
                    "--seeds",
                    str(options.seeds),
                    "--jobs",
                    str(options.jobs),
                    "--overlong-requests",
                    "reject",
                ),
                *("--records", options.records, "--no-report", "--out", str(folder)),
            )
            show(f"run --jobs {options.jobs}", cost)
        show("report", cost_of("report", str(folder), "--out", str(page)))
        show("compare", cost_of("compare", str(folder), str(folder)))
        show("gate", cost_of("gate", str(folder), str(folder)))
        browse(page)


if __name__ == "__main__":
    main()
