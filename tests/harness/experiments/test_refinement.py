"""Further rates around those that are carried: which, in which order, and after an interruption."""

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.refinement import further_rates
from slo_bench.workloads.parsing import parse_toml

SMALL = {"systems": ["vllm", "sarathi"], "requests": 40, "seeds": 1, "slo": "ttft=300ms"}


@pytest.mark.parametrize(
    ("attainment_by_rate", "rates"),
    [
        ({1.0: 1.0, 2.0: 0.95, 4.0: 0.5}, [3.0, 1.5]),  # in the middle, for 90 % and for 99 %
        ({1.0: 1.0, 2.0: 0.5, 4.0: 1.0}, [1.5, 1.5]),  # only rates below the first failure count
        ({1.0: 0.5, 2.0: 0.1}, [0.5, 0.5]),
        ({1.0: 1.0, 2.0: 1.0}, [2.6, 2.6]),
        ({3.0: 1.0, 3.1: 0.5}, []),  # close enough
        ({2.0: 1.0, 2.2: 0.95, 2.6: 0.0}, [2.4, 2.1]),
        ({2.1: 1.0, 2.3: 0.95, 2.4: 0.0}, [2.2]),
    ],
)
def test_further_rates_halve_the_steps_at_which_targets_are_lost(attainment_by_rate, rates):
    assert list(further_rates(attainment_by_rate)) == pytest.approx(rates)


def test_run_without_rates_adds_rates_that_all_its_systems_have(tmp_path):
    notes = []
    result = Experiment(**SMALL).run(
        tmp_path / "run", jobs=1, progress=lambda progress: notes.append(progress)
    )
    rows = result.rows()
    by_system = {
        name: [r["rate_rps"] for r in rows if r["system"] == name] for name in ("vllm", "sarathi")
    }
    assert by_system["vllm"] == by_system["sarathi"] == sorted(by_system["vllm"])
    settings = parse_toml((result.folder / "experiment.toml").read_text())
    assert settings["refine"] == 2
    assert set(settings["rates"]) < set(by_system["vllm"])
    (note,) = [progress.note for progress in notes if progress.note]
    assert note.startswith("first answer, of ")
    assert (notes[0].cells, notes[-1].cells) == (2 * len(settings["rates"]), len(rows))


def test_refined_run_of_its_experiment_file_gives_the_same_rows(tmp_path):
    first = Experiment(**SMALL).run(tmp_path / "first", jobs=1)
    again = Experiment.load(first.folder / "experiment.toml").run(tmp_path / "again", jobs=1)
    assert (again.folder / "cells.csv").read_bytes() == (first.folder / "cells.csv").read_bytes()


@pytest.mark.parametrize("finished", [2, 8, 10])
def test_interrupted_refinement_goes_on_and_ends_as_one_that_was_not(tmp_path, finished):
    whole = Experiment(**SMALL).run(tmp_path / "whole", jobs=1)

    def interrupt(progress):
        if progress.finished >= finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Experiment(**SMALL).run(tmp_path / "part", jobs=1, progress=interrupt)
    part = tmp_path / "part" / "cells.csv"
    assert len(part.read_text().splitlines()) == 1 + finished
    resumed = Experiment.load(tmp_path / "part" / "experiment.toml")
    resumed.run(tmp_path / "part", jobs=1, resume=True)
    assert part.read_bytes() == (whole.folder / "cells.csv").read_bytes()


def test_rates_that_are_given_stay_as_they_are(tmp_path):
    result = Experiment(**SMALL, rates=[2.0, 4.0]).run(tmp_path / "run", jobs=1)
    assert sorted({row["rate_rps"] for row in result.rows()}) == [2.0, 4.0]
    assert "refine" not in (result.folder / "experiment.toml").read_text()


def test_default_experiment_is_the_suite_that_run_takes_without_options():
    quickstart, default = Experiment.suite("quickstart").plan(), Experiment().plan()
    assert quickstart.cells == default.cells
    assert len(quickstart.cells) * 1000 <= 40_000  # the first answer: some seconds
