"""Whole studies, small: what is found, and that nothing is lost or repeated."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from slo_bench import Experiment
from slo_bench.reports.pages.tuning import _trials_note
from slo_bench.tuner.capacity.capacity_cells import Simulator
from slo_bench.tuner.search import trial_leases as claims
from slo_bench.tuner.search.evaluate_configuration import (
    RACE_SEEDS,
    ConfigurationEvaluator,
    cell_of,
)
from slo_bench.tuner.search.last_race import LAST_RACE_SEEDS
from slo_bench.tuner.search.outcome import read_tuning
from slo_bench.tuner.search.runs import Runs, Servers
from slo_bench.tuner.search.settings import TuneSettings, load
from slo_bench.tuner.search.storage import open_storage, opened
from slo_bench.tuner.search.study_results import (
    EVALUATORS,
    FINISHED,
    KEY,
    LAST_RACE,
    OWNER,
    SAME_AS,
    STANDINGS,
    counted,
    importances,
    note,
    noted,
    stable_importances,
)
from slo_bench.tuner.search.study_worker import StudyWorker
from slo_bench.tuner.search.trial_leases import alive, cut_trials, new_name, working
from slo_bench.tuner.search.tuning_run import prepared, tune
from slo_bench.workloads.errors import SloBenchError

# Answers of few tokens are simulated in few steps.
EXPERIMENT = Experiment(systems="sarathi", requests=200, output_tokens="50")
GRID = {"chunk_tokens": "256,512,2048", "max_num_seqs": "4,256"}


def quick(**changes):
    return TuneSettings(
        **{"search": GRID, "trials": 6, "tolerance": 0.3, "confirm": False, **changes}
    )


def runs_of(folder):
    return [
        (path.stem, line["rate_rps"], line["seed"], line["requests"])
        for path in sorted((folder / "runs").glob("*.jsonl"))
        for line in map(json.loads, path.read_text().splitlines())
    ]


def trials_of(folder, storage=None, name=None):
    with opened(storage, folder) as kept:
        return optuna.load_study(study_name=name or folder.name, storage=kept).get_trials()


def test_runs_of_another_simulator_are_refused(tmp_path):
    spec = cell_of(EXPERIMENT, "default")
    simulators = [{"slo_bench": "1", "step_time": {"a": provenance}} for provenance in ("b", "c")]
    first = Runs(tmp_path / "a.jsonl", spec, Simulator, simulator=simulators[0])
    run = first.level(1.0, 0, 200)
    again = Runs(tmp_path / "a.jsonl", spec, Simulator, simulator=simulators[0])
    assert again.level(1.0, 0, 200) == run
    with pytest.raises(SloBenchError, match="other step times"):
        Runs(tmp_path / "a.jsonl", spec, Simulator, simulator=simulators[1])


@pytest.mark.slow
def test_tune_grid_tries_each_point_once_and_finds_the_best(tmp_path):
    outcome = tune(EXPERIMENT, quick(sampler="grid", trials=50), tmp_path / "o")
    rows = outcome.study.trials
    assert len(rows) == 6
    assert len({tuple(sorted(row.configuration.items())) for row in rows}) == 6
    (best,) = outcome.study.best
    assert best.configuration == {"chunk_tokens": 2048, "max_num_seqs": 256}
    assert best.values[0] > 1.1 * outcome.study.default.values[0]
    lost = [row for row in rows if row.state == "lost"]
    assert lost
    assert all(row.requests < best.requests for row in lost)
    assert all(row.values[0] <= best.values[0] for row in lost)
    assert outcome.study.requests == sum(requests for *_, requests in runs_of(tmp_path / "o"))


@pytest.mark.parametrize("sampler_seed", [0, 1])
def test_tpe_steps_from_the_leader_before_it_draws(tmp_path, sampler_seed):
    settings = quick(
        search={"chunk_tokens": "128,256,512,1024,2048", "max_num_seqs": "4,16,64,256"},
        objectives=("attainment",),
        rate_rps=1.0,
        trials=4,
        sampler_seed=sampler_seed,
    )
    rows = tune(EXPERIMENT, settings, tmp_path / "o").study.trials
    points = [tuple(row.configuration.values()) for row in rows]
    assert points[0] == (512, 256)
    steps = {(256, 256), (1024, 256), (512, 64)}
    leads = max(rows[:2], key=lambda row: row.values[0]).number  # the first of equals
    assert points[1] in steps
    assert leads > 0 or points[2] in steps


@pytest.mark.parametrize(("rate", "drifts"), [(40.0, True), (1.0, False)])
def test_trial_not_stationary_has_its_duration(tmp_path, rate, drifts):
    at_rate = quick(objectives="attainment", rate_rps=rate, trials=1, confirm=True)
    overload = Experiment(systems="sarathi", requests=1500, seeds=1, slo="ttft=1")
    outcome = tune(overload, at_rate, tmp_path / "o")
    (row,) = outcome.study.trials
    durations_s = [row["drifting_after_s"] for row in read_tuning(tmp_path / "o")["confirmed"]]
    assert durations_s
    assert all((after_s is not None) is drifts for after_s in durations_s)
    assert ("drifting_after_s" in row.figures) is drifts
    if drifts:
        assert 30 < row.figures["drifting_after_s"] < 1500 / 40 + 1  # less the warm-up


@pytest.mark.slow
def test_winner_is_written_as_a_file_to_run(tmp_path):
    outcome = tune(EXPERIMENT, quick(trials=3, confirm=True), tmp_path / "o")
    (winner,) = outcome.winners
    again = Experiment.load(winner.file)
    parameters = {name: values[0] for name, values in again.parameters["sarathi"].items()}
    assert parameters == dict(winner.row.configuration)
    assert winner.commands[0] == f"slo-bench run {winner.file}"
    kept = read_tuning(tmp_path / "o")
    names = [row["configuration"] for row in kept["confirmed"]]
    assert names[0] == "default"
    fresh = {seed for _, _, seed, _ in runs_of(tmp_path / "o" / "confirm" / "simulated" / "0")}
    tuned = {seed for _, _, seed, _ in runs_of(tmp_path / "o")}
    assert fresh
    assert not fresh & tuned
    if len(names) > 1:
        assert kept["confirmed"][1]["low"] <= kept["confirmed"][1]["value"]


@pytest.mark.slow
def test_ablation_resets_parameters_without_effect(tmp_path):
    # Batches never reach 256 requests at such rates, so 300 or 8,000 is the same.
    search = {"chunk_tokens": "512,2048", "max_num_seqs": "250..8000"}
    outcome = tune(EXPERIMENT, quick(search=search, sampler="random", confirm=True), tmp_path / "o")
    by_name = {row.parameter: row for row in outcome.ablations}
    assert by_name["chunk_tokens"].matters
    assert by_name["chunk_tokens"].high < 0
    assert not by_name["max_num_seqs"].matters
    assert by_name["max_num_seqs"].change == 0
    (winner,) = outcome.winners
    assert winner.row.configuration == {"chunk_tokens": 2048, "max_num_seqs": 256}
    assert not any("max_num_seqs" in command for command in winner.commands)
    assert read_tuning(tmp_path / "o")["ablations"][0]["parameter"] == "chunk_tokens"


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_the_dimension_that_decides_is_the_important_one(evaluator):
    rng = np.random.default_rng(0)
    space = {name: optuna.distributions.FloatDistribution(0, 1) for name in "ab"}
    trials = [
        optuna.trial.create_trial(
            params=dict(zip("ab", drawn, strict=True)), distributions=space, value=0.0
        )
        for drawn in rng.uniform(size=(40, 2)).tolist()
    ]
    values = [trial.params["b"] for trial in trials]
    shares = importances(trials, values, maximise=True, evaluator=evaluator)
    assert shares["b"] > 0.9 > 0.1 > shares["a"]
    with pytest.raises(SloBenchError, match="importances are by ped-anova or fanova, not 'anova'"):
        importances(trials, values, maximise=True, evaluator="anova")


def test_importances_due_to_chance_are_left_out():
    space = {"a": optuna.distributions.FloatDistribution(0, 1)}
    space |= {"b": optuna.distributions.FloatDistribution(0, 1)}
    rng = np.random.default_rng(0)
    trials = [
        optuna.create_trial(params={"a": a, "b": b}, distributions=space, value=0.0)
        for a, b in rng.uniform(size=(40, 2))
    ]
    by_chance = stable_importances(trials, rng.uniform(size=40).tolist(), maximise=True)
    assert by_chance == {}
    importances = stable_importances(trials, [trial.params["a"] for trial in trials], maximise=True)
    assert list(importances) == ["a"]
    share, low, high = importances["a"]
    assert 0.5 < low <= share <= high


@pytest.mark.slow
def test_configurations_are_run_with_the_same_seeds(tmp_path):
    tune(EXPERIMENT, quick(sampler="grid"), tmp_path / "o")
    first = {}
    for key, _, seed, _ in runs_of(tmp_path / "o"):
        first.setdefault(key, []).append(seed)
    starts = {min(seeds) for seeds in first.values()}
    assert starts <= {0, 500_000}  # searches, and races


CLOSE_GRID = {"chunk_tokens": "1024,2048,4096", "max_num_seqs": "16,256"}


@pytest.fixture(scope="module")
def raced_on(tmp_path_factory):
    """A study with few requests, of which the close configurations raced on; its last trials."""
    out = tmp_path_factory.mktemp("study") / "o"
    settings = quick(search=CLOSE_GRID, sampler="grid", max_requests=15_000)
    study = tune(EXPERIMENT, settings, out).study
    race, proof = trials_of(out)[-2:]
    return SimpleNamespace(study=study, out=out, settings=settings, race=race, proof=proof)


def test_last_race_is_counted_and_keeps_to_the_budget(raced_on):
    standings = noted(raced_on.race, STANDINGS)
    assert [number for number, *_ in standings] != raced_on.race.user_attrs[LAST_RACE]["trials"]
    assert raced_on.study.best[0].number == standings[0][0]
    runs = runs_of(raced_on.out)
    raced = {key for key, _, seed, _ in runs if seed >= LAST_RACE_SEEDS}
    assert len(raced) == len(standings) > 2
    assert len({rate for _, rate, seed, _ in runs if seed > LAST_RACE_SEEDS}) == 1
    assert raced_on.study.requests == sum(requests for *_, requests in runs) <= 15_000


def test_told_capacity_is_of_runs_that_chose_nobody(raced_on, tmp_path):
    """The search of the winner's capacity alone, where nothing else was run, finds the same."""
    tuning = prepared(EXPERIMENT, raced_on.settings)
    evaluator = ConfigurationEvaluator(
        tuning.experiment, tuning.space, tuning.aim, 0.3, tmp_path, Servers(tmp_path)
    )
    (best,) = raced_on.study.best
    spent_before = raced_on.study.requests - evaluated_alone(raced_on)
    runs = evaluator.runs_of(best.configuration)
    near_rps = raced_on.proof.user_attrs["proof"]
    alone = evaluator.worth(runs, near_rps=near_rps, most_requests=15_000 - spent_before)
    assert alone.values == best.values
    assert best.values[0] != noted(raced_on.race, STANDINGS)[0][1]
    assert max(seed for _, _, seed, _ in runs_of(tmp_path)) < RACE_SEEDS


def evaluated_alone(raced_on):
    """Requests of the search of the winner's capacity."""
    return sum(requests for _, _, seed, requests in runs_of(raced_on.out) if seed < RACE_SEEDS)


def test_resume_with_more_trials_continues_the_study(tmp_path):
    tune(EXPERIMENT, quick(trials=2), tmp_path / "o")
    before = runs_of(tmp_path / "o")
    outcome = tune(EXPERIMENT, quick(trials=4), tmp_path / "o", resume=True)
    assert len(outcome.study.trials) == 4
    after = runs_of(tmp_path / "o")
    assert set(before) <= set(after)
    assert len(set(after)) == len(after)


def test_resume_with_other_settings_is_refused(tmp_path):
    tune(EXPERIMENT, quick(trials=1), tmp_path / "o")
    with pytest.raises(SloBenchError, match=r"is not empty; continue .* with --resume"):
        tune(EXPERIMENT, quick(trials=1), tmp_path / "o")
    with pytest.raises(SloBenchError, match=r"holds another experiment: it has 'target = 0.9'"):
        tune(EXPERIMENT, quick(trials=1, target=0.8), tmp_path / "o", resume=True)


@pytest.mark.slow
def test_killed_study_is_resumed(tmp_path):
    folder = tmp_path / "o"
    words = ["tune", "sarathi", "--requests", "1000", "--sampler", "grid", "--no-confirm"]
    words += ["--set", "output_tokens=50"]
    words += [
        "--search",
        "chunk_tokens=256,512,2048",
        "--search",
        "max_num_seqs=4,256",
        "--tolerance",
        "0.2",
    ]
    words += ["--out", str(folder), "--no-report", "--trials", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "slo_bench.cli.main", *words], stderr=subprocess.DEVNULL
    )
    try:
        # In the midst of a trial: it has runs, and more trials are to come.
        while process.poll() is None and len(list(folder.glob("runs/*.jsonl"))) < 2:
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before = runs_of(folder)
    states = [trial.state for trial in trials_of(folder)]
    assert states.count(TrialState.RUNNING) <= 1
    experiment, settings = load(folder / "tune.toml")
    outcome = tune(experiment, settings, folder, resume=True)
    after = runs_of(folder)
    assert set(before) <= set(after)
    assert len(set(after)) == len(after)  # no run was made twice
    trials = trials_of(folder)
    assert [trial.state for trial in trials if not trial.state.is_finished()] == []
    assert TrialState.FAIL not in {trial.state for trial in trials}
    keys = [noted(trial, KEY) for trial in counted(trials)]
    assert len(keys) == len(set(keys)) == 6
    assert outcome.study.best[0].configuration == {"chunk_tokens": 2048, "max_num_seqs": 256}


@pytest.mark.slow
def test_study_interrupted_at_every_trial_finds_the_same(tmp_path, monkeypatch):
    settings = quick(sampler="tpe", search={"chunk_tokens": "128..4096", "max_num_seqs": "4,256"})
    whole = tune(EXPERIMENT, settings, tmp_path / "whole").study
    tell, cut = optuna.Study.tell, []

    def interrupted(study, trial, *values, **more):
        if trial.number in cut:
            return tell(study, trial, *values, **more)
        cut.append(trial.number)
        raise KeyboardInterrupt

    monkeypatch.setattr(optuna.Study, "tell", interrupted)
    begun = [trial.number for trial in trials_of(tmp_path / "whole")]  # with searches of leaders
    for number in begun:
        with pytest.raises(KeyboardInterrupt):
            tune(EXPERIMENT, settings, tmp_path / "cut", resume=number > 0)
    resumed = tune(EXPERIMENT, settings, tmp_path / "cut", resume=True).study
    assert cut == begun
    assert len(begun) > len(whole.trials) == settings.trials
    assert [timeless(row) for row in resumed.trials] == [timeless(row) for row in whole.trials]
    assert runs_of(tmp_path / "cut") == runs_of(tmp_path / "whole")


def test_tune_removes_unfinished_files_of_a_killed_study(tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    for name in (".study.json.4711.part", ".tune.toml.4711.part"):
        (out / name).write_text("{")
    tune(EXPERIMENT, quick(trials=1), out)
    assert not list(out.rglob("*.part"))


def timeless(row):
    return {**vars(row), "figures": {k: v for k, v in row.figures.items() if k != "wall_s"}}


@pytest.mark.slow
def test_processes_share_a_study(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    words = ["tune", "sarathi", "--requests", "200", "--tolerance", "0.3", "--no-confirm"]
    words += ["--set", "output_tokens=50"]
    words += ["--search", "chunk_tokens=128..4096", "--search", "max_num_seqs=4..64"]
    words += ["--storage", url, "--study", "shared", "--no-report", "--trials", "5"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "slo_bench.cli.main", *words, "--out", str(tmp_path / name)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for name in ("a", "b")
    ]
    for worker in workers:
        _, err = worker.communicate()
        assert worker.returncode == 0, err
    trials = trials_of(tmp_path, url, "shared")
    assert all(trial.state.is_finished() for trial in trials)
    owners = {noted(trial, OWNER) for trial in trials}
    assert 1 <= len(owners) <= 2
    assert 5 <= len(counted(trials)) <= 6  # each may begin one before it sees the other's
    keys = [noted(trial, KEY) for trial in trials if SAME_AS not in trial.user_attrs]
    assert len(keys) >= 5
    assert (tmp_path / "a" / "tune.json").is_file() or (tmp_path / "b" / "tune.json").is_file()


def test_who_leaves_a_search_to_another_does_it_once_the_other_has_ended(tmp_path, monkeypatch):
    begin_proof, looks = StudyWorker._begin_proof, []

    def other_at_work(worker, trials):  # its trial ends just after this look
        looks.append(len(trials))
        return begin_proof(worker, trials) if len(looks) > 1 else None

    monkeypatch.setattr(StudyWorker, "_begin_proof", other_at_work)
    outcome = tune(EXPERIMENT, quick(trials=2), tmp_path / "o")
    assert len(looks) > 1
    assert [row.state for row in outcome.study.best] == [FINISHED]


def test_trials_of_dead_processes_are_recognised(tmp_path):
    study = optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")
    live, dead, unsigned = study.ask(), study.ask(), study.ask()
    name = new_name()
    note(live, OWNER, name)
    machine, pid, began, word = name.split("/")
    # The number of another process before.
    note(dead, OWNER, f"{machine}/{pid}/{began}0/{word}")
    with alive(study, name):
        cut = {trial.number for trial in cut_trials(study, unsigned=True)}
        assert cut == {dead.number, unsigned.number}
        cut = {trial.number for trial in cut_trials(study, unsigned=False)}
        assert cut == {dead.number}  # the other may be being signed just now
    cut = {trial.number for trial in cut_trials(study, unsigned=True)}
    assert cut == {live.number, dead.number, unsigned.number}
    assert not working(study, "elsewhere/1/1/a")
    with alive(study, "elsewhere/1/1/a"):
        assert working(study, "elsewhere/1/1/a")


def test_signs_of_life_tolerate_clocks_that_differ(tmp_path, monkeypatch):
    study = optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")
    name = "elsewhere/2/1/b"
    wall_s, ours_s = 1e9, 50.0
    clocks = SimpleNamespace(time=lambda: wall_s, monotonic=lambda: ours_s)
    monkeypatch.setattr(claims, "time", clocks)

    def sign(at_s):
        study._storage.set_study_system_attr(study._study_id, claims._SIGN + name, at_s)

    sign(wall_s - 200.0)
    assert not working(study, name)  # silent for long, as far as the clocks agree
    sign(wall_s - 185.0)
    assert working(study, name)  # but it was only their clock
    wall_s += 3600.0
    ours_s += 80.0
    assert working(study, name)
    ours_s += 20.0
    assert not working(study, name)
    sign(wall_s - 7200.0)
    assert working(study, name)
    sign(0.0)  # it has ended
    assert not working(study, name)


def test_settings_refused_by_the_search_are_found_before_any_trial(tmp_path):
    few = Experiment(systems="sarathi", requests=40)
    with pytest.raises(SloBenchError, match="requests must be at least 100 but is 40"):
        tune(few, quick(), tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://nobody:secret@127.0.0.1:9/none", r"mysql://nobody@127.0.0.1:9/none"),
        ("no-such-database://x", "cannot be used"),
        ("missing-folder/study.journal", "there is no folder .*/missing-folder"),
        ("sqlite://", "is lost when the process ends"),
        ("sqlite:////proc/none/x.db", "cannot be used"),
    ],
)
def test_unreachable_storage_is_refused_before_any_trial(tmp_path, monkeypatch, url, problem):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SloBenchError, match=problem) as raised:
        tune(EXPERIMENT, quick(), tmp_path / "o", storage=url)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_tune_two_objectives_finds_a_front(tmp_path):
    settings = quick(objectives=("capacity", "cost"), search={"instances": "1,2"}, sampler="grid")
    tuned = tune(EXPERIMENT, settings, tmp_path / "o").study
    assert [row.values[1] for row in tuned.best] == [1, 2]
    single_capacity, double_capacity = (row.values[0] for row in tuned.best)
    assert double_capacity > 1.5 * single_capacity


@pytest.mark.parametrize("sampler", ["grid", "nsga2"])
def test_tune_cost_finds_the_fewest_gpus_that_carry_a_rate(tmp_path, sampler):
    settings = quick(
        objectives=("cost",), rate_rps=4.0, search={"instances": "1,2,3,4"}, sampler=sampler
    )
    tuned = tune(EXPERIMENT, settings, tmp_path / "o").study
    (best,) = tuned.best
    assert best.values == (best.configuration["instances"],)
    assert best.figures["attainment"] >= 0.9
    fewer = [row for row in tuned.trials if row.configuration["instances"] < best.values[0]]
    assert fewer
    assert all(row.figures["attainment"] < 0.9 for row in fewer)
    more = [row for row in tuned.trials if row.number > best.number and row.values > best.values]
    assert all(row.requests == 0 for row in more)  # they cannot be cheaper


AT_ONCE = Experiment(
    systems="s3",
    arrivals="concurrency(40)",
    requests=40,
    seeds=2,
    output_tokens="uniform(8,64)",
    slo="e2e=uniform(1,15)",
)


@pytest.mark.parametrize("objective", ["attainment", "e2e_mean", "makespan", "goodput"])
def test_tune_all_at_once_takes_the_mean_of_the_seeds_as_run_has_it(tmp_path, objective):
    search = {"max_batch": "1,4,16"}
    settings = quick(objectives=objective, search=search, sampler="grid", trials=3)
    study = tune(AT_ONCE, settings, tmp_path / "o").study
    (best,) = study.best
    columns = {"attainment": "attainment", "goodput": "goodput_rps"}
    column = columns.get(objective, f"{objective}_s")
    parameters = {"s3": {"max_batch": best.configuration["max_batch"]}}
    again = Experiment(**AT_ONCE.model_dump(exclude_unset=True), parameters=parameters)
    cells = again.run(tmp_path / "r", jobs=1).cells
    assert best.values == pytest.approx([cells[column].mean()])
    maximise = objective in ("attainment", "goodput")
    finished = [row.values[0] for row in study.trials if row.state == "finished"]
    assert best.values[0] == (max(finished) if maximise else min(finished))
    assert "drifting_after_s" not in best.figures  # nothing arrives while it runs


def test_trial_that_drops_requests_has_the_share_it_answered(tmp_path):
    dropping = {"systems": "edf-drop", "slo": "ttft=0.05"}
    experiment = Experiment(**AT_ONCE.model_dump(exclude_unset=True) | dropping)
    settings = quick(objectives="e2e_mean", search={"max_num_seqs": "4,64"}, trials=2)
    outcome = tune(experiment, settings, tmp_path / "o")
    assert all(0 < row.figures["answered"] < 1 for row in outcome.study.trials)
    text = str(_trials_note(outcome.plain()))
    assert "of the requests; latencies and makespan are of these alone" in text
    whole = tune(
        AT_ONCE,
        quick(objectives="makespan", search={"max_batch": "4"}, trials=1),
        tmp_path / "whole",
    )
    assert "answered" not in whole.study.trials[0].figures
    assert not _trials_note(whole.plain())


def test_tune_cost_all_at_once_finds_the_fewest_gpus_that_keep_the_target(tmp_path):
    settings = quick(objectives="cost", search={"instances": "1,2,4,8"}, sampler="grid", target=0.8)
    study = tune(AT_ONCE, settings, tmp_path / "o").study
    (best,) = study.best
    assert best.figures["attainment"] >= 0.8
    fewer = [row for row in study.trials if row.configuration["instances"] < best.values[0]]
    assert fewer
    assert all(row.figures["attainment"] < 0.8 for row in fewer)


def test_tune_closed_loop_goes_on_in_a_storage_without_repeating_a_run(tmp_path):
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    users = Experiment(**AT_ONCE.model_dump(exclude_unset=True) | {"arrivals": "concurrency(4)"})
    settings = quick(objectives=("e2e_mean", "attainment"), search={"max_batch": "1..16"}, trials=2)
    first = tune(users, settings, tmp_path / "o", storage=url)
    assert first.study.aim.load.text == "with 4 users"
    runs = runs_of(tmp_path / "o")
    assert {rate_rps for _, rate_rps, *_ in runs} == {None}
    second = tune(users, settings.changed(trials=4), tmp_path / "o", storage=url, resume=True).study
    assert second.trials[:2] == first.study.trials
    assert len(set(runs_of(tmp_path / "o"))) == len(runs_of(tmp_path / "o")) > len(runs)


def test_ablation_keeps_a_parameter_whose_default_is_not_searched(tmp_path):
    search = {"max_batch": "1..8", "first": ""}  # by default 32
    settings = quick(objectives="attainment", search=search, trials=4, confirm=True)
    outcome = tune(AT_ONCE, settings, tmp_path / "o")
    assert outcome.winners[0].row.configuration["max_batch"] <= 8
    assert {row.parameter for row in outcome.ablations} <= {"first"}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "nsga2", "random"])
def test_every_sampler_finds_the_best(tmp_path, sampler):
    if sampler == "gp":
        pytest.importorskip("torch")
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    settings = quick(
        sampler=sampler, search={"chunk_tokens": "256..4096", "max_num_seqs": "4..256"}, trials=3
    )
    outcome = tune(EXPERIMENT, settings, tmp_path / "o")
    assert len(outcome.study.trials) == 3
    assert outcome.study.best


@pytest.mark.slow
def test_slo_that_cannot_be_met_gives_a_warning_before_any_trial(tmp_path):
    warnings = []
    hopeless = Experiment(systems="sarathi", requests=200, slo="ttft=0.001")
    settings = quick(trials=1, search={"chunk_tokens": "512"})
    tune(hopeless, settings, tmp_path / "o", warn=warnings.append)
    assert len(warnings) == 1
    assert "cannot meet this SLO" in warnings[0]
    tune(EXPERIMENT, settings, tmp_path / "p", warn=warnings.append)
    assert len(warnings) == 1


def test_configurations_that_leave_models_on_no_gpu_are_infeasible(tmp_path):
    """A workspace of 131,072 tokens a model leaves no room for all 11 on two GPUs."""
    experiment = Experiment(
        systems="muxserve", models="fleet(llama-3.1-8b*11)", workload="azure-conv",
        gpu="h100-80g", gpus=2, requests=60, slo="ttft=1", seeds=1,
    )  # fmt: skip
    settings = quick(
        search={"max_num_batched_tokens": "512,131072"},
        objectives="attainment",
        rate_rps=8.0,
        trials=2,
    )
    tuned = tune(experiment, settings, tmp_path)
    by_tokens = {row.configuration["max_num_batched_tokens"]: row for row in tuned.study.trials}
    assert by_tokens[512].state == "finished"
    assert by_tokens[131072].state == "infeasible"
    assert by_tokens[131072].reason == "no GPU had room for 3 models"
    assert [row.configuration["max_num_batched_tokens"] for row in tuned.study.best] == [512]
