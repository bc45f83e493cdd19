"""Variants: named groups of settings that change together."""

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.allowances import allowances
from slo_bench.harness.experiments.execution.offered_load import estimate
from slo_bench.harness.results.read_run import read_run
from slo_bench.reports.figures.levels import combine
from slo_bench.tuner.planning.offers import choices
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.trust import asking

SETTINGS = {
    "systems": "vllm",
    "gpu": "h100-80g",
    "gpus": 4,
    "workload": ["sharegpt", "azure-code"],
    "rates": [1, 2],
    "requests": 20,
    "seeds": 1,
}
VARIANTS = {
    "tp4": {"tp": 4},
    "4 × tp1": {"tp": 1, "router": ["least-loaded", "round-robin"]},
    "split": {
        "systems": "distserve",
        "tp": 1,
        "parameters": {"distserve": {"prefill_instances": 2}},
    },
}


def experiment(**changes):
    return Experiment(**{**SETTINGS, "variants": VARIANTS, **changes})


def test_cells_of_variants_follow_one_another():
    cells = experiment().plan().cells
    assert (
        len({cell.cell for cell in cells})
        == len(cells)
        == 4 + 8 + 4
        == estimate(experiment()).cells
    )
    deployments = [(c.columns["variant"], c.system, c.placement.tp, c.instances) for c in cells]
    assert list(dict.fromkeys(deployments)) == [
        ("tp4", "vllm", 4, 1),
        ("4 × tp1", "vllm", 1, 4),
        ("split", "distserve", 1, 4),
    ]
    assert {len(c.columns) for c in cells if c.system == "vllm"} == {len(cells[0].columns)}
    assert cells[0].columns["tp"] == 4
    assert cells[-1].parameters["prefill_instances"] == 2
    assert "tp-4" not in cells[0].cell  # the variant says it


def test_variant_cells_equal_those_of_its_settings_alone():
    alone = Experiment(**SETTINGS, tp=4).plan().cells
    variant_cells = [c for c in experiment().plan().cells if c.columns["variant"] == "tp4"]
    plain = ("workload", "placement", "instances", "rate_rps", "seed", "parameters")
    assert [[getattr(c, n) for n in plain] for c in variant_cells] == [
        [getattr(c, n) for n in plain] for c in alone
    ]


def test_variants_survive_the_experiment_file(tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(experiment().to_toml())
    assert Experiment.load(path).plan().cells == experiment().plan().cells


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        ({"tpp": 2}, "variant x sets tpp: a variant has systems, parameters and settings of"),
        ({"rates": 2}, "variant x sets rates"),
        ({"tp": 0}, "variant x: tp must be greater than or equal to 1"),
        ({"systems": "distserve", "parameters": {"vllm": {"a": 1}}}, "not among the systems"),
    ],
)
def test_variant_with_an_error_is_named(variant, complaint):
    with pytest.raises(SloBenchError, match=complaint):
        experiment(variants={"x": variant})


def test_variant_error_names_the_variant_in_the_file(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('name = "x"\n[variants.a]\ntp = 1\n[variants.b]\ntp = "two"\n')
    with pytest.raises(SloBenchError, match=r"variant b: tp must be a valid integer"):
        Experiment.load(path)


def test_policy_file_of_a_variant_needs_trust_code(tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit(9)\n")
    path = tmp_path / "code.toml"
    path.write_text('[variants.a]\nsystems = "own.py"\n')
    questions = []
    with asking(questions.append, ()):
        Experiment.load(path)
    assert "own.py, a policy file that runs with your rights" in questions[0]


def test_run_with_variants_is_resumed_and_read(tmp_path):
    run = experiment().run(tmp_path / "run", jobs=1)
    assert run.rows() == experiment().run(tmp_path / "run", jobs=1, resume=True).rows()
    cells = combine([read_run(tmp_path / "run")])
    assert set(cells["facet"]) == {"sharegpt", "azure-code"}
    assert set(cells["series"]) == {
        "tp4",
        "4 × tp1 · router least-loaded",
        "4 × tp1 · router round-robin",
        "split",
    }


def test_allowances_name_the_variant():
    systems = [entry.system for entry in allowances(experiment())]
    assert systems == ["vllm (tp4)", "vllm (4 × tp1)", "distserve (split)"]


def test_one_variant_of_a_file_runs_alone(slo_bench, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'systems = "vllm"\ngpu = "h100-80g"\ngpus = 4\nworkload = "sharegpt"\nrates = 1\n'
        "requests = 20\nseeds = 1\n[variants.tp4]\ntp = 4\n[variants.tp2]\ntp = 2\n"
    )
    run = ("run", file, "--jobs", 1)
    code, _, err = slo_bench(*run, "--variant", "tp2", "--out", tmp_path / "one")
    assert code == 0, err
    kept = Experiment.load(tmp_path / "one" / "experiment.toml")
    assert (kept.tp, kept.variants) == ((2,), {})
    code, _, err = slo_bench(*run, "--variant", "tp8", "--out", tmp_path / "two")
    assert code == 2
    assert "unknown variant 'tp8'; did you mean" in err


def test_plan_command_refuses_variants():
    with pytest.raises(SloBenchError, match="plan takes no variants"):
        choices(experiment())
