"""Run by a server's own Python: CPU seconds and answers of its engine, offline, without HTTP.

offline_tokens.py vllm|sglang MODEL PLACES < {"prompts": [[token, …], …], "answers": [n, …]}
    > {"cpu_s": seconds, "answers": [[token, …], …]}, as the last line

CPU seconds of all its processes, from the first request to the last answer; after one small batch
that does not count.
"""

import json
import os
import sys
from pathlib import Path

ROOM_TOKENS = 1024


def vllm(model, places):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=os.environ.get("DTYPE", "float32"),
        max_num_seqs=places,
        max_model_len=ROOM_TOKENS,
        skip_tokenizer_init=True,
        enforce_eager=bool(os.environ.get("EAGER")),
        enable_prefix_caching=False,
        seed=0,
    )

    def answered(prompts, answers):
        how = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in answers
        ]
        generated = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in generated]

    return answered


def sglang(model, places):
    import sglang

    engine = sglang.Engine(
        model_path=model,
        dtype=os.environ.get("DTYPE", "float32"),
        device="cpu",
        attention_backend="torch_native",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_radix_cache=True,
        max_running_requests=places,
        max_total_tokens=ROOM_TOKENS * max(places, 4),
        mem_fraction_static=0.2,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        log_level="error",
    )

    def answered(prompts, answers):
        how = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in answers]
        return [
            output["output_ids"]
            for output in engine.generate(input_ids=prompts, sampling_params=how)
        ]

    return answered


def family():
    """This process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    members = {os.getpid()}
    while more := {p for p, (parent, _) in parents.items() if parent in members} - members:
        members |= more
    return sum(parents[p][1] for p in members if p in parents) / os.sysconf("SC_CLK_TCK")


def main():
    name, model, places = sys.argv[1], sys.argv[2], int(sys.argv[3])
    workload = json.load(sys.stdin)
    answered = {"vllm": vllm, "sglang": sglang}[name](model, places)
    answered([[5, 6, 7, 8]] * min(places, 2), [4] * min(places, 2))
    begin_s = family()
    answers = answered(workload["prompts"], workload["answers"])
    print(json.dumps({"cpu_s": family() - begin_s, "answers": answers}), flush=True)
    os._exit(0)  # what it started ends with it


if __name__ == "__main__":
    main()
