"""Which test files belong to a source file."""

import subprocess
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]


def sources():
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.py"], check=True, capture_output=True, text=True
    )
    return [PurePath(name) for name in listed.stdout.split() if not name.startswith("tests/")]


@pytest.mark.slow
def test_every_source_file_has_tests(tests_near):
    assert not [str(source) for source in sources() if not tests_near.tests_near(source)]


@pytest.mark.slow
def test_every_exception_names_files_that_the_rules_do_not_find(tests_near):
    for key, pattern in tests_near.EXCEPTIONS.items():
        covered = [source for source in sources() if f"{source}".startswith(key)]
        tests = sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))
        assert tests, pattern
        assert any(tests_near.by_rule(source) != tests for source in covered), key


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("harness/core/kv/pages.py", ["harness/core/kv/test_pages.py"]),
        ("reports/figures/labels.py", ["reports/test_reports_labels.py"]),
        ("harness/engine/torch/attention.py", ["harness/engine/torch/test_paged_attention.py"]),
        ("harness/engine/loop/measures.py", ["harness/engine/test_loop.py"]),
        ("scripts/fit_power.py", ["predictors/test_power.py"]),
        (
            "harness/servers/launch/command_line.py",
            ["harness/servers/launch/test_described_deployment.py"],
        ),
        ("cli/commands/tune.py", ["tuner/search/test_tune_command.py"]),
        ("tests/cli/test_cli.py", ["cli/test_cli.py"]),
    ],
    ids=[
        "name",
        "folder and name",
        "import",
        "folder",
        "exception",
        "importers",
        "command",
        "test file",
    ],
)
def test_tests_near_each_rule(tests_near, source, tests):
    assert tests_near.tests_near(PurePath(source)) == [PurePath("tests") / name for name in tests]


@pytest.mark.parametrize(
    ("file", "message"),
    [("harness/core/absent.py", "no file of this clone"), ("README.md", "has no tests")],
)
def test_main_file_without_tests_exits_2(tests_near, monkeypatch, capsys, file, message):
    monkeypatch.setattr("sys.argv", ["tests_near.py", str(ROOT / file)])
    with pytest.raises(SystemExit) as end:
        tests_near.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
