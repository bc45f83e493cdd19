#!/usr/bin/env python3
"""Print the test files of a source file, one a line: `just test-near FILE` runs them.

Usage: scripts/tests_near.py FILE...

They are, in this order, the first of these that there are:

1. the row of `EXCEPTIONS`
2. files named for it in the mirrored folder or one above: `reports/figures/labels.py` has
   `tests/reports/test_reports_labels.py`
3. files that import it, in the mirrored folder or the nearest one above
4. the file named for its folder or one above: `harness/engine/loop/measures.py` has
   `tests/harness/engine/test_loop.py`
5. files that import it, below the nearest folder above
6. the tests of the modules that import it, of those nearest to it in the tree: of
   `harness/servers/launch/command_line.py` those of `described_deployment.py`

Those of a command are the files named for it in any folder: `cli/commands/tune.py` has
`tests/tuner/search/test_tune_command.py`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

import grimp

ROOT = Path(__file__).resolve().parents[1]
TESTS = PurePath("tests")
PACKAGE = "slo_bench"

# Sources, and folders of them, whose tests the rules do not find; patterns as of `Path.glob`.
EXCEPTIONS = {
    "__init__.py": "tests/test_public_api.py",
    "cli/commands/backends.py": "tests/harness/servers/launch/test_environments.py",
    "cli/commands/compare.py": "tests/cli/test_gate_command.py",
    "cli/commands/derive_slo.py": "tests/harness/experiments/test_multi_model_runs.py",
    "cli/commands/explain.py": "tests/cli/test_gate_command.py",
    "cli/commands/export.py": "tests/reports/test_exports.py",
    "cli/commands/plan.py": "tests/tuner/planning/test_planning*.py",
    "cli/commands/predict_eval.py": "tests/cli/test_predict_commands.py",
    "cli/commands/predict_train.py": "tests/cli/test_predict_commands.py",
    "cli/commands/profile.py": "tests/predictors/test_profiles_*.py",
    "cli/commands/profile_costs.py": "tests/predictors/test_costs_fit.py",
    "cli/commands/profile_run.py": "tests/harness/engine/torch/test_paged_profile.py",
    "cli/commands/report.py": "tests/reports/test_reports_command.py",
    "cli/commands/selftest.py": "tests/harness/load_generator/test_http_selftest.py",
    "cli/commands/serve.py": "tests/cli/test_serv*.py",
    "cli/commands/validate.py": "tests/harness/validation/replay/test_*_replay.py",
    "cli/commands/watch.py": "tests/reports/test_live.py",
    "cli/commands/workload.py": "tests/workloads/test_workloads_command.py",
    "cli/output/model_output.py": "tests/cli/test_model_command.py",
    "cli/output/plan_output.py": "tests/tuner/planning/test_planning.py",
    "cli/output/tune_output.py": "tests/tuner/search/test_tune_command.py",
    "cli/trust_code.py": "tests/cli/test_security.py",
    "harness/core/instance.py": "tests/harness/engine/cluster/test_cluster*.py",
    "harness/core/view.py": "tests/harness/engine/test_loop.py",
    "harness/engine/cluster/traced_cluster.py": "tests/harness/experiments/test_trace.py",
    "harness/engine/simulator/embedding.py": "tests/harness/policies/*/test_collocation.py",
    "harness/engine/simulator/simulated.py": "tests/harness/engine/test_simul*.py",
    "harness/engine/torch/model_tensors.py": "tests/harness/engine/torch/test_paged_folder.py",
    "harness/engine/torch/decoder_config.py": "tests/harness/engine/torch/test_paged_folder.py",
    "harness/engine/torch/execute.py": "tests/harness/engine/torch/test_paged_run.py",
    "harness/engine/torch/live_engine.py": "tests/harness/engine/torch/test_paged_server.py",
    "harness/engine/torch/text.py": "tests/harness/engine/torch/test_paged_server.py",
    "harness/engine/torch/torch_worker.py": "tests/harness/engine/torch/test_paged_worker_dies.py",
    "harness/experiments/backends/measuring.py": "tests/harness/load_generator/test_http_run.py",
    "harness/experiments/backends/torch_engine.py": "tests/harness/engine/torch/test_paged_run.py",
    "harness/experiments/backends/vllm_json.py": "tests/harness/load_generator/test_http_run.py",
    "harness/experiments/config/tables.py": "tests/harness/experiments/test_experiment_file.py",
    "harness/policies/paper_columns.py": "tests/harness/results/test_metrics.py",
    "harness/results/run_columns.py": "tests/harness/experiments/test_startup_imports.py",
    "harness/policies/shared/instance_load.py": "tests/harness/engine/cluster/test_known_ahead.py",
    "harness/policies/vllm_layerwise.py": "tests/harness/engine/cluster/test_instances_apart.py",
    "harness/results/run_checkpoint.py": "tests/tuner/capacity/test_capacity_folder.py",
    "harness/experiments/backends/attached.py": "tests/harness/experiments/test_attaching.py",
    "harness/experiments/backends/launched_models.py": "tests/harness/servers/*/test_model_s*.py",
    "harness/results/energy.py": "tests/predictors/test_power.py",
    "harness/results/request_blocks.py": "tests/harness/validation/replay/test_log_replay.py",
    "harness/servers/http/http_server.py": "tests/harness/servers/gateway/test_gateway.py",
    "harness/servers/launch/guard.py": "tests/harness/servers/launch/test_servers.py",
    "harness/servers/launch/server_flags.py": (
        "tests/harness/servers/launch/test_described_deployment.py"
    ),
    "harness/servers/sglang/sglang_flags.py": (
        "tests/harness/servers/launch/test_described_deployment.py"
    ),
    "harness/servers/vllm/vllm_flags.py": (
        "tests/harness/servers/launch/test_described_deployment.py"
    ),
    "harness/servers/sglang/cpu/": ("tests/harness/servers/sglang/test_sglang_kind.py"),
    "harness/servers/mock/": "tests/harness/load_generator/test_http_mock.py",
    "harness/servers/sglang/plugin/": "tests/harness/servers/sglang/test_*.py",
    "harness/servers/vllm/plugin/": "tests/harness/servers/vllm/test_*.py",
    "harness/servers/http/prometheus.py": "tests/harness/servers/gateway/test_gateway.py",
    "harness/servers/torch/torch_kind.py": "tests/harness/servers/test_server_kinds.py",
    "harness/experiments/labelled_run.py": "tests/cli/test_predict_commands.py",
    "harness/validation/replay/measured_level.py": (
        "tests/harness/validation/replay/test_run_replay.py"
    ),
    "harness/experiments/backends/server_profile.py": (
        "tests/harness/servers/launch/test_backends_profile.py"
    ),
    "policy.py": "tests/test_public_api.py",
    "harness/servers/launch/health_watch.py": "tests/harness/load_generator/test_reaching.py",
    "predictors/checkpoint_format.py": "tests/predictors/test_experts.py",
    "predictors/config_experts.py": "tests/predictors/test_published_models.py",
    "predictors/config_fields.py": "tests/predictors/test_published_configs.py",
    "predictors/config_layers.py": "tests/predictors/test_published_models.py",
    "predictors/image_encoder.py": "tests/predictors/test_published_models.py",
    "predictors/lengths/stream.py": "tests/cli/test_predict_commands.py",
    "predictors/lora.py": "tests/harness/core/kv/test_adapter_slots.py",
    "predictors/model_config.py": "tests/predictors/test_published_*.py",
    "predictors/profiles/calibration.py": "tests/harness/validation/calibration/test_calibrate.py",
    "predictors/profiles/scope.py": "tests/harness/validation/calibration/test_calibrate.py",
    "predictors/profiles/data_parallel.py": "tests/predictors/test_experts.py",
    "predictors/profiles/from_aiconfigurator.py": "tests/predictors/test_profiles_importers.py",
    "predictors/profiles/from_projects.py": "tests/predictors/test_profiles_importers.py",
    "predictors/profiles/from_vidur.py": "tests/predictors/test_profiles_importers.py",
    "predictors/scaled.py": "tests/tuner/sensitivity/test_sensitivity.py",
    "predictors/stretches.py": "tests/predictors/test_profiles_*.py",
    "reports/compare/loadgen.py": "tests/reports/test_exports.py",
    "reports/compare/rate_lead.py": "tests/reports/terminal/test_run_answer.py",
    "reports/pages/accuracy_page.py": "tests/harness/validation/test_accuracy.py",
    "reports/pages/capacity_page.py": "tests/tuner/capacity/test_capacity_*.py",
    "reports/pages/placement_page.py": "tests/cli/test_tune_placement.py",
    "reports/pages/predictor_page.py": "tests/cli/test_predict_commands.py",
    "reports/pages/sensitivity_page.py": "tests/tuner/sensitivity/test_sensitivity.py",
    "reports/terminal/capacity_answer.py": "tests/tuner/capacity/test_capacity_command.py",
    "reports/terminal/screen.py": "tests/reports/terminal/test_run_answer.py",
    "scripts/accuracy_page.py": "tests/harness/validation/test_accuracy.py",
    "scripts/aiconfigurator_predictions.py": "tests/harness/validation/test_accuracy.py",
    "scripts/build_hook.py": "tests/harness/core/test_compiled.py",
    "scripts/compile_core.py": "tests/harness/core/test_compiled.py",
    "scripts/fit_power.py": "tests/predictors/test_power.py",
    "scripts/pack_confusion.py": "tests/predictors/test_predictors_output_length.py",
    "scripts/pack_kernels.py": "tests/predictors/test_operators.py",
    "scripts/residuals.py": "tests/predictors/test_bands.py",
    "scripts/screenshots.py": "tests/cli/test_docs.py",
    "tools/benchmarks/": "tests/docs/test_commands.py",
    "tools/fuzz/": "tests/tools/fuzz/test_*.py",
    "tuner/search/confirm.py": "tests/tuner/search/test_tuning_study.py",
    "tuner/search/study_worker.py": "tests/tuner/search/test_tuning_pool.py",
    "workloads/arrays.py": "tests/workloads/test_workloads_source.py",
    "workloads/base.py": "tests/workloads/test_workloads_source.py",
    "workloads/call_parser.py": "tests/workloads/test_workloads_lengths.py",
    "workloads/checksums.py": "tests/workloads/test_workloads_fetch.py",
    "workloads/csv_text.py": "tests/cli/test_security.py",
    "workloads/input_files.py": "tests/harness/experiments/test_resumed_inputs.py",
    "workloads/machine_memory.py": "tests/cli/test_careless.py",
    "workloads/parsing.py": "tests/tools/fuzz/test_targets.py",
    "workloads/trust.py": "tests/cli/test_security.py",
}


@functools.cache
def test_files() -> dict[PurePath, frozenset[str]]:
    """The test files below `tests/`, with the modules of the package that each imports."""
    paths = sorted((ROOT / TESTS).rglob("test_*.py"))
    return {path.relative_to(ROOT): frozenset(_imported(path)) for path in paths}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _exception(source: PurePath) -> str | None:
    """The row of the file itself, or that of the nearest folder that has one."""
    keys = [source.as_posix(), *(f"{folder.as_posix()}/" for folder in source.parents)]
    return next((EXCEPTIONS[key] for key in keys if key in EXCEPTIONS), None)


def _named_for(path: PurePath) -> list[PurePath]:
    """Test files in the mirror of the folder or above, named for a source or for a folder."""
    words = path.with_suffix("").parts
    names = {f"test_{'_'.join(words[place:])}.py" for place in range(len(words))}
    folders = [TESTS / folder for folder in (path, *path.parents) if folder.parts]
    return [test for test in test_files() if test.name in names and test.parent in folders]


def _module(source: PurePath) -> str:
    return ".".join([PACKAGE, *source.with_suffix("").parts])


def _importing(source: PurePath) -> list[PurePath]:
    """Test files that import a source; a folder's `__init__.py` is imported with any of it."""
    module = _module(source)
    inside = module.removesuffix("__init__") if source.stem == "__init__" else f"{module}."
    return [
        test
        for test, imported in test_files().items()
        if any(name == module or name.startswith(inside) for name in imported)
    ]


def _of_command(source: PurePath) -> list[PurePath]:
    """Test files named for a command, in any folder; none of another source."""
    names = {f"test_{source.stem}.py", f"test_{source.stem}_command.py"}
    is_command = source.parent == PurePath("cli/commands")
    return [test for test in test_files() if is_command and test.name in names]


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None)


def _of_importers(source: PurePath) -> list[PurePath]:
    """The tests of the modules that import a source, of those with the most folders in common."""
    module = _module(source)
    if module not in _graph().modules:
        return []
    importers: dict[int, list[PurePath]] = {}
    for importer in _graph().find_modules_that_directly_import(module) - {PACKAGE}:
        path = PurePath(*importer.split(".")[1:]).with_suffix(".py")
        common = len({*path.parents} & {*source.parents})
        importers.setdefault(common, []).append(path)
    near = importers[max(importers)] if importers else []
    return sorted({test for path in near for test in by_rule(path)})


@functools.cache
def by_rule(source: PurePath) -> list[PurePath]:
    """The tests of a source file by its name, its importers or its folder; may be empty."""
    folders, importing = source.parents[:-1], _importing(source)
    beside = ([t for t in importing if t.parent == TESTS / folder] for folder in folders)
    below = ([t for t in importing if t.is_relative_to(TESTS / folder)] for folder in folders)
    rules = ([_of_command(source), _named_for(source)], beside, map(_named_for, folders), below)
    return next((tests for tests in itertools.chain(*rules) if tests), _of_importers(source))


def tests_near(source: PurePath) -> list[PurePath]:
    """The test files of a source file, both relative to the root; empty if there are none.

    A test file is its own.
    """
    if source in test_files():
        return [source]
    if (pattern := _exception(source)) is not None:
        return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))
    return by_rule(source)


def main() -> int:
    """Print the tests of each file; exit code 2 if one does not exist or has none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    near: dict[PurePath, None] = {}
    for file in parser.parse_args().files:
        path = file.resolve()
        if not (path.is_file() and path.is_relative_to(ROOT)):
            parser.error(f"{file} is no file of this clone")
        tests = tests_near(path.relative_to(ROOT))
        if not tests:
            parser.error(f"{file} has no tests; a row in EXCEPTIONS of {__file__} can name some")
        near |= dict.fromkeys(tests)
    print("\n".join(map(str, near)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
