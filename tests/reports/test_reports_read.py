"""What a run folder must hold, and how its faults are told."""

import gzip

import pytest

from slo_bench.harness.results.read_run import read_requests, read_run, read_runs, read_timeline
from slo_bench.workloads.errors import SloBenchError


def test_read_run_of_a_whole_folder(make_run):
    run = read_run(make_run(requests=20, axes={"tp": ["1", "2"]}))
    assert run.axes == ("tp",)
    assert run.cells["attainment"].between(0, 1).all()
    assert run.cells["valid"].dtype == bool
    assert run.environment["slo_bench"] == "0.2.0"
    assert "[experiment]" in run.experiment_toml
    assert len(read_requests(run.path, "000")) == 20
    assert read_timeline(run.path, "000")["kv_cache_usage"].max() > 0


def test_read_run_keeps_names_that_look_like_missing_values(make_run):
    run = read_run(make_run(requests=10, systems=["nan", "None"], model="NA"))
    assert set(run.cells["system"]) == {"nan", "None"}
    assert set(run.cells["model"]) == {"NA"}


@pytest.mark.parametrize("name", ["cells.csv", "experiment.toml", "environment.json"])
def test_read_run_names_a_missing_file(make_run, name):
    folder = make_run(requests=10)
    (folder / name).unlink()
    with pytest.raises(SloBenchError, match=name):
        read_run(folder)


def test_read_run_names_a_missing_folder(tmp_path):
    with pytest.raises(SloBenchError, match="nowhere"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",True,", ",yes,", "line 2.*|valid must be True or False.*line 2"),
        ("attainment,", "atainment,", "lacks the column attainment"),
        (",1.0,", ",fast,", "rate_rps must be a number but is 'fast'.*line 2"),
        (",1.0,", ",-1,", "rate_rps must be a finite number of at least 0 but is '-1'.*line 2"),
        ("\n000,", "\n../../000,", "cell must be a plain file stem.*line 2"),
        ("\n000,", f"\n{'x' * 300},", "at most 230 bytes.*line 2"),
    ],
)
def test_read_run_names_the_line_of_a_malformed_cell(make_run, old, new, message):
    path = make_run(requests=10) / "cells.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SloBenchError, match=message):
        read_run(path.parent)


def test_a_row_that_stands_twice_is_no_second_seed(make_run):
    path = make_run(requests=10) / "cells.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[1]]))
    message = f"repeats the cell 000 of line 2.*line {len(lines) + 1}"
    with pytest.raises(SloBenchError, match=message):
        read_run(path.parent)


def test_read_run_without_a_finished_cell_is_refused(make_run):
    path = make_run(requests=10) / "cells.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(SloBenchError, match="no finished cell"):
        read_run(path.parent)


def test_read_run_names_the_line_of_broken_json(make_run):
    folder = make_run(requests=10)
    (folder / "environment.json").write_text('{\n"a": }')
    with pytest.raises(SloBenchError, match=r"not JSON.*environment\.json, line 2"):
        read_run(folder)


def test_read_run_names_broken_and_missing_request_files(make_run):
    folder = make_run(requests=10)
    path = folder / "requests/000.csv.gz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SloBenchError, match=r"requests/000\.csv\.gz"):
        read_requests(folder, "000")
    path.write_bytes(gzip.compress(b"arrival_s,met\n1,1\n"))
    with pytest.raises(SloBenchError, match=r"000\.csv\.gz"):
        read_requests(folder, "000")
    path.unlink()
    with pytest.raises(SloBenchError, match=r"000\.csv\.gz is missing"):
        read_requests(folder, "000")


def test_read_run_reads_parquet_like_csv(make_run):
    pytest.importorskip("pyarrow")
    import pandas as pd

    folder = make_run(requests=10)
    from_csv = read_requests(folder, "000")
    path = folder / "requests/000.csv.gz"
    frame = pd.read_csv(path)
    frame["outcome"] = frame["outcome"].astype("category")
    frame.to_parquet(folder / "requests/000.parquet")
    path.unlink()
    from_parquet = read_requests(folder, "000")
    pd.testing.assert_frame_equal(from_csv, from_parquet[from_csv.columns], check_categorical=False)


def test_read_runs_gives_distinct_names_and_refuses_repeats(make_run):
    first, second = make_run("x/run", requests=10), make_run("y/run", requests=10)
    names = [run.name for run in read_runs([first, second])]
    assert len(set(names)) == 2
    with pytest.raises(SloBenchError, match="given twice"):
        read_runs([first, first])
    with pytest.raises(SloBenchError, match="at least one"):
        read_runs([])
