"""TOML, JSON and logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slo_bench import Experiment
from slo_bench.harness.experiments.config.experiment_file import read_toml
from slo_bench.harness.load_generator.http.prompts import Vocabulary
from slo_bench.harness.results.engine_logs import read_log
from slo_bench.harness.results.step_log import read_step_log
from slo_bench.predictors.device_map import read_device_map
from slo_bench.predictors.model_config import read_model
from slo_bench.predictors.profiles.importers import ImportOptions as AskedProfile
from slo_bench.predictors.profiles.importers import import_profile
from slo_bench.reports.compare.comparing import read_results
from slo_bench.reports.pages.published_table import load_published

from .target import Target, from_file

EXPERIMENT = b"""name = "x"
systems = ["vllm", "sarathi"]
workload = ["synthetic(prompt=64,output=8)", "azure-conv"]
rates = [1, 2.5]
requests = 10
seeds = 1
slo = "ttft=1,tpot=0.1"
tp = [1, 2]
gpu = "a100-80g"
[parameters.sarathi]
chunk_tokens = [256, 512]
[client]
base_urls = ["http://127.0.0.1:1"]
headers = { "x" = "y" }
"""
_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_VISION_CONFIG = {
    "model_type": "llama4",
    "text_config": _CONFIG
    | {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 128,
    },
    "vision_config": {"depth": 2, "hidden_size": 8, "intermediate_size": 16, "patch_size": 4},
}
_SPARSE_CONFIG = _CONFIG | {
    "model_type": "glm_moe_dsa",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LOG = {
    "arrival_s": 0.5,
    "queued_s": 0.5,
    "prompt_tokens": 10,
    "output_tokens": 4,
    "first_token_s": 1.0,
    "last_token_s": 2.0,
}
_VLLM = {
    "request_throughput": 1.0,
    "model_id": "m",
    "request_rate": 2.0,
    "ttfts": [0.1, 0.2],
    "itls": [[0.1, 0.1], [0.1]],
    "output_lens": [3, 2],
    "input_lens": [5, 6],
    "errors": ["", ""],
    "start_times": [1.0, 2.0],
    "duration": 4.0,
}
_GUIDELLM = {
    "args": {"model": "m"},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "constant", "rate": 2.0}, "backend": {"model": "m"}},
            "start_time": 0.0,
            "end_time": 10.0,
            "requests": {
                "successful": [
                    {
                        "prompt_tokens": 5,
                        "output_tokens": 3,
                        "info": {
                            "timings": {
                                "request_start": 1.0,
                                "targeted_start": 0.9,
                                "first_token_iteration": 1.2,
                                "last_token_iteration": 1.5,
                                "request_end": 1.6,
                            }
                        },
                    }
                ]
            },
        }
    ],
}
_AIPERF = {
    "metadata": {"request_start_ns": 10**18, "request_end_ns": 10**18 + 10**9},
    "metrics": {
        "request_latency": {"value": 500.0, "unit": "ms"},
        "time_to_first_token": {"value": 100.0, "unit": "ms"},
        "output_sequence_length": {"value": 5, "unit": "tokens"},
        "input_sequence_length": {"value": 5, "unit": "tokens"},
    },
}
_STEPS = (
    b'{"event": "step", "time_s": 1.0, "decode_seqs": 2, "decode_kv_tokens": 30, '
    b'"chunks": [[0, 8]]}\n{"event": "done", "time_s": 1.5, "left": true}\n'
)
_MAP = {
    "model": "llama-3-8b",
    "lanes": 1,
    "stages": [
        {"device": "a", "gpu": "a100-80g", "layers": 16, "link": "nvlink3"},
        {"device": "b", "gpu": {"like": "a100-80g", "memory_gib": 40}, "layers": 16},
    ],
}
_PUBLISHED = b'title = "A paper"\n[[row]]\nwhat = "goodput"\npublished = 1.5\nunit = "req/s"\n'
_DISTSERVE = {
    "meta-llama/Meta-Llama-3-8B": {
        "1": {
            "prefill": [1, 2, 3],
            "decoding_smallbs": [1, 2, 3],
            "decoding_largebs": [1, 2, 3],
            "decoding_large_small_bs_threshold": 9,
        }
    }
}
_SPLITWISE = (
    b"model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\n"
    b"llama2-70b,a100-80gb,8,512,1,128,50,30\n"
)
_TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 0}]}


def targets(folder: Path) -> list[Target]:
    """Files of settings, catalogues, and results of other tools."""

    def doc(value: object) -> bytes:
        return json.dumps(value).encode()

    def lines(value: object) -> bytes:
        return 2 * (doc(value) + b"\n")

    def unlike(value: dict[str, object]) -> bytes:
        """Two lines; equal ones would count as a repetition, and are refused."""
        return doc(value) + b"\n" + doc(value | {"tag": "second"}) + b"\n"

    def load(path: Path) -> object:
        return Experiment.load(path)

    files: list[tuple[str, str, Callable[[Path], object], list[bytes]]] = [
        ("toml", "any.toml", read_toml, [EXPERIMENT]),
        ("experiment.toml", "experiment.toml", load, [EXPERIMENT]),
        ("published table", "p.toml", lambda p: load_published(str(p)), [_PUBLISHED]),
        (
            "model config.json",
            "m/config.json",
            read_model,
            [doc(_CONFIG), doc(_VISION_CONFIG), doc(_SPARSE_CONFIG)],
        ),
        ("device map", "map.json", _by_name(read_device_map), [doc(_MAP)]),
        ("request log", "log.jsonl", read_log, [lines(_LOG)]),
        ("step log", "steps.jsonl", read_step_log, [_STEPS]),
        ("vllm result", "v.json", read_results, [doc(_VLLM), unlike(_VLLM)]),
        ("guidellm result", "g.json", read_results, [doc(_GUIDELLM)]),
        ("aiperf result", "a.jsonl", read_results, [unlike(_AIPERF)]),
        (
            "tokenizer.json",
            "t/tokenizer.json",
            _vocabulary,
            [doc(_TOKENIZER)],
        ),
        ("distserve profile", "d.json", _imported("distserve", "llama-3-8b"), [doc(_DISTSERVE)]),
        ("splitwise profile", "s.csv", _imported("splitwise", None), [_SPLITWISE]),
    ]
    return [
        Target(name, seeds, from_file(folder / "tables", file, read_path))
        for name, file, read_path, seeds in files
    ]


def _vocabulary(path: Path) -> object:
    return Vocabulary.read(path.parent)


def _by_name(read_name: Any) -> Callable[[Path], object]:
    def read_path(path: Path) -> object:
        return read_name(str(path))

    return read_path


def _imported(source: str, model: str | None) -> Callable[[Path], object]:
    return lambda path: import_profile(source, path, AskedProfile(model=model))
