"""Scripts are no modules of the package: they are loaded by their path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def import_cycles() -> ModuleType:
    return _load("import_cycles")


@pytest.fixture(scope="session")
def count_code() -> ModuleType:
    return _load("count_code")


@pytest.fixture(scope="session")
def docstring_names() -> ModuleType:
    return _load("docstring_names")


@pytest.fixture(scope="session")
def local_names(count_code: ModuleType) -> ModuleType:
    return _load("local_names")  # which imports count_code


@pytest.fixture(scope="session")
def paper_tables() -> ModuleType:
    return _load("paper_tables")


@pytest.fixture(scope="session")
def sbom() -> ModuleType:
    return _load("sbom")


@pytest.fixture(scope="session")
def tests_near() -> ModuleType:
    return _load("tests_near")
