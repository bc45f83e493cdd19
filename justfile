# What people type while they work on slo-bench; `just` lists it. `.ci/run` runs everything that
# must hold and installs what it needs.

set shell := ["bash", "-euo", "pipefail", "-c"]

export PATH := justfile_directory() / ".venv/bin" + ":" + env("PATH")

[private]
default:
    @just --list

# an environment in .venv, with what the tests and the hooks of pre-commit need
setup:
    python3 -m venv .venv
    pip install -e '.[test]'

# quick tests, or those that are named: just test tests/harness/policies -k fastserve
test *arguments="-n auto":
    python -m pytest {{ arguments }}

# tests of a source file: just test-near harness/core/kv/pages.py -x
test-near file *arguments:
    tests=$(scripts/tests_near.py {{ file }}) && python -m pytest $tests {{ arguments }}

# rules and layout of the code, names in docstrings
lint:
    ruff check
    ruff format --check
    scripts/docstring_names.py
    scripts/local_names.py

# put the code into its layout and mend what can be mended
format:
    ruff check --fix
    ruff format

types:
    mypy

# imports run one way, without circles
layers:
    lint-imports
    scripts/import_cycles.py
    deptry .

# lint, types and layers: what a commit must pass
check: lint types layers

# the pages as a site in build/docs
docs:
    .ci/docs

# commands of README and the pages, in environments made anew from what is committed
documented:
    .ci/environments
    python -m pytest -n 2 -m "documented and not weekly"

# what the simulator serves in a CPU second
bench:
    python tools/benchmarks/bench_simulator.py

# share of the code that the quick tests run
coverage:
    python -m pytest -n auto --cov --cov-report=term

# lines of code by folder
count:
    scripts/count_code.py

# run the papers' suites again and write the tables of their pages: just papers --suite ascendra
papers *arguments:
    scripts/paper_tables.py {{ arguments }}

# tests of real vLLM and SGLang servers on the CPU (installs 9 GB, outside this clone)
backends:
    slo-bench backends install vllm --cpu --with nixl
    slo-bench backends install sglang --cpu
    slo-bench backends check vllm
    slo-bench backends check sglang
    python -m pytest -m "backends and not weekly"

# tests of the report in headless Chromium
browser:
    python -m pytest -m browser -n 2

# wheels and sdist in dist/, tried where nothing else is installed
release:
    .ci/release dist

# all that must hold
all:
    .ci/run
