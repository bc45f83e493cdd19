import contextlib
import gzip
import math
import os
import sys

import numpy as np
import pytest

from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.core.records.request_records import (
    Outcome,
    Records,
    Timeline,
)
from slo_bench.harness.experiments.experiment import RunResult
from slo_bench.harness.results.cell_files import request_columns, write_details
from slo_bench.harness.results.run_folder import (
    open_run_folder,
    read_rows,
    write_rows,
)
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.whole_file import write_whole
from slo_bench.workloads.workload import Workload

TOML = 'name = "a"\nseed = 0\n'


def opened(path, *, toml=TOML, resume=False, cells=("a", "b", "c"), **environment):
    environment = {"python": "3", **environment}
    return open_run_folder(
        path, cells=cells, experiment_toml=toml, environment=environment, resume=resume
    )


def table(path):
    """The figures, without the checksums behind them."""
    lines = (path / "cells.csv").read_text().splitlines(keepends=True)
    return "".join(line.rpartition(",")[0] + "\n" for line in lines)


def test_rows_stand_in_the_order_of_the_experiment(tmp_path):
    with opened(tmp_path / "run") as folder:
        folder.add("c", {"cell": "c", "n": 3})
        folder.add("a", {"cell": "a", "n": 1})
        assert folder.missing == ["b"]
    assert table(tmp_path / "run") == "cell,n\na,1\nc,3\n"
    assert (tmp_path / "run" / "experiment.toml").read_text() == TOML


def test_cell_values_survive_writing_and_reading(tmp_path):
    rows = [
        {"cell": "a", "x": 0.1, "n": 3, "ok": True, "word": "1e3x", "none": None, "nan": math.nan},
        {"cell": "b", "x": math.inf, "n": -1, "ok": False, "word": "a,b", "more": 1e-9},
    ]
    write_rows(tmp_path / "cells.csv", rows)
    first, second = read_rows(tmp_path / "cells.csv")
    assert first == rows[0] | {"nan": None, "more": None}
    assert second == rows[1] | {"none": None, "nan": None}
    write_rows(tmp_path / "again.csv", [first, second])
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "cells.csv").read_text()


def test_a_row_that_stands_twice_is_refused_with_its_line(tmp_path):
    run = tmp_path / "run"
    with opened(run) as folder:
        for cell in "abc":
            folder.add(cell, {"cell": cell, "n": 1})
    lines = (run / "cells.csv").read_text().splitlines(keepends=True)
    (run / "cells.csv").write_text("".join([*lines, lines[2]]))
    pattern = r"repeats the cell b of line 3; take one line out \(.*cells.csv, line 5\)"
    with pytest.raises(SloBenchError, match=pattern):
        read_rows(run / "cells.csv")
    with pytest.raises(SloBenchError, match=pattern), opened(run, resume=True):
        pass
    with pytest.raises(SloBenchError, match=pattern):
        _ = RunResult(run).cells


def test_resume_writes_each_row_once_after_a_kill_before_the_table(tmp_path):
    run = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt), opened(run) as folder:
        folder.add("a", {"cell": "a", "n": 1})
        folder.keep("b", {"cell": "b", "n": 2})
        raise KeyboardInterrupt
    for _ in range(2):
        with opened(run, resume=True) as folder:
            for cell in folder.missing:
                folder.add(cell, {"cell": cell, "n": 2})
            folder.add("a", {"cell": "a", "n": 1})
    assert [row["cell"] for row in read_rows(run / "cells.csv")] == ["a", "b", "c"]


def test_columns_of_classes_stand_last(tmp_path):
    write_rows(
        tmp_path / "cells.csv",
        [
            {"cell": "a", "attainment_x": 1.0, "attainment_spread": 0.0},
            {"cell": "b", "attainment_y": 1.0, "attainment_spread": 0.0},
        ],
    )
    header = (tmp_path / "cells.csv").read_text().splitlines()[0]
    assert header == "cell,attainment_x,attainment_y,attainment_spread"


def test_parameter_columns_stand_before_the_figures(tmp_path):
    rows = [
        {"cell": "a", "system": "fifo", "requests": 5, "attainment": 1.0},
        {"cell": "b", "system": "s3", "s3.first": "oldest", "requests": 5, "attainment": 0.5},
    ]
    write_rows(tmp_path / "cells.csv", rows)
    lines = (tmp_path / "cells.csv").read_text().splitlines()
    assert lines[0] == "cell,system,s3.first,requests,attainment"
    assert lines[1] == "a,fifo,,5,1.0"


def test_run_folder_with_files_needs_resume(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(SloBenchError, match=r"not empty.*--resume"), opened(tmp_path):
        pass
    with pytest.raises(SloBenchError, match=r"no experiment\.toml"), opened(tmp_path, resume=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_resume_reads_the_finished_cells(tmp_path):
    run = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt), opened(run) as folder:
        folder.add("b", {"cell": "b", "n": 2})
        raise KeyboardInterrupt
    (run / "requests").mkdir()
    (run / "requests" / ".c.csv.gz.part").write_text("torn")
    with opened(run, resume=True) as folder:
        assert folder.missing == ["a", "c"]
        folder.add("a", {"cell": "a", "n": 1})
    assert table(run) == "cell,n\na,1\nb,2\n"
    assert list((run / "requests").iterdir()) == []


def test_resume_refuses_another_experiment(tmp_path):
    run = tmp_path / "run"
    with opened(run):
        pass
    with (
        pytest.raises(SloBenchError, match=r"another experiment.*'seed = 0'.*'seed = 1'.*line 2"),
        opened(run, toml=TOML.replace("0", "1"), resume=True),
    ):
        pass


STEP_TIMES = {"a on b tp1": {"fitted": True, "provenance": "tables"}}


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"slo_bench": "2", "step_time": STEP_TIMES}, "begun with slo-bench 1, this is 2"),
        ({"slo_bench": "1", "step_time": {"a on b tp1": {}}}, "other step times"),
        ({"slo_bench": "2", "step_time": {}}, None),  # a real server's cells stay what they are
        ({"slo_bench": "1", "step_time": STEP_TIMES}, None),
    ],
)
def test_resume_mixes_no_figures_of_two_simulators(tmp_path, now, problem):
    run = tmp_path / "run"
    with opened(run, slo_bench="1", step_time=now["step_time"] and STEP_TIMES) as folder:
        folder.add("a", {"cell": "a", "n": 1})
    refused = pytest.raises(SloBenchError, match=problem) if problem else contextlib.nullcontext()
    with refused, opened(run, resume=True, **now) as folder:
        assert folder.missing == ["b", "c"]


def test_failure_before_the_first_cell_removes_the_folder(tmp_path):
    with pytest.raises(SloBenchError, match="too long"), opened(tmp_path / "deep" / "run"):
        raise SloBenchError("too long")
    assert not (tmp_path / "deep" / "run").exists()


def test_failure_before_the_first_cell_keeps_an_existing_folder(tmp_path):
    with pytest.raises(SloBenchError, match="too long"), opened(tmp_path):
        raise SloBenchError("too long")
    assert tmp_path.is_dir()


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_run_folder_in_use_is_refused(tmp_path):
    run = tmp_path / "run"
    with (
        opened(run),
        pytest.raises(SloBenchError, match="in use by another run"),
        opened(run, resume=True),
    ):
        pass


def test_run_folder_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SloBenchError, match=r"cannot write to .*file"), opened(tmp_path / "file/x"):
        pass


def test_run_folder_in_thousands_of_folders_is_an_error(tmp_path):
    with pytest.raises(SloBenchError, match="cannot write to"), opened(tmp_path / ("a/" * 1500)):
        pass


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_run_folder_without_write_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SloBenchError, match="cannot write to"), opened(tmp_path / "run"):
        pass


def test_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_whole(path, [b"old"])

    def blocks():
        yield b"new, but"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, blocks())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def two_requests():
    workload = Workload(
        arrival_s=np.array([0.0, 1.0]),
        prompt_tokens=np.array([10, 20]),
        output_tokens=np.array([2, 3]),
        ttft_slo_s=np.array([0.5]),
    )
    records = Records.empty(2)
    records.arrival_s[:] = workload.arrival_s
    records.first_scheduled_s[0], records.first_token_s[0], records.finish_s[0] = 0.0, 0.25, 0.75
    records.output_tokens[0] = 2
    records.instance[0] = 0
    records.outcome[:] = [Outcome.FINISHED, Outcome.REJECTED]
    return request_columns(workload, records, judge(workload, records))


TIMELINE = Timeline(
    np.array([0.0, 1.0]), np.array([0, 1]), np.array([1, 0]), np.array([0.5, 0.125])
)


def test_request_details_are_written_as_csv(tmp_path):
    write_details(tmp_path, "a", two_requests(), TIMELINE, records="csv")
    lines = gzip.decompress((tmp_path / "requests/a.csv.gz").read_bytes()).decode().splitlines()
    assert lines == [
        "id,arrival_s,prompt_tokens,expected_output_tokens,ttft_slo_s,tpot_slo_s,e2e_slo_s,deadline_s,"
        "first_scheduled_s,first_token_s,finish_s,outcome,output_tokens,cached_tokens,preemptions_swap,"
        "preemptions_recompute,instance,slo_met",
        "0,0.000000,10,2,0.500000,inf,inf,inf,0.000000,0.250000,0.750000,finished,2,0,0,0,0,1",
        "1,1.000000,20,3,0.500000,inf,inf,inf,,,,rejected,0,0,0,0,-1,0",
    ]
    timeline = gzip.decompress((tmp_path / "timelines/a.csv.gz").read_bytes()).decode()
    assert timeline == (
        "time_s,waiting,running,kv_cache_usage\n0.000000,0,1,0.500000\n1.000000,1,0,0.125000\n"
    )


def test_request_details_as_parquet_equal_those_as_csv(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    write_details(tmp_path, "a", two_requests(), TIMELINE, records="parquet")
    write_details(tmp_path, "a", two_requests(), TIMELINE, records="csv")
    binary = pd.read_parquet(tmp_path / "requests/a.parquet")
    text = pd.read_csv(tmp_path / "requests/a.csv.gz")
    assert list(binary.columns) == list(text.columns)
    for name in text.columns:
        left, right = binary[name].tolist(), text[name].tolist()
        assert left == right or np.allclose(left, right, equal_nan=True)


def test_records_none_writes_the_timeline_alone(tmp_path):
    write_details(tmp_path, "a", two_requests(), TIMELINE, records="none")
    assert [p.name for p in tmp_path.iterdir()] == ["timelines"]
