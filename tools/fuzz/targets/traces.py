"""Traces and prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from slo_bench.workloads.labelled_prompts import read_labelled_prompts
from slo_bench.workloads.readers.formats import FORMATS, read

from .target import Target, from_file

_JSON_LINE = {
    "mooncake": {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    "bailian": {
        **{"timestamp": 1.5, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]},
        **{"chat_id": 1, "turn": 1, "type": "text"},
    },
    "jsonl": {"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 3, "hash_ids": [7, 8]},
    "custom": {"prompt": "Why?", "output_tokens": 3, "prompt_tokens": 2},
    "batch": {"custom_id": "1", "body": {"messages": [{"content": "Why?"}], "max_tokens": 3}},
    "longbench": {"context": "Long.", "input": "Why?", "answers": ["So."]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"value": "Ho"}]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"content": [{"text": "Ho"}]}]},
    "lmsys": {"conversation": [{"role": "user", "content": "Hi"}, {"content": "Ho"}]},
    "lengths-jsonl": {"prompt_tokens": 3, "output_tokens": 4},
    "llmservingsim": {
        **{"session_id": "s", "arrival_time_ns": 5},
        "sub_requests": [{"input_toks": 5, "output_toks": 2, "tool_duration_ns": 9}] * 2,
    },
}
_SPAN = {
    **{"traceId": "t", "spanId": "s", "startTimeUnixNano": "1", "endTimeUnixNano": "2"},
    "attributes": [
        {"key": f"gen_ai.usage.{name}_tokens", "value": {"intValue": "30"}}
        for name in ("input", "output")
    ],
}
TRACES = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"
    b"2023-11-16 18:17:04.0319600,396,109\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
    "splitwise": b"request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,"
    b"token_size\n0,2,0,1,1,4096,32\n1,2,0,3.5,1,2048,8\n",
    "csv": b"arrival_s,prompt_tokens,output_tokens,class,session,follows,think_s,ttft_slo_s,"
    b"prefix_blocks,prefix_block_size,priority,request_type,num_inputs,model\n"
    b"0,64,4,a,1,-1,0,1.5,0-3,16,0,generate,1,m\n1.5,20,5,b,1,0,2,,0 9,16,1,embed,2,n\n",
    **{name: 2 * (json.dumps(row).encode() + b"\n") for name, row in _JSON_LINE.items()},
    "sharegpt": json.dumps(
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}] * 2
    ).encode(),
    "alpaca": json.dumps([{"instruction": "Say", "input": "it", "output": "it"}] * 2).encode(),
    "weka": json.dumps(
        {"block_size": 16, "requests": [{"t": 0, "in": 40, "out": 5, "hash_ids": [1, 2, 3]}]}
    ).encode(),
    "otel": json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [_SPAN]}]}]}).encode(),
    "vllm-log": "".join(
        f"(APIServer pid=7) {level} 11-23 10:00:0{n} [request_logger.py:74] {message}\n"
        for n in range(2)
        for level, message in (
            ("DEBUG", f"Request cmpl-{n} details: prompt: 'x', prompt_token_ids: [1, 2, {n}], "),
            ("INFO", f"Received request cmpl-{n}: params: SamplingParams(n=1, max_tokens=9), "),
            ("DEBUG", f"Generated response cmpl-{n} details: output_token_ids: [4, 5]"),
        )
    ).encode(),
}


def targets(folder: Path) -> list[Target]:
    """Traces by format, and files of prompts."""
    format_targets = [
        Target(
            f"trace {name}",
            [content],
            from_file(folder / "traces", f"{name}.txt", lambda path, name=name: read(path, name)),
        )
        for name, content in TRACES.items()
    ]
    assert set(TRACES) == set(FORMATS)
    packed = [gzip.compress(content, mtime=0) for content in TRACES.values()]
    seeds = [*TRACES.values(), *packed]
    format_targets.append(
        Target("trace of any format", seeds, from_file(folder / "traces", "any", read))
    )
    prompts = [TRACES["sharegpt"], TRACES["alpaca"], TRACES["custom"]]
    prompts.append(b'{"prompt": "a", "answer": "b", "model": "m"}\n')
    format_targets.append(
        Target(
            "prompts", prompts, from_file(folder / "traces", "prompts.json", read_labelled_prompts)
        )
    )
    return format_targets
