import pytest

from slo_bench import Experiment
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.tuner.search.dimension import Dimension
from slo_bench.tuner.search.evaluate_configuration import cell_of
from slo_bench.tuner.search.samplers import checked, grid_of
from slo_bench.tuner.search.settings import (
    Aim,
    TrialLoad,
    TuneSettings,
    load,
    objectives_named,
    text_of,
)
from slo_bench.tuner.search.space import counts_gpus, key_of, space_of
from slo_bench.tuner.search.tuning_run import prepared
from slo_bench.workloads.errors import FileFormatError, SloBenchError

MODELS = "fleet(llama-3.1-8b*2)"


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_space_of_every_system_holds_its_default(name):
    if all(bound.environment for bound in SYSTEMS[name].bounds().values()):
        return
    space = space_of(Experiment(systems=name), {}, None)
    assert space.default is not None
    assert {dimension.name for dimension in space.dimensions} <= set(SYSTEMS[name].bounds())


def test_space_matches_whole_values_with_a_real_default():
    search = {"threshold": "0.25,0.5,1,2,4", "tickets": "true,false"}
    space = space_of(Experiment(systems="ascendra"), search, None)
    assert space.default == {"threshold": 1.0, "tickets": True}
    assert key_of(space.default) == key_of({"threshold": 1, "tickets": True})  # tried once
    assert not Dimension("x", choices=(0, 1)).holds(True)


def test_space_holds_only_the_named_dimensions():
    search = {"sarathi.chunk_tokens": "256..1024", "tp": "1,2", "max_num_seqs": ""}
    space = space_of(Experiment(systems="sarathi"), search, None)
    assert {dimension.name: str(dimension) for dimension in space.dimensions} == {
        "chunk_tokens": "256..1024",
        "tp": "1:2:1",
        "max_num_seqs": "1..8192:log",
    }
    assert space.default is None  # tp is what fits
    applied = space.applied(
        Experiment(systems="sarathi"), {"chunk_tokens": 256, "tp": 2, "max_num_seqs": 8}
    )
    spec = cell_of(applied, "c")
    assert spec.parameters == {"chunk_tokens": 256, "max_num_seqs": 8}
    assert spec.placement.tp == 2


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ({"slo_weight": "0..200"}, r"slo-odbs.slo_weight must be from 0.0 to 100.0 but is 200"),
        ({"length_term": "absolute,other"}, "must be one of"),
        ({"slo_wait": ""}, "unknown parameter or setting in --search 'slo_wait'; did you mean"),
        ({"vllm.slo_weight": ""}, "unknown system in --search 'vllm'"),
        ({"max_batch": "0.5,1"}, "whole"),
        ({"tp": ""}, "give the values of tp to search"),
        ({"server.dtype": "a,b"}, "is an option of a server"),
        ({"num_gpu_blocks": "0..5"}, "num_gpu_blocks"),
    ],
)
def test_impossible_spaces_are_refused(search, problem):
    with pytest.raises(SloBenchError, match=problem):
        space_of(Experiment(systems="slo-odbs"), search, None)


def test_space_has_machine_parameters_only_if_named():
    whole = space_of(Experiment(systems="distserve"), {}, None)
    assert "network_gb_per_s" not in {dimension.name for dimension in whole.dimensions}
    named = space_of(Experiment(systems="distserve"), {"network_gb_per_s": "10..100"}, None)
    assert [dimension.name for dimension in named.dimensions] == ["network_gb_per_s"]


def test_space_leaves_set_parameters_out():
    fixed = Experiment(systems="sarathi", parameters={"sarathi": {"chunk_tokens": 512}})
    names = {dimension.name for dimension in space_of(fixed, {}, None).dimensions}
    assert "chunk_tokens" not in names
    with pytest.raises(SloBenchError, match="both set and searched"):
        space_of(fixed, {"chunk_tokens": "256..1024"}, None)
    with pytest.raises(SloBenchError, match="both set and searched"):
        space_of(Experiment(systems="sarathi", tp=2), {"tp": "1,2"}, None)


def test_space_of_a_stock_server_has_its_own_options():
    whole = space_of(Experiment(systems="vllm", backend="vllm"), {}, None)
    assert {dimension.name for dimension in whole.dimensions} == {
        "max_num_batched_tokens",
        "max_num_seqs",
    }
    with pytest.raises(
        SloBenchError, match="unknown parameter or setting in --search 'async_sched"
    ):
        space_of(Experiment(systems="vllm", backend="vllm"), {"async_scheduling": ""}, None)


def test_space_limits_instances_by_the_gpus():
    space = space_of(Experiment(systems="ascendra", gpus=4), {"n_lp": "", "n_hp": ""}, 4)
    assert [str(dimension) for dimension in space.dimensions] == ["1..3", "1..3"]
    assert counts_gpus(space) == ("n_lp", "n_hp")
    held = prepared(Experiment(systems="ascendra"), TuneSettings(search={"n_lp": "1..2"}))
    assert held.experiment.gpus == (3,)


def test_configuration_key_does_not_depend_on_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objectives": ("goodput",)}, "goodput is measured at one rate: give it"),
        ({"objectives": ("capacity",), "rate_rps": 3.0}, "capacity finds the rate itself"),
        ({"objectives": ("cost",), "search": {"instances": "1..2"}}, "cost is the fewest GPUs"),
        ({"objectives": ("cost", "capacity")}, "nothing that is searched changes it"),
        ({"objectives": ("goodput", "goodput"), "rate_rps": 1.0}, "given twice"),
        ({"objectives": ("goodput", "attainment"), "rate_rps": 1.0}, "the same objective"),
        ({"objectives": ("speed",)}, "unknown objective"),
        ({"search": {"instances": "1..4"}}, "more instances always carry more"),
        ({"target": 1.0}, "target must lie between 0 and 1"),
        ({"sampler": "bayes"}, "unknown sampler"),
        ({"sampler": "cmaes", "search": {"overdue": ""}}, "searches numbers"),
        ({"sampler": "cmaes", "objectives": ("capacity", "cost")}, "one objective|changes it"),
        ({"confirm_workloads": ("no-such",)}, "no-such"),
        ({"confirm_backend": "tgi"}, "confirm_backend must be 'vllm' or 'sglang'"),
        ({"trials": 0}, "trials must be greater than or equal to 1"),
    ],
)
def test_contradicting_tune_settings_are_refused(settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        prepared(Experiment(systems="slo-odbs"), TuneSettings(**settings))


def test_grid_has_its_steps_and_end():
    space = space_of(
        Experiment(systems="slo-odbs"), {"slo_weight": "0:7:1", "output_weight": "0,1,4"}, None
    )
    assert grid_of(space.dimensions) == {
        "slo_weight": [0, 1, 2, 3, 4, 5, 6, 7],
        "output_weight": [0, 1, 4],
    }
    whole = space_of(Experiment(systems="slo-odbs"), {}, None)
    with pytest.raises(SloBenchError, match=r"more than 20,000; search fewer"):
        checked("grid", whole.dimensions, 1)


def test_tune_file_is_read(tmp_path):
    path = tmp_path / "tune.toml"
    path.write_text(
        'systems = "sarathi"\n[tune]\ntrials = 7\nobjectives = "ttft_p99"\nrate_rps = 2\n'
        '[tune.search]\nchunk_tokens = "256..1024"\ntp = [1, 2]\n'
    )
    experiment, settings = load(path)
    assert settings.trials == 7
    assert settings.objectives == ("ttft_p99",)
    assert settings.search == {"chunk_tokens": "256..1024", "tp": [1, 2]}
    path.write_text(text_of(experiment, settings))
    again, same = load(path)
    assert text_of(again, same) == path.read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tune]\ntrails = 7\n", r"unknown setting in \[tune\] 'trails'; did you mean.*line 2"),
        ("[tune]\ntarget = 2\n[tune.search]\n", r"target must lie.*line 2"),
        ("[tune]\ntolerance = 0.9\n", r"tolerance must be less than.*line 2"),
        ('systms = "vllm"\n', r"unknown setting 'systms'.*line 1"),
    ],
)
def test_tune_file_with_an_error_is_refused(tmp_path, text, problem):
    path = tmp_path / "tune.toml"
    path.write_text(text)
    with pytest.raises((FileFormatError, SloBenchError), match=problem):
        prepared(*load(path))


@pytest.mark.parametrize(
    ("arrivals", "requests", "rate_rps", "text"),
    [
        ("poisson", 200, 4.0, "at 4 req/s"),
        ("concurrency(8)", 200, None, "with 8 users"),
        ("concurrency(1)", 200, None, "with 1 user"),
        ("concurrency(100)", 100, None, "with 100 requests at once"),
        ("concurrency(500)", 100, None, "with 100 requests at once"),
    ],
)
def test_load_of_trials_is_named_as_the_arrivals_offer_it(arrivals, requests, rate_rps, text):
    trial_load = TrialLoad.of(Experiment(arrivals=arrivals, requests=requests), rate_rps)
    assert trial_load == TrialLoad(text, rate_rps)


def test_load_of_a_trace_whose_requests_come_at_once_has_no_rate(tmp_path):
    path = tmp_path / "batch.csv"
    rows = [f"0,{64 + n},8" for n in range(30)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    experiment = Experiment(workload=str(path))
    assert TrialLoad.of(experiment, None) == TrialLoad("with 30 requests at once")
    with pytest.raises(SloBenchError, match=r"batch.csv sets the load itself and has no rate"):
        TrialLoad.of(experiment, 2.0)


@pytest.mark.parametrize(
    ("objectives", "arrivals", "rate_rps", "problem"),
    [
        ("capacity", "concurrency(8)", None, "which a load with 8 users does not have: choose"),
        (
            ("capacity", "attainment"),
            "concurrency(8)",
            None,
            "--objective attainment, goodput, e2e_",
        ),
        ("attainment", "concurrency(8)", 2.0, r"concurrency\(8\) sets the load itself"),
        ("makespan", "poisson", 2.0, "set by the arrivals where they have a rate"),
        ("makespan", "poisson", None, "set by the arrivals where they have a rate"),
        ("attainment", "poisson", None, r"or arrivals that have none \(--arrivals"),
        ("attainment", "poisson", -1.0, "rate_rps must be greater than 0"),
    ],
)
def test_objective_that_says_nothing_under_the_arrivals_is_refused(
    objectives, arrivals, rate_rps, problem
):
    experiment = Experiment(systems="s3", arrivals=arrivals)
    with pytest.raises(SloBenchError, match=problem):
        prepared(experiment, TuneSettings(objectives=objectives, rate_rps=rate_rps))


def test_goodput_and_attainment_differ_where_the_arrivals_have_no_rate():
    settings = TuneSettings(objectives=("goodput", "attainment", "e2e_mean", "makespan"))
    tuning = prepared(Experiment(systems="s3", arrivals="concurrency(50)", requests=50), settings)
    assert tuning.aim.names == ("goodput", "attainment", "e2e_mean", "makespan")
    assert tuning.aim.load == TrialLoad("with 50 requests at once")


def test_aim_better_follows_the_objectives_direction():
    aim = Aim(objectives_named(("goodput", "ttft_p99")), load=TrialLoad("at 2 req/s", 2.0))
    goodput, latency = aim.objectives
    assert aim.better(goodput, 2.0, 1.0)
    assert aim.better(latency, 1.0, 2.0)
    assert not aim.better(latency, 1.0, 1.0)
