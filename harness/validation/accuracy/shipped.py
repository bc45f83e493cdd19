"""Measurements that come with the package, and which of them the predictor has seen."""

from __future__ import annotations

from pathlib import Path

from .measurement import CLOSED_LOOP, ClosedLoop, Measurement

SHIPPED = Path(__file__).parent / "data"


def seen(measurement: Measurement) -> bool:
    """Whether constants of the predictor were chosen with this measurement in view.

    Host times of vLLM and SGLang, the client's delay, what arithmetic takes under load, steps and
    lengths of AIConfigurator's harness: Qwen3-32B on H100. Its prompts and KV format: Llama-3.1-8B
    on H200. Host time of vLLM with asynchronous scheduling, KV formats of InferenceX and the choice
    of matrix sizes: Llama-3.1-70B on H100 and H200; KV format alone: B200, and of latent attention
    on H200. All-reduces of MiniMax-M2.5, and how its experts run: its rows. Kernels of
    gpt-oss-120b's experts: Hopper. How often SGLang looks for requests on B200, its chunks and
    memory: DeepSeek. How long SGLang launches a kernel of a prompt: half of its mixtures of experts
    on H200 and B200. Recipes and, up to 8 clients, vLLM's front end: B300, Kimi-K2.5 and
    gpt-oss-120b on B200. The front end was chosen with the open loop of H100, too, and with that of
    A100 how services choose servers; open loops count as not seen.
    """
    case = measurement.case
    if measurement.mode != CLOSED_LOOP or not isinstance(case.load, ClosedLoop):
        return False
    return (case.engine, case.gpu, case.model) in {
        ("vllm", "h100-80g", "qwen3-32b"),
        ("sglang", "h100-80g", "qwen3-32b"),
        ("vllm", "h100-80g", "llama-3.1-70b"),
        ("vllm", "h200-141g", "llama-3.1-70b"),
        ("vllm", "b200", "llama-3.1-70b"),
        ("vllm", "h200-141g", "llama-3.1-8b"),
        ("sglang", "h200-141g", "deepseek-r1"),
        ("vllm", "h200-141g", "kimi-k2.5"),
        ("vllm", "h100-80g", "minimax-m2.5"),
        ("vllm", "h200-141g", "minimax-m2.5"),
        ("vllm", "b200", "minimax-m2.5"),
        ("vllm", "h100-80g", "gpt-oss-120b"),
        ("vllm", "h200-141g", "gpt-oss-120b"),
        ("sglang", "b200", "deepseek-r1"),
        ("sglang", "b200", "deepseek-v3"),
        ("sglang", "h200-141g", "deepseek-v3"),
        ("sglang", "h200-141g", "glm-5"),
        ("sglang", "h200-141g", "qwen3-235b-a22b"),
        ("sglang", "h200-141g", "qwen3.5-397b-a17b"),
        ("sglang", "b200", "glm-5"),
        ("vllm", "b200", "kimi-k2.5"),
        ("vllm", "b200", "gpt-oss-120b"),
        ("vllm", "b300", "kimi-k2.5"),
        ("vllm", "b300", "minimax-m2.5"),
        ("sglang", "b300", "deepseek-v3"),
        ("sglang", "b300", "glm-5"),
        ("sglang", "b300", "qwen3.5-397b-a17b"),
        ("sglang", "b200", "qwen3.5-397b-a17b"),
    }
