"""The long fuzz campaign: every reader, for as long as asked; prints what it did as a table.

    python tools/fuzz/campaign.py --seconds 600 [--only NAME] [--finds DIR]
    python tools/fuzz/campaign.py --engine atheris --only "event stream" --seconds 60

Hypothesis edits good files and shrinks what it finds. Atheris (pip install atheris) begins with the
same files and follows the coverage of slo_bench's code; it takes one target a process. A find is an
exception that is no SloBenchError, an input that takes longer than 10 s, or one that needs more
memory than 4 GiB of address space. Inputs that found something are written to --finds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from mutations import draws, edited  # noqa: E402
from targets import ALLOWED, Target, every_target  # noqa: E402

HANG_S = 10
MEMORY_BYTES = 4 << 30


class HangError(BaseException):
    """An input took too long."""


def _hang(signal_number: int, frame: FrameType | None) -> None:
    raise HangError(f"longer than {HANG_S} s")


class Campaign:
    """Counts of one target. Finds are told apart by type and place."""

    def __init__(self, target: Target, finds: Path) -> None:
        self.target = target
        self.tried = self.accepted = self.refused = 0
        self.slowest_s = 0.0
        self.failures: dict[str, int] = {}
        self._finds = finds

    def run(self, data: bytes) -> None:
        """One input."""
        self.tried += 1
        begin_s = time.perf_counter()
        signal.alarm(HANG_S)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                self.target.read(data)
            self.accepted += 1
        except ALLOWED:
            self.refused += 1
        except (Exception, HangError) as error:
            self._note(data, error)
        finally:
            signal.alarm(0)
            self.slowest_s = max(self.slowest_s, time.perf_counter() - begin_s)

    def _note(self, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "slo_bench" in f.filename and "tests" not in f.filename]
        place = ours[-1] if ours else frames[-1]
        where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        if where not in self.failures:
            self._finds.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(where.encode()).hexdigest()[:8]
            stem = f"{self.target.name.replace(' ', '-').replace('/', '-')}-{digest}"
            (self._finds / f"{stem}.input").write_bytes(data)
            text = "".join(traceback.format_exception(error))
            (self._finds / f"{stem}.txt").write_text(text, "utf-8", "backslashreplace")
        self.failures[where] = self.failures.get(where, 0) + 1

    def row(self) -> str:
        """What it did."""
        return (
            f"{self.target.name:32} {self.tried:9,} {self.accepted:9,} {self.refused:9,} "
            f"{sum(self.failures.values()):6} {self.slowest_s:7.2f}"
        )


def _by_hypothesis(campaign: Campaign, seconds: float, first_seed: int) -> None:
    until_s = time.monotonic() + seconds
    number = first_seed
    for good in campaign.target.seeds:
        campaign.run(good)
    while time.monotonic() < until_s:
        number += 1
        _broken_versions(
            campaign, campaign.target.seeds[number % len(campaign.target.seeds)], number, until_s
        )


def _broken_versions(campaign: Campaign, good: bytes, number: int, until_s: float) -> None:
    @seed(number)
    @settings(
        max_examples=500,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(draws)
    def try_them(drawn: bytes) -> None:
        if time.monotonic() < until_s:
            campaign.run(edited(good, drawn))

    try_them()


def _by_atheris(campaign: Campaign, seconds: float, first_seed: int) -> None:
    import atheris

    names = [n for n in sys.modules if n.startswith("slo_bench") and "core" not in n]
    for name in names:
        with contextlib.suppress(Exception):
            for value in vars(sys.modules[name]).values():
                if callable(value) and getattr(value, "__module__", None) == name:
                    _instrument(atheris, value)
    corpus = Path(tempfile.mkdtemp())
    for number, good in enumerate(campaign.target.seeds):
        (corpus / str(number)).write_bytes(good)
    until_s = time.monotonic() + seconds

    def once(data: bytes) -> None:
        if time.monotonic() > until_s:
            print(campaign.row())
            for where, times in campaign.failures.items():
                print(f"    {where} ({times})")
            sys.stdout.flush()
            os._exit(1 if campaign.failures else 0)  # libFuzzer takes SystemExit for a crash
        campaign.run(data)

    options = [sys.argv[0], str(corpus), "-max_len=8192", f"-seed={first_seed + 1}"]
    atheris.Setup([*options, "-verbosity=0", "-rss_limit_mb=0"], once)
    atheris.Fuzz()


def _instrument(atheris: object, value: object) -> None:
    """Functions, and methods of classes, count which branches they take."""
    if isinstance(value, type):
        for name, method in list(vars(value).items()):
            if hasattr(method, "__code__"):
                setattr(value, name, atheris.instrument_func(method))  # type: ignore[attr-defined]
    else:
        atheris.instrument_func(value)  # type: ignore[attr-defined]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600, help="in all, shared by the targets")
    parser.add_argument("--only", help="targets whose name contains this")
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), default="hypothesis")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"))
    options = parser.parse_args()
    if options.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    warnings.simplefilter("error")
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _hang)
    with tempfile.TemporaryDirectory() as folder:
        targets = every_target(Path(folder))
        chosen = [
            candidate
            for candidate in targets
            if options.only is None or options.only in candidate.name
        ]
        if not chosen:
            print(f"no such target; known: {', '.join(t.name for t in targets)}", file=sys.stderr)
            return 2
        print(f"{'target':32} {'inputs':>9} {'accepted':>9} {'refused':>9} {'finds':>6} slowest")
        done = []
        for target in chosen:
            campaign = Campaign(target, options.finds)
            done.append(campaign)
            engine = _by_atheris if options.engine == "atheris" else _by_hypothesis
            engine(campaign, options.seconds / len(chosen), options.seed * 100_000)
            print(campaign.row())
            for where, times in sorted(campaign.failures.items()):
                print(f"    {where} ({times})")
            sys.stdout.flush()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    total = sum(campaign.tried for campaign in done)
    finds = len({where for campaign in done for where in campaign.failures})
    print(f"{total:,} inputs, {finds} places that fail, peak memory {peak_mib:,.0f} MiB")
    return 1 if finds else 0


if __name__ == "__main__":
    raise SystemExit(main())
