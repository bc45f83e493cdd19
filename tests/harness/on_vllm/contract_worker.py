"""Run by vLLM's own Python: the real scheduler and KV cache manager, with a runner that is fake.

contract_worker.py MODEL < cases.json > results.json, with slo_bench on PYTHONPATH
"""

import json
import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1"
)

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from slo_bench.harness.engines.on_vllm import connector
from slo_bench.harness.engines.on_vllm.hooks import HOOKS, moved
from slo_bench.harness.engines.on_vllm.scheduler import PolicyScheduler

BLOCK_TOKENS = 16
STEPS_PER_S = 128
MODEL = ModelConfig(model=sys.argv[1], dtype="float32", max_model_len=2048)


class Steps:
    now = 0


def made(case: dict) -> PolicyScheduler:
    os.environ["SLO_BENCH_POLICY"] = json.dumps(case["policy"])
    os.environ["SLO_BENCH_HOST_BLOCKS"] = str(case["host_blocks"])
    blocks = case["kv_blocks"] + 1  # vLLM keeps one for itself
    transfer = KVTransferConfig(
        kv_connector=connector.NAME,
        kv_connector_module_path=connector.__name__,
        kv_role="kv_both",
    )
    config = VllmConfig(
        model_config=MODEL,
        scheduler_config=SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=2048,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=False),
        kv_transfer_config=transfer if case["host_blocks"] else None,
    )
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return PolicyScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )


def run(case: dict) -> dict:
    Steps.now = 0
    scheduler = made(case)
    todo = list(enumerate(case["requests"]))
    finish_step: dict[str, int] = {}
    away: dict[str, str] = {}
    preempted: list[list] = []
    mixed_steps = 0
    while todo or scheduler.has_requests():
        if not scheduler.has_requests():
            Steps.now = max(Steps.now, todo[0][1]["arrival_step"])
        while todo and todo[0][1]["arrival_step"] <= Steps.now:
            row, r = todo.pop(0)
            params = SamplingParams(
                max_tokens=r["output_tokens"], ignore_eos=True, extra_args=r["wire"]
            )
            arrival_s = r["arrival_step"] / STEPS_PER_S
            scheduler.add_request(
                Request(str(row), [7] * r["prompt_tokens"], params, None, arrival_time=arrival_s)
            )
        output = scheduler.schedule()
        preempted += [[int(p["id"]), p["by"], p["kv_tokens"]] for p in scheduler._preempted]
        _, decode_seqs, _, chunks = scheduler._began
        mixed_steps += bool(decode_seqs and chunks)
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[i].is_prefill_chunk else [9] for i in ids]
        answers = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={i: at for at, i in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        Steps.now += 1
        for answer in answers.values():
            for one in answer.outputs:
                if one.finish_reason is not None and one.stop_reason:
                    away[one.request_id] = one.stop_reason
                elif one.finish_reason is not None:
                    finish_step[one.request_id] = Steps.now
        if Steps.now > 500_000:
            raise RuntimeError("the scheduler stands still")
    swaps = (
        [scheduler.connector.swaps_out, scheduler.connector.swaps_in]
        if case["host_blocks"]
        else [0, 0]
    )
    assert not scheduler.states, scheduler.states
    assert not scheduler.swapped
    return {
        "finish_step": finish_step,
        "away": away,
        "preempted": preempted,
        "swaps": swaps,
        "mixed_steps": mixed_steps,
    }


if __name__ == "__main__":
    PolicyScheduler.clock = staticmethod(lambda: Steps.now / STEPS_PER_S)
    os.environ["SLO_BENCH_POLICY"] = "{}"
    results = [run(case) for case in json.load(sys.stdin)]
    print(json.dumps({"moved": moved(), "hooks": len(HOOKS), "results": results}))
