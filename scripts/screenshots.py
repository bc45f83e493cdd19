"""Make the picture in README: run an experiment, open its report in headless Chromium.

    python scripts/screenshots.py

The experiment is simulated with fixed seeds, so that the picture changes with the simulator and the
page alone.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from slo_bench import Experiment, write_report

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1280, 1545


def main() -> None:
    """Write docs/images/report.png."""
    headless = _headless()
    program = headless.find_chromium()
    if program is None:
        raise SystemExit("no chromium on this machine (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there) / "run"
        Experiment(
            systems=("vllm", "sarathi", "orca", "vllm-v0", "sglang"),
            rates=(0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5),
            requests=(500,),
            seeds=3,
        ).run(folder)
        page_path = write_report([folder], Path(there) / "report.html")
        browser = headless.Browser(program)
        try:
            page = browser.open(page_path.as_uri(), width=WIDTH, height=HEIGHT)
            page.send("Emulation.setScrollbarsHidden", hidden=True)
            page.run(_DRAWN)
            page.settle()
            page.picture(PICTURE)
        finally:
            browser.close()
    print(PICTURE.relative_to(ROOT))


# Fulfilled when every figure in sight is drawn.
_DRAWN = """new Promise(done => {
  const look = () => charts.every(c => !c.seen || c.plot.querySelector('.main-svg'))
    && charts.some(c => c.seen) ? done(true) : requestAnimationFrame(look);
  look();
})"""


def _headless() -> ModuleType:
    """The browser of the report's tests; tests are no package, so it is loaded by its path."""
    path = ROOT / "tests" / "reports" / "headless.py"
    spec = importlib.util.spec_from_file_location("headless", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["headless"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
