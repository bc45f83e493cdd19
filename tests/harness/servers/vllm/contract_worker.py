"""Run by vLLM's own Python: the real scheduler and KV cache manager, with a runner that is fake.

contract_worker.py MODEL < cases.json > results.json, with slo_bench on PYTHONPATH
"""

import json
import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1"
)

import cpu_platform  # noqa: F401  # before the rest of vLLM
import torch
import vllm
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

from slo_bench.harness.servers.vllm.plugin import connector
from slo_bench.harness.servers.vllm.plugin.hooks import TARGETS, moved
from slo_bench.harness.servers.vllm.plugin.scheduler import PolicyScheduler

BLOCK_SIZE = 16
TICKS_PER_S = 8192
MODEL = ModelConfig(model=sys.argv[1], dtype="float32", max_model_len=2048)


class Ticks:
    now = 0


class Costs:
    """What a step and a swap cost, and what the policy believes that they do."""

    def __init__(self, step_ticks: int, token_ticks: int, block_ticks: int) -> None:
        self.step_ticks, self.token_ticks = step_ticks, token_ticks
        self.block_ticks = block_ticks

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        prefilled = sum(tokens for _, tokens in chunks)
        return (self.step_ticks + self.token_ticks * prefilled) / TICKS_PER_S

    def swap_s(self, blocks):
        return blocks * self.block_ticks / TICKS_PER_S

    def output_tokens(self, r):
        return r.max_output_tokens

    output_tokens_p90 = output_tokens

    def learn(self, *composition_and_duration):
        pass

    def took_s(self, output, decodes: int, chunks: list[tuple[int, int]]) -> float:
        took_s = self.step_s(decodes, 0, chunks) if decodes or chunks else 0.0
        swaps = output.kv_connector_metadata
        if swaps is not None:
            took_s += self.swap_s(sum(len(ids) for _, ids in swaps.out))
            took_s += self.swap_s(sum(len(ids) for _, ids, _ in swaps.into))
        return took_s


def composition(
    scheduler: PolicyScheduler, output, unfinished: set[str]
) -> tuple[int, list[tuple[int, int]]]:
    """How many decode in this step, and the chunks beside them; `unfinished`: prompts so far."""
    decodes, chunks = 0, []
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        before = request.num_computed_tokens - tokens
        begun = before >= request.num_prompt_tokens and request_id not in unfinished
        if begun and tokens == 1:
            decodes += 1
        else:
            chunks.append((before, tokens))
    return decodes, chunks


def made(case: dict) -> PolicyScheduler:
    os.environ["SLO_BENCH_POLICY"] = json.dumps(case["policy"])
    os.environ["SLO_BENCH_NUM_CPU_BLOCKS"] = str(case["num_cpu_blocks"])
    blocks = case["num_gpu_blocks"] + 1  # vLLM keeps one for itself
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
            enable_chunked_prefill=case["chunked"],
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        kv_transfer_config=transfer if case["num_cpu_blocks"] else None,
    )
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return PolicyScheduler(
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


def run(case: dict) -> dict:
    Ticks.now = 0
    scheduler = made(case)
    scheduler.view.predict = costs = Costs(**case["costs"])
    todo = list(enumerate(case["requests"]))
    finish_ticks: dict[str, int] = {}
    rounds = 0
    away: dict[str, str] = {}
    preempted: list[list] = []
    mixed_steps = 0
    unfinished: set[str] = set()
    while todo or scheduler.has_requests():
        if not scheduler.has_requests():
            Ticks.now = max(Ticks.now, todo[0][1]["arrival_ticks"])
        while todo and todo[0][1]["arrival_ticks"] <= Ticks.now:
            row, r = todo.pop(0)
            params = SamplingParams(
                max_tokens=r["output_tokens"], ignore_eos=True, extra_args=r["wire"]
            )
            arrival_s = r["arrival_ticks"] / TICKS_PER_S
            scheduler.add_request(
                Request(str(row), [7] * r["prompt_tokens"], params, None, arrival_time=arrival_s)
            )
        output = scheduler.schedule()
        preempted += [[int(p["id"]), p["by"], p["kv_tokens"]] for p in scheduler.recorder.preempted]
        decodes, chunks = composition(scheduler, output, unfinished)
        unfinished = {i for i, r in scheduler.requests.items() if r.is_prefill_chunk}
        mixed_steps += bool(decodes and chunks)
        took_s = costs.took_s(output, decodes, chunks)
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[i].is_prefill_chunk else [9] for i in ids]
        Ticks.now += round(took_s * TICKS_PER_S)
        answers = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={i: index for index, i in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for answer in answers.values():
            for engine_output in answer.outputs:
                if engine_output.finish_reason is not None and engine_output.stop_reason:
                    away[engine_output.request_id] = engine_output.stop_reason
                elif engine_output.finish_reason is not None:
                    finish_ticks[engine_output.request_id] = Ticks.now
        rounds += 1
        if rounds > 50_000:
            raise RuntimeError("the scheduler stands still")
    swaps = (
        [scheduler.connector.swaps_out, scheduler.connector.swaps_in]
        if case["num_cpu_blocks"]
        else [0, 0]
    )
    assert not scheduler.states, scheduler.states
    assert not scheduler.swapped
    return {
        "finish_ticks": finish_ticks,
        "away": away,
        "preempted": preempted,
        "swaps": swaps,
        "mixed_steps": mixed_steps,
    }


if __name__ == "__main__":
    PolicyScheduler.clock = staticmethod(lambda: Ticks.now / TICKS_PER_S)
    os.environ["SLO_BENCH_POLICY"] = "{}"
    results = [run(case) for case in json.load(sys.stdin)]
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "moved": moved(),
                "hooks": len(TARGETS),
                "results": results,
            }
        )
    )
