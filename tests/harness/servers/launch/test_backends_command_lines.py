"""Command lines that are written, read by the servers' own parsers of arguments."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.backends.deployment_manifests import ServedDeployment

pytestmark = pytest.mark.backends
PARSERS = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
PARSE = """
import json, sys
for words in json.loads(sys.argv[1]):
    print("parsed", json.dumps(vars(parser.parse_args(words)), default=str))
"""
SETTINGS = {
    "vllm": [
        ({"tp": 2, "pp": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ({"memory_share": 0.85}, {"gpu_memory_utilization": 0.85}),
        (
            {"weight_dtype": "fp8", "kv_dtype": "fp8"},
            {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        ),
        (
            {"block_size": 32, "num_gpu_blocks": 100},
            {"block_size": 32, "num_gpu_blocks_override": 101},
        ),
        ({"kv_offload_gib": 12.0}, {"kv_offloading_size": 12.0}),
        (
            {"max_loras": 4, "lora_rank": 64},
            {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64},
        ),
        ({"speculation": "ngram:4@0.6<64"}, {}),
        (
            {"parameters": {"vllm": {"max_num_seqs": 64, "async_scheduling": False}}},
            {"max_num_seqs": 64, "async_scheduling": False},
        ),
        (
            {"model": "deepseek-v3", "tp": 1, "dp": 8, "ep": 8},
            {"data_parallel_size": 8, "enable_expert_parallel": True},
        ),
    ],
    "sglang": [
        ({"tp": 2, "pp": 2}, {"tp_size": 2, "pp_size": 2}),
        ({"memory_share": 0.85}, {"mem_fraction_static": 0.85}),
        (
            {"weight_dtype": "fp8", "kv_dtype": "fp8"},
            {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
        ),
        ({"block_size": 32, "num_gpu_blocks": 100}, {"page_size": 32, "max_total_tokens": 3200}),
        ({"kv_offload_gib": 12.0}, {"enable_hierarchical_cache": True, "hicache_size": 12}),
        (
            {"parameters": {"sglang": {"chunked_prefill_tokens": 4096, "max_running_requests": 9}}},
            {"chunked_prefill_size": 4096, "max_running_requests": 9},
        ),
        (
            {"model": "deepseek-v3", "tp": 1, "dp": 8, "ep": 8},
            {"tp_size": 8, "dp_size": 8, "ep_size": 8},
        ),
    ],
}


@pytest.mark.parametrize("system", ["vllm", pytest.param("sglang", marks=pytest.mark.weekly)])
def test_written_command_lines_are_what_the_server_reads(system, installed):
    python = installed(system).python
    lines, models = [], []
    for settings, _ in SETTINGS[system]:
        experiment = Experiment(**{"systems": [system], "model": "qwen3-8b", "tp": 1, **settings})
        deployment = ServedDeployment.of(experiment)
        models.append(deployment.model)
        words = shlex.split(deployment.command)
        lines.append(words[2:] if system == "vllm" else words[3:])
    done = subprocess.run(
        [python, "-c", PARSERS[system] + PARSE, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [json.loads(line[7:]) for line in done.stdout.splitlines() if line[:7] == "parsed "]
    for (_, expected), model, namespace in zip(SETTINGS[system], models, parsed, strict=True):
        assert {name: namespace[name] for name in expected} == expected
        assert namespace.get("model_tag", namespace.get("model_path")) == model
