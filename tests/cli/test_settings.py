"""A setting is declared once; no command spells its options out."""

import ast
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import slo_bench.cli.commands
from slo_bench import Experiment
from slo_bench.cli.main import app
from slo_bench.cli.options.from_schema import Offer, with_options
from slo_bench.cli.options.parameters import flag, option, option_group
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.config.setting import SERVES_MORE, Axis, declared, setting
from slo_bench.harness.experiments.execution.cell_specs import (
    PlacementSpec,
    WorkloadSpec,
    defaults_of,
)

COMMANDS = Path(slo_bench.cli.commands.__file__).parent

# Everything below `schema` is imported after the schema has one setting more.
WIDER = """
    import sys
    from slo_bench.harness.experiments.config import schema
    from slo_bench.harness.experiments.config.setting import SERVES, Axis, Count, setting

    class Wider(schema.ExperimentSchema):
        rack_slots: Axis[Count] = setting(SERVES, "Slots of a rack.", 1, unit="slots")

    schema.ExperimentSchema = Wider
"""


def wider(program, folder):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WIDER) + textwrap.dedent(program)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL = ["-s", "vllm,orca", "--rates", "2", "--seeds", "1", "-n", "10", "--out", "o", "--json"]


@pytest.mark.slow
def test_new_setting_becomes_an_option_of_run_capacity_and_tune(tmp_path):
    for command in ("run", "capacity", "tune system"):
        words = [*command.split(), "--help-all"]
        shown = wider(
            f"""
            from slo_bench.cli.main import app
            sys.argv = ["slo-bench", *{words}]
            app()
            """,
            tmp_path,
        )
        assert "--rack-slots" in shown
        assert "Slots of a rack. Default: 1." in re.sub(r"\s+", " ", shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--rack-slots", "3"], [None]),  # a single value has no column
        (["--set", "rack_slots=3"], [None]),
        (["--sweep", "rack_slots=2,3"], [2, 3]),
    ],
)
def test_new_setting_can_be_set_swept_and_is_written_to_the_file(words, values, tmp_path):
    out = wider(
        f"""
        from slo_bench.cli.main import main
        sys.argv = ["slo-bench", "run", *{SMALL + words}]
        main()
        """,
        tmp_path,
    )
    rows = json.loads(out)
    assert sorted({row.get("rack_slots") for row in rows}, key=str) == values
    kept = tomllib.loads((tmp_path / "o" / "experiment.toml").read_text())
    assert kept["rack_slots"] == ([2, 3] if values == [2, 3] else 3)
    if values == [2, 3]:
        assert "rack_slots 2" in (tmp_path / "o" / "report.html").read_text()
        assert {"vllm_rack-slots-2_rate-2_seed-0"} <= {row["cell"] for row in rows}


@pytest.mark.slow
def test_new_setting_is_read_from_python_and_files_and_makes_series(tmp_path):
    (tmp_path / "x.toml").write_text("rack_slots = [1, 4]\nrates = 2\n")
    out = wider(
        """
        from slo_bench import Experiment, SloBenchError
        from slo_bench.reports.figures.facets import SETUP
        assert Experiment(rack_slots=[1, 4], rates=2) == Experiment.load("x.toml")
        cells = Experiment.load("x.toml").plan().cells
        print(sorted({cell.columns["rack_slots"] for cell in cells}), "rack_slots" in SETUP)
        try:
            Experiment(rack_slots=0)
        except SloBenchError as error:
            print(error)
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "[1, 4] True",
        "rack_slots must be greater than or equal to 1 but is 0",
    ]


def test_every_setting_is_an_option_of_run():
    run = get_command(app).commands["run"]
    offered = {name for parameter in run.params for name in parameter.opts}
    assert {setting.option for setting in declared(ExperimentSchema).values()} <= offered
    hidden = set(ExperimentSchema.model_fields) - {
        p.partition(".")[0] for p in declared(ExperimentSchema)
    }
    # By --set and --sweep; in files alone: how parameters were chosen, and settings that change
    # together.
    assert hidden == {"parameters", "tuning", "variants"}


def test_commands_declare_at_most_fifteen_parameters_by_hand():
    counted = {}
    for path in COMMANDS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                parameters = node.args
                counted[f"{path.name}: {node.name}"] = len(parameters.args) + len(
                    parameters.kwonlyargs
                )
    assert not {name: count for name, count in counted.items() if count > 15}


def test_offer_of_an_unknown_setting_is_an_assertion_error():
    for words in ({"only": ("tq",)}, {"without": ("tq",)}, {"changed": {"tq": {}}}):
        with pytest.raises(AssertionError, match="no settings"):
            Offer(**words).parameters()


@option_group
class Stated:
    stage: str = option("S", "Stage.", "--stage", "-s", default="first")
    quiet: bool = flag("Print nothing.", "--quiet")


def test_option_group_has_the_defaults_of_its_options_and_becomes_options_of_a_command():
    assert Stated(quiet=True) == Stated("first", True)
    received = []

    @with_options
    def command(*, stage_options: Stated, count: int = option("N", "Count.", default=1)):
        received.append((stage_options, count))

    app = typer.Typer()
    app.command()(command)
    for words in ([], ["-s", "last", "--quiet", "--count", "2"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert received == [(Stated(), 1), (Stated("last", True), 2)]


def test_specs_of_cells_have_the_settings_and_defaults_of_the_schema():
    spec = PlacementSpec("m", "g", 1)
    assert (spec.model, spec.gpu, spec.tp, spec.memory_share) == ("m", "g", 1, 0.9)
    assert {"num_gpu_blocks", "device_map", "kv_disk_gib"} <= vars(spec).keys()
    assert not {"instances", "router", "gpus"} & vars(spec).keys()
    assert WorkloadSpec("w").arrivals == "poisson"
    with pytest.raises(TypeError, match="no settings of a placement"):
        PlacementSpec("m", "g", 1, arrivals="poisson")
    with pytest.raises(FrozenInstanceError):
        spec.tp = 2
    assert spec.replaced(tp=2) != spec == spec.replaced(tp=1)
    assert len({spec, spec.replaced(tp=1), WorkloadSpec("w")}) == 2


def test_a_setting_added_to_the_schema_is_a_field_of_the_spec_and_of_its_cells(monkeypatch):
    class More(ExperimentSchema):
        nvme_gib: Axis[float] = setting(SERVES_MORE, "KV on a local disk.", (3.0,), unit="GiB")

    monkeypatch.setattr("slo_bench.harness.experiments.config.schema.ExperimentSchema", More)
    assert PlacementSpec("m", "g", 1).nvme_gib == 3.0
    assert PlacementSpec.of(defaults_of("placement") | {"nvme_gib": 5.0}).nvme_gib == 5.0


def test_a_process_that_gets_a_spec_loads_no_schema():
    """A worker starts without pydantic; the placement that it is sent is whole."""
    sent = pickle.dumps(PlacementSpec("llama-3.1-8b", "a100-80g", 2, block_size=32))
    code = (
        "import pickle, sys\n"
        f"spec = pickle.loads({sent!r})\n"
        "from slo_bench.harness.experiments.execution.cell_specs import placed\n"
        "assert placed(spec.replaced(tp=4)).placement.tp == 4\n"
        "print(spec.tp, spec.block_size, 'pydantic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "32", "False"]


def test_set_option_takes_a_setting_a_table_or_a_parameter(slo_bench):
    words = ["run", "-s", "sarathi", "--rates", "2", "--seeds", "1", "-n", "10", "--no-report"]
    more = ["--set", "chunk_tokens=256", "--set", "tp=2"]
    code, _, err = slo_bench(*words, *more, "--set", "slo=ttft=1,tpot=0.2", "-o", "o")
    assert code == 0, err
    kept = Experiment.load("o/experiment.toml")
    assert kept.parameters == {"sarathi": {"chunk_tokens": (256,)}}
    assert (kept.tp, kept.slo) == ((2,), ("ttft=1,tpot=0.2",))
    for wrong, problem in (
        ("chunk=1", "did you mean chunk_tokens"),
        ("tp=1,2", "--set tp takes one value"),
        ("server.clok=cpu", "did you mean clock"),
        ("server.repetitions=2", "server.repetitions (--repetitions) has no effect with backend"),
    ):
        code, _, err = slo_bench(*words, "--set", wrong)
        assert code == 2
        assert problem in err
