"""Real servers as the tuner sees them: started when they must be, failing, and always stopped."""

import contextlib
import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.backends.measuring import CellMeasurement
from slo_bench.harness.load_generator.http.request_columns import FAULTS
from slo_bench.harness.results.cell_files import Choice
from slo_bench.harness.results.metrics import Hardware
from slo_bench.harness.servers.launch.server_process import ServerError
from slo_bench.reports.pages.tuning import faults_texts
from slo_bench.tuner.capacity import folder
from slo_bench.tuner.capacity.capacity_cells import Simulator
from slo_bench.tuner.search import evaluate_configuration, runs, tuning_run
from slo_bench.tuner.search.evaluate_configuration import cell_of
from slo_bench.tuner.search.runs import Servers
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import tune
from slo_bench.workloads.errors import SloBenchError

EXPERIMENT = Experiment(systems="vllm", backend="vllm", requests=200, seeds=2)


@dataclass
class FakeServers:
    """Servers that answer as the simulator does; some settings do not start, some die."""

    log: list = field(default_factory=list)
    running: int = 0

    def backend_of(self, setup, say=None):
        if say is not None:
            say("starting")
        return FakeBackend(self, setup.backend)

    @property
    def starts(self):
        return [entry for entry in self.log if entry != "stop"]


@dataclass(frozen=True)
class FakeBackend:
    servers: FakeServers = field(repr=False)
    name: str = "vllm"

    def check(self, spec):
        if spec.parameters.get("max_num_seqs") == 5:
            raise SloBenchError("five is refused")

    def configuration(self, spec):
        return spec.system, tuple(sorted(spec.parameters.items())), spec.placement, spec.instances

    @contextlib.contextmanager
    def started(self, spec, folder):
        seqs = spec.parameters.get("max_num_seqs", 0)
        self.servers.log.append(seqs)
        if seqs == 7:
            raise ServerError("vllm ended with exit code 1; its log is x.log, which ends with: OOM")
        assert not self.servers.running, "two servers at once"
        self.servers.running += 1
        try:
            yield FakeDeployment(seqs)
        finally:
            self.servers.running -= 1
            self.servers.log.append("stop")


@dataclass
class FakeDeployment:
    seqs: int
    model: str = "m"
    gpu: str = "cpu"
    hardware: Hardware = field(default_factory=lambda: Hardware(0, 1.0, 0.0))
    dead: bool = False

    def measure_cell(self, spec, workload, folder, progress):
        if self.dead:
            raise ServerError("vllm ended with exit code -9")
        done = Simulator().measure(_simulated(spec), workload, None)
        if self.seqs == 6:
            self.dead = True
            return CellMeasurement(done.result, invalid_because="vllm ended with exit code -9")
        if self.seqs == 8:
            second = np.arange(len(workload)) % 2
            columns = {
                "status": np.full(len(workload), 200),
                "fault": Choice(second * FAULTS.index("malformed"), FAULTS),
                "detail": Choice(second, ["", "no JSON"]),
            }
            return dataclasses.replace(done, columns=columns, figures={"surplus_outputs": 7})
        return done


def _simulated(spec):
    place = spec.placement.replaced(gpu="a100-80g")
    return dataclasses.replace(spec, placement=place)


def use(monkeypatch, fake, bursts_rps=4.0):
    """`bursts_rps`: throughput of bursts, which take as long as this machine simulates them."""
    monkeypatch.setattr(folder, "throughput_of_bursts", lambda *args, **options: bursts_rps)
    for module in (evaluate_configuration, runs, tuning_run):
        monkeypatch.setattr(module, "backend_of", fake.backend_of)


@pytest.fixture
def servers(monkeypatch):
    fake = FakeServers()
    use(monkeypatch, fake)
    return fake


def settings(values, **changes):
    return TuneSettings(
        **{
            "objectives": ("goodput",),
            "rate_rps": 2.0,
            "search": {"max_num_seqs": values},
            "sampler": "grid",
            "confirm": False,
            **changes,
        }
    )


def test_server_that_does_not_start_or_dies_is_a_failed_trial(servers, tmp_path):
    tuned = tune(EXPERIMENT, settings("1,6,7,64"), tmp_path / "o").study
    states = {row.configuration["max_num_seqs"]: row for row in tuned.trials}
    assert states[7].state == states[6].state == "failed"
    assert "OOM" in states[7].reason
    assert "exit code -9" in states[6].reason
    (best,) = tuned.best
    assert best.configuration == {"max_num_seqs": 64}
    assert servers.running == 0
    assert servers.log.count("stop") == 3  # the one that never started has nothing to stop


def test_server_that_does_not_start_costs_one_start_also_after_resume(servers, tmp_path):
    crashing = settings("6..8", sampler="tpe", trials=3)
    tuned = tune(EXPERIMENT, crashing, tmp_path / "o").study
    assert sorted(row.configuration["max_num_seqs"] for row in tuned.trials) == [6, 7, 8]
    assert servers.starts.count(7) == 1
    (failed,) = (row for row in tuned.trials if row.configuration["max_num_seqs"] == 7)
    assert failed.state == "failed"
    assert "OOM" in failed.reason
    assert [row.configuration["max_num_seqs"] for row in tuned.best] == [8]
    again = tune(EXPERIMENT, crashing.changed(trials=9), tmp_path / "o", resume=True).study
    assert servers.starts.count(7) == servers.starts.count(6) == 1
    assert again.best == tuned.best


@pytest.mark.parametrize(("sampler", "first", "trials"), [("tpe", 10, 25), ("nsga2", 20, 50)])
def test_sampler_learns_from_servers_that_do_not_start(
    servers, tmp_path, monkeypatch, sampler, first, trials
):
    """Of 200 values, those below 100 do not start: few of them are tried after the first ones."""

    @contextlib.contextmanager
    def started(backend, spec, folder):
        seqs = spec.parameters["max_num_seqs"]
        servers.log.append(seqs)
        if seqs < 100:
            raise ServerError("vllm ended with exit code 1")
        yield FakeDeployment(seqs)

    monkeypatch.setattr(FakeBackend, "started", started)
    learning = settings("1..199", sampler=sampler, trials=trials)
    short = Experiment(systems="vllm", backend="vllm", requests=100, seeds=1)
    tuned = tune(short, learning, tmp_path / "o").study
    states = [row.state for row in tuned.trials]
    assert len(set(servers.starts)) == len(servers.starts) == trials
    at_first, later = states[:first].count("failed"), states[first:].count("failed")
    assert 0 < later / (trials - first) < 0.6 * at_first / first
    assert all(row.configuration["max_num_seqs"] >= 100 for row in tuned.best)


@pytest.mark.slow
@pytest.mark.parametrize("bursts_rps", [0.01, 4.0, 20000.0])
@pytest.mark.parametrize("survives", ["the race", "nothing"])
def test_leader_that_fails_when_its_capacity_is_searched_is_not_returned(
    servers, tmp_path, monkeypatch, survives, bursts_rps
):
    """Of two the better leads by its race; its second start fails, so the other one is searched."""
    use(monkeypatch, servers, bursts_rps)
    begun = FakeBackend.started

    @contextlib.contextmanager
    def started(backend, spec, folder):
        seqs = spec.parameters["max_num_seqs"]
        if seqs == 64 and (survives == "nothing" or 64 in servers.log):
            servers.log.append(seqs)
            raise ServerError("vllm ended with exit code 1; its log is x.log, which ends with: OOM")
        with begun(backend, spec, folder) as deployment:
            yield deployment

    monkeypatch.setattr(FakeBackend, "started", started)
    capacity = settings((64, 16), objectives=("capacity",), rate_rps=None, tolerance=0.4)
    tuned = tune(EXPERIMENT, capacity, tmp_path / "o").study
    assert [row.configuration["max_num_seqs"] for row in tuned.best] == [16]
    (failed,) = (row for row in tuned.trials if row.configuration["max_num_seqs"] == 64)
    assert failed.state == "failed"
    assert "OOM" in failed.reason


@pytest.mark.slow
def test_configurations_after_a_leader_that_failed_are_not_raced_against_it(
    servers, tmp_path, monkeypatch
):
    """64 leads and then fails; 32, which is worse than it and better than 16, wins in the end."""
    begun = FakeBackend.started

    @contextlib.contextmanager
    def started(backend, spec, folder):
        if spec.parameters["max_num_seqs"] == 64 and 64 in servers.log:
            raise ServerError("vllm ended with exit code 1")
        with begun(backend, spec, folder) as deployment:
            yield deployment

    monkeypatch.setattr(FakeBackend, "started", started)
    three = {"search": {"max_num_seqs": (32, 16, 64)}, "objectives": ("capacity",)}
    short = settings((), **three, rate_rps=None, tolerance=0.4, trials=2)
    before = tune(EXPERIMENT, short, tmp_path / "o").study
    states = {row.configuration["max_num_seqs"]: row.state for row in before.trials}
    assert states == {16: "finished", 64: "failed"}
    after = tune(EXPERIMENT, short.changed(trials=3), tmp_path / "o", resume=True).study
    assert [row.configuration["max_num_seqs"] for row in after.best] == [32]
    assert [row.values for row in after.trials[:2]] == [row.values for row in before.trials]


def test_configuration_refused_by_the_backend_is_infeasible(servers, tmp_path):
    tuned = tune(EXPERIMENT, settings("5,64"), tmp_path / "o").study
    assert {row.state for row in tuned.trials} == {"infeasible", "finished"}
    assert servers.starts == [64]


def test_tune_without_a_working_configuration_names_the_reason(servers, tmp_path):
    with pytest.raises(SloBenchError, match=r"none of 1 configurations can be used: .*OOM"):
        tune(EXPERIMENT, settings("7"), tmp_path / "o")


def test_server_is_restarted_only_for_another_configuration(servers, tmp_path):
    with Servers(tmp_path) as running:
        cell = cell_of(EXPERIMENT, "one")
        parameters = {"vllm": {"max_num_seqs": 8}}
        other = Experiment(systems="vllm", backend="vllm", parameters=parameters)
        first = running.of(EXPERIMENT, cell)
        assert running.of(EXPERIMENT, cell) is first
        elsewhere = Experiment(systems="vllm", backend="vllm", slo="e2e=5", workload="azure-conv")
        assert running.of(elsewhere, cell_of(elsewhere, "two")) is first
        assert running.of(other, cell_of(other, "three")) is not first
    assert servers.log == [0, "stop", 8, "stop"]


def test_starts_and_stops_of_servers_are_said_in_search_and_confirmation(servers, tmp_path):
    lines = []
    tune(EXPERIMENT, settings("32,64", confirm=True), tmp_path / "o", say=lines.append)
    assert lines.count("stopping the server") == len(servers.starts)
    assert lines.count("starting") >= len(servers.starts)


def test_interrupted_tune_stops_its_server(servers, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeDeployment, "measure_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(EXPERIMENT, settings("64"), tmp_path / "o")
    assert servers.running == 0
    monkeypatch.undo()
    use(monkeypatch, servers)
    tuned = tune(EXPERIMENT, settings("64"), tmp_path / "o", resume=True).study
    assert [(row.number, row.state) for row in tuned.trials] == [(0, "finished")]


def test_tune_all_at_once_measures_and_confirms_on_servers(servers, tmp_path):
    at_once = {"arrivals": "concurrency(60)", "requests": 60}
    measured = Experiment(**EXPERIMENT.model_dump(exclude_unset=True) | at_once)
    tune_settings = settings("1,64", objectives=("makespan",), rate_rps=None)
    tuned = tune(measured, tune_settings, tmp_path / "o").study
    assert tuned.best[0].configuration == {"max_num_seqs": 64}
    assert (0,) < tuned.best[0].values < max(row.values for row in tuned.trials)
    simulated = Experiment(systems="vllm", seeds=2, **at_once)
    confirmed = tune(
        simulated,
        tune_settings.changed(confirm=True, confirm_backend="vllm"),
        tmp_path / "confirmed",
    ).confirmed
    assert {row.backend for row in confirmed} == {"simulated", "vllm"}
    assert all(row.value > 0 for row in confirmed)
    assert servers.running == 0


@pytest.mark.slow
def test_tune_searches_capacity_on_servers(servers, tmp_path):
    tune_settings = settings("1,64", objectives=("capacity",), rate_rps=None, tolerance=0.3)
    tuned = tune(EXPERIMENT, tune_settings, tmp_path / "o").study
    assert tuned.best[0].configuration == {"max_num_seqs": 64}
    assert tuned.best[0].values[0] > 0


def test_tune_measures_the_simulated_winner_on_a_server(servers, tmp_path):
    simulated = Experiment(systems="vllm", requests=200, seeds=2)
    tune_settings = settings("1,64", confirm=True, confirm_backend="vllm")
    outcome = tune(simulated, tune_settings, tmp_path / "o")
    assert [(row.backend, row.configuration) for row in outcome.confirmed] == [
        ("simulated", "default"),
        ("simulated", f"trial {outcome.study.best[0].number}"),
        ("vllm", "default"),
        ("vllm", f"trial {outcome.study.best[0].number}"),
    ]
    assert all(row.value is not None for row in outcome.confirmed)
    assert servers.starts == [0, 64]  # the default, 256, is not among what is searched
    assert servers.running == 0


def test_tune_says_how_many_requests_of_which_trials_failed(servers, tmp_path):
    outcome = tune(EXPERIMENT, settings((4, 8)), tmp_path / "out")
    tuning = outcome.plain()
    configurations = [row["configuration"]["max_num_seqs"] for row in tuning["trials"]]
    trial = configurations.index(8)
    assert faults_texts(tuning) == [
        f"200 of {tuning['requests']} requests failed (no JSON), in trial {trial}.",
        f"14 of {tuning['requests']} answers have more tokens than requested.",
    ]
