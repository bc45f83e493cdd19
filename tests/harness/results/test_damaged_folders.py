"""Every file of every kind of folder, damaged in five ways: whoever reads the folder then names the
file, or finds what was found before.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from reference.damage import DAMAGE, flipped
from slo_bench import Experiment, SloBenchError, write_report
from slo_bench.harness.results.engine_logs import read_log
from slo_bench.reports.compare.comparing import compare, judge_comparison, read_results
from slo_bench.reports.compare.output import comparison_json
from slo_bench.reports.pages.tuning import rewrite_tuning
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.tuner.search.evaluate_configuration import cell_of
from slo_bench.tuner.search.runs import Runs
from slo_bench.tuner.search.settings import TuneSettings, load
from slo_bench.tuner.search.tuning_run import tune

QUICK = CapacityOptions(tolerance=0.5, targets=(0.9,), max_requests=300)


@dataclass(frozen=True)
class Folder:
    """One that is whole, and another of the same kind that asked for something else."""

    path: Path
    other: Path

    def files(self, under):
        files = (self.path / under).rglob("*")
        return sorted(path.relative_to(self.path) for path in files if path.is_file())

    def other_file(self, name):
        """Of the same name, or of the same kind where the name tells the seed."""
        there = self.other / name
        return there if there.is_file() else sorted((self.other / name).parent.iterdir())[0]


def sweep(seed, **changes):
    settings = {"systems": ["vllm"], "rates": [4], "seeds": 1, "requests": 12, "records": "csv"}
    return Experiment(**{**settings, "seed": seed, **changes})


def made(folder, make):
    make(folder / "whole", 0)
    make(folder / "other", 1)
    return Folder(folder / "whole", folder / "other")


def content(folder):
    """What a run found, without when."""
    files = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if name.name != "environment.json"}


def report(folder):
    return write_report([folder], folder.parent / "report.html").read_bytes()


def compared(folder):
    """With the whole one that lies beside it."""
    comparison = compare(
        read_results(folder.parent / "before"), read_results(folder), replicates=100
    )
    return comparison_json(comparison), judge_comparison(comparison, 0.05)


def logged(folder):
    return repr(read_log(folder))


def run_on(experiment):
    return lambda folder: content(experiment.run(folder, jobs=1, resume=True).folder)


def searched_on(folder):
    search = search_capacity(sweep(0, rates=None, requests=100), folder, options=QUICK, resume=True)
    return [{k: v for k, v in row.items() if k != "wall_s"} for row in search.rows()]


def told(reader, place):
    """What it found, or why it refused."""
    try:
        return reader(place), None
    except SloBenchError as error:
        return None, str(error)


def check(folder, readers, work, under="", named=None):
    """How often a reader refused, and how often it found the same as before."""
    refused = same = 0
    place = work / "run"
    shutil.copytree(folder.path, work / "before")
    before = {}
    for reader in readers:
        shutil.copytree(folder.path, place)
        before[reader] = reader(place)
        shutil.rmtree(place)
    for name in folder.files(under):
        for how, damage in DAMAGE.items():
            for reader in readers:
                shutil.copytree(folder.path, place)
                damage(place / name, folder.other_file(name))
                answer, message = told(reader, place)
                if message is None:
                    assert answer == before[reader], (name, how, reader)
                    same += 1
                else:
                    either = (name.name, (named or {}).get(name.name, name.name))
                    assert any(file_name in message for file_name in either), (
                        name,
                        how,
                        reader,
                        message,
                    )
                    refused += 1
                shutil.rmtree(place)
    return refused, same


@pytest.mark.slow
@pytest.mark.parametrize("records", ["csv", "parquet"])
def test_damaged_sweep_folder_is_named_or_read_as_before(records, tmp_path):
    if records == "parquet":
        pytest.importorskip("pyarrow")

    def of(seed):
        return sweep(seed, records=records, instances=2)

    folder = made(tmp_path / "made", lambda path, seed: of(seed).run(path, jobs=1))
    readers = [report, compared, logged, run_on(of(0))]
    # All else is the same as with CSV.
    tallies = check(folder, readers, tmp_path, under="requests" if records == "parquet" else "")
    assert tallies == {"csv": (93, 27), "parquet": (15, 5)}[records]


def tuned(folder, seed, confirm=False):
    experiment = sweep(seed, rates=None, requests=100)
    settings = TuneSettings(
        search={"max_num_seqs": "4,256"},
        objectives=("attainment",),
        rate_rps=4.0,
        trials=2,
        confirm=confirm,
    )
    tune(experiment, settings, folder, study_name="study")


def tuned_on(folder):
    experiment, settings = load(folder / "tune.toml")
    plain = tune(experiment, settings, folder, resume=True).plain()
    return timeless(plain, folder)


def tuning_report(folder):
    return timeless(rewrite_tuning(folder, folder.parent / "tuning.html"), folder)


def timeless(plain, folder):
    text = json.dumps(plain, default=str).replace(str(folder), ".")
    return re.sub(r'"wall_s": [^,}]*', "", text)


@pytest.mark.slow
def test_damaged_tuning_folder_is_named_or_read_as_before(tmp_path):
    """A journal of another study is told by the settings that differ from it.

    Files of `deployment/` are for people, and not read.
    """
    folder = made(tmp_path / "made", tuned)
    readers = [tuning_report, tuned_on]
    assert check(folder, readers, tmp_path, named={"study.journal": "tune.toml"}) == (19, 91)


def test_damaged_confirmation_folder_is_named_or_read_as_before(tmp_path):
    """Its runs are read when the study is gone on with; damage is not taken for a result.

    The byte in the middle may be one of the time that the run took, which changes no result.
    """
    folder = made(tmp_path / "made", lambda path, seed: tuned(path, seed, confirm=True))
    assert check(folder, [tuned_on], tmp_path, under="confirm") in ((2, 3), (1, 4))


def test_damaged_runs_of_a_configuration_are_named(tmp_path):
    """They are read when the configuration is run again: then a line must be what was written."""
    tuned(tmp_path / "whole", 0)
    path = sorted((tmp_path / "whole" / "runs").iterdir())[0]
    spec = cell_of(sweep(0, rates=None, requests=100), "default")
    whole = path.read_bytes()
    mended = json.loads(whole)
    mended["sample"]["met"] = 1
    for damaged in (flipped(whole), b"[]\n", json.dumps(mended).encode() + b"\n", whole):
        path.write_bytes(damaged)
        with pytest.raises(SloBenchError, match=path.name):
            Runs(path, spec, lambda: None)


@pytest.mark.slow
def test_damaged_capacity_folder_is_named_or_read_as_before(tmp_path):
    folder = made(
        tmp_path / "made",
        lambda path, seed: search_capacity(
            sweep(seed, rates=None, requests=100), path, options=QUICK
        ),
    )
    refused, same = check(folder, [report, searched_on], tmp_path)
    assert (refused, same) == (74, 6)
    table = folder.path / "cells.csv"
    table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:-1]))
    for reader in (report, read_results, searched_on):
        with pytest.raises(SloBenchError, match=r"lacks rows of runs that capacity.*cells\.csv"):
            reader(folder.path)
