"""The compiled core (scripts/compile_core.py) against its source."""

import ast
import inspect
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import slo_bench
from reference.settings import BESIDE, SEVERAL, TALKS
from slo_bench import Experiment, predictors
from slo_bench.harness import core, engine, policies, servers, validation
from slo_bench.harness.engine.compiled_core import core_is_compiled
from slo_bench.harness.servers.launch.server_process import plugin_folder

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"

TIGHT = {"num_gpu_blocks": 1200}  # requests are preempted
RUNS = [
    ("vllm", 5.0, {}),
    ("vllm", 12.0, TIGHT),
    ("vllm", 24.0, {"instances": 4}),
    ("vllm", 12.0, {"gpu": "h100-80g"}),
    ("sarathi", 12.0, TIGHT),
    ("vllm-v0", 12.0, TIGHT),
    ("vllm-swap", 12.0, TIGHT),
    ("sglang", 6.0, TALKS),
    ("orca", 5.0, {}),
    ("fastserve", 8.0, TIGHT),
    ("fastertransformer", 3.0, {}),
    ("edf", 12.0, TIGHT),
    ("edf-drop", 12.0, TIGHT),
    ("adaptivellm", 12.0, TIGHT),
    ("ascendra", 36.0, {"instances": 3}),
    ("llumnix", 14.0, {"instances": 2, "num_gpu_blocks": 1500}),
    ("distserve", 16.0, {"instances": 4}),
    ("mooncake", 6.0, TALKS | {"instances": 2}),
    ("memserve", 6.0, TALKS | {"instances": 2}),
    ("banaserve", 40.0, {"instances": 4}),
    ("collocation", 14.0, BESIDE | {"slo": "ttft=1; embed:e2e=3"}),
    ("qlm", 4.0, SEVERAL),
    ("static-partition", 30.0, SEVERAL),
    ("prism", 30.0, SEVERAL),
]


def write_all(folder: Path) -> None:
    """Run all experiments into `folder`."""
    for number, (system, rate, settings) in enumerate(RUNS):
        chosen = {"workload": "azure-conv", "slo": "ttft=1,tpot=0.15,e2e=30"} | settings
        experiment = Experiment(systems=[system], rates=[rate], requests=300, seeds=1, **chosen)
        experiment.run(folder / f"{number:02}-{system}", jobs=1)


def _write_in_a_process(python_path: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(python_path), str(TESTS)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.skipif(not core_is_compiled(), reason="the core is not compiled (.ci/compiled)")
def test_compiled_core_and_source_write_the_same_bytes(tmp_path):
    compiled = Path(slo_bench.__file__).parents[1]
    assert _write_in_a_process(compiled, tmp_path / "compiled") == "compiled"
    assert _write_in_a_process(plugin_folder(tmp_path), tmp_path / "source") == "source"
    files = [
        {
            path.relative_to(side): path.read_bytes()
            for path in side.rglob("*")
            if path.is_file() and path.name != "environment.json"
        }
        for side in (tmp_path / "compiled", tmp_path / "source")
    ]
    assert len(files[0]) > 3 * len(RUNS)
    assert [name for name in files[0] if files[0][name] != files[1].get(name)] == []
    assert files[0].keys() == files[1].keys()


def _modules() -> list[str]:
    listed = ast.parse((ROOT / "scripts" / "compile_core.py").read_text("utf-8"))
    return next(
        ast.literal_eval(line.value)
        for line in listed.body
        if isinstance(line, ast.Assign) and line.targets[0].id == "MODULES"
    )


def test_compiled_modules_exist_and_are_imported_compiled():
    for path in _modules():
        assert (ROOT / path).is_file()
        module = import_module(f"slo_bench.{path.removesuffix('.py').replace('/', '.')}")
        assert module.__file__.endswith(".py") != core_is_compiled()


def _classes() -> set[type]:
    classes = set()
    for folder in (core, engine, policies, predictors, servers, validation):
        for info in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            try:
                module = import_module(info.name)
            except ImportError:  # of torch, vLLM or SGLang
                continue
            classes.update(member for _, member in inspect.getmembers(module, inspect.isclass))
    return {cls for cls in classes if cls.__module__.startswith("slo_bench.")}


def _compiled_bases() -> list[tuple[type, type]]:
    """Classes that stay source, each with a base that is compiled."""
    compiled = {f"slo_bench.{path.removesuffix('.py').replace('/', '.')}" for path in _modules()}
    return [
        (subclass, base)
        for subclass in _classes()
        if subclass.__module__ not in compiled
        for base in subclass.__mro__[1:]
        if base.__module__ in compiled and not getattr(base, "_is_protocol", False)
    ]


def test_compiled_classes_with_source_subclasses_allow_them():
    """Otherwise the compiled class refuses its subclass when that is first made."""
    allowed = set()
    for module in _modules():
        for line in ast.parse((ROOT / module).read_text("utf-8")).body:
            if isinstance(line, ast.ClassDef):
                decorators = [ast.unparse(decorator) for decorator in line.decorator_list]
                if "mypyc_attr(allow_interpreted_subclasses=True)" in decorators:
                    allowed.add(line.name)
    assert {base.__name__ for _, base in _compiled_bases()} - allowed == set()


def test_subclass_does_not_override_compiled_attribute_by_property():
    """Compiled methods read attributes where they lie, and would not see the property."""
    hidden = []
    for subclass, base in _compiled_bases():
        names = {*getattr(base, "__slots__", ()), *getattr(base, "__annotations__", ())}
        hidden += [
            (subclass, name) for name in names if isinstance(vars(subclass).get(name), property)
        ]
    assert hidden == []


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
    print("compiled" if core_is_compiled() else "source")
