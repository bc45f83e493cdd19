"""Run by vLLM's own Python: its stock schedulers, driven as its engine core drives them.

stock_worker.py MODEL < cases.json > results.json

No model and no policy of ours: steps of one unit of time, tokens that are made up. With
asynchronous scheduling two batches are under way: a batch is decided before the output of the one
before it is there (`EngineCore.step_with_batch_queue`).
"""

import json
import os
import sys
from collections import deque

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1"
)

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MODEL_TOKENS = 2048
MODEL = ModelConfig(model=sys.argv[1], dtype="float32", max_model_len=MODEL_TOKENS)
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


def made(case: dict) -> Scheduler:
    blocks = case["num_gpu_blocks"] + 1  # vLLM keeps one for itself
    config = VllmConfig(
        model_config=MODEL,
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["max_num_batched_tokens"],
            max_model_len=MODEL_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=case["async_scheduling"],
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=case["prefix_caching"]
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return (AsyncScheduler if case["async_scheduling"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def asked(row: int, r: dict) -> Request:
    return Request(
        request_id=str(row),
        # Apart from what a group shares, nobody finds another's blocks.
        prompt_token_ids=[1000 + r["group"]] * r["shared_tokens"]
        + [row + 10] * (r["prompt_tokens"] - r["shared_tokens"]),
        sampling_params=SamplingParams(max_tokens=r["output_tokens"], ignore_eos=True),
        pooling_params=None,
        arrival_time=float(r["arrival_step"]),
        block_hasher=HASHER,
    )


def run(case: dict) -> dict:
    scheduler = made(case)
    todo = deque(enumerate(case["requests"]))
    depth = 2 if case["async_scheduling"] else 1
    under_way: deque = deque()
    now = free = 0
    steps: list[list[list[int]]] = []
    preempted: list[list[int]] = []
    finish_step: dict[str, int] = {}
    while todo or under_way or scheduler.has_requests():
        if not (under_way or scheduler.has_requests()):
            now = max(now, todo[0][1]["arrival_step"])
        while todo and todo[0][1]["arrival_step"] <= now:
            scheduler.add_request(asked(*todo.popleft()))
        if scheduler.has_requests():
            output = scheduler.schedule()
            tokens = output.num_scheduled_tokens
            # What was computed before this batch; the scheduler has counted the batch already.
            batch = [
                [int(i), scheduler.requests[i].num_computed_tokens - n, n]
                for i, n in tokens.items()
            ]
            whole = [i for i in tokens if not scheduler.requests[i].is_prefill_chunk]
            free = max(free, now) + bool(batch)
            under_way.appendleft((output, whole, free))
            preempted += [[len(steps), int(i)] for i in output.preempted_req_ids or ()]
            if batch:
                steps.append(sorted(batch))
                if len(under_way) < depth:
                    continue
        output, whole, end = under_way.pop()
        now = max(now, end)
        ids = list(output.num_scheduled_tokens)
        answers = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={i: index for index, i in enumerate(ids)},
                sampled_token_ids=[[int(i) + 10] if i in whole else [] for i in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for answer in answers.values():
            for engine_output in answer.outputs:
                if engine_output.finish_reason is not None:
                    finish_step[engine_output.request_id] = now
        if len(steps) > 500_000:
            raise RuntimeError("the scheduler stands still")
    return {"steps": steps, "preempted": preempted, "finish_step": finish_step}


if __name__ == "__main__":
    print(json.dumps([run(case) for case in json.load(sys.stdin)]))
