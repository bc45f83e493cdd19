"""A run that is resumed with another trace or policy file is refused: cells of two inputs are not
one table.
"""

import json

import pytest

from slo_bench import Experiment
from slo_bench.workloads.errors import SloBenchError

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},100,10\n" for i in range(9))
POLICY = """
from dataclasses import dataclass
from slo_bench import Policy

@dataclass(frozen=True)
class Mine(Policy):
    def queue_key(self, r, view):
        return r.arrival_s
"""


class EnoughError(Exception):
    pass


@pytest.fixture
def interrupted(tmp_path):
    """A run with one of two cells, and the files that it reads."""
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "mine.py").write_text(POLICY)
    experiment = Experiment(
        systems=str(tmp_path / "mine.py"),
        workload=str(tmp_path / "trace.csv"),
        replay_speeds=[1, 2],
        records="csv",
    )

    def stop(progress):
        if progress.finished:
            raise EnoughError

    with pytest.raises(EnoughError):
        experiment.run(tmp_path / "run", jobs=1, progress=stop, command=["run", "first"])
    return experiment, tmp_path


def test_resume_keeps_the_command_of_the_first_run(interrupted):
    experiment, folder = interrupted
    experiment.run(folder / "run", jobs=1, resume=True, command=["run", "second"])
    kept = json.loads((folder / "run" / "environment.json").read_text())
    assert kept["command"] == ["run", "first"]
    assert [again["command"] for again in kept["resumed"]] == [["run", "second"]]
    assert [name.rpartition("/")[2] for name in kept["inputs"]] == ["mine.py", "trace.csv"]


@pytest.mark.parametrize("name", ["trace.csv", "mine.py"])
def test_resume_with_a_changed_input_file_is_refused(interrupted, name):
    experiment, folder = interrupted
    rows = (folder / "run" / "cells.csv").read_bytes()
    before = (folder / name).read_text()
    (folder / name).write_text(before.replace("100,10", "900,10").replace("arrival_s\n", "id\n"))
    with pytest.raises(SloBenchError, match=rf"{name} was changed since .*run was begun"):
        experiment.run(folder / "run", jobs=1, resume=True)
    assert (folder / "run" / "cells.csv").read_bytes() == rows
    (folder / name).write_text(before)
    assert len(experiment.run(folder / "run", jobs=1, resume=True).rows()) == 2
