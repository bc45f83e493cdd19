"""Output tokens per CPU second: the paged engine against padded `transformers` generate.

Both serve the same requests of mixed lengths (prompts of 8 to 256 tokens and answers of 4 to 256,
log-uniform) on one thread: generate in batches of as many as the concurrency, in order of arrival,
padded on the left and until the longest answer is out; the engine with the policy `vllm` and as
many places. Only tokens that were asked for count. CPU time, so that a busy machine matters less;
rounds alternate, and the best of each side counts.

    python tests/benchmarks/bench_paged.py [--models tiny,100m] [--concurrency 1,8,32] [--rounds 2]
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engines.paged.build import Engine, Room
from slo_bench.harness.engines.paged.clock import RealClock
from slo_bench.harness.engines.paged.decoder import Decoder
from slo_bench.harness.engines.paged.load import load_decoder
from slo_bench.harness.engines.paged.sequence import Sequence as Tokens
from slo_bench.harness.engines.paged.tiny import make_tiny
from slo_bench.harness.systems import system
from slo_bench.workloads.request import Slo

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
    },
}
SHORTEST_ANSWER, SHORTEST_PROMPT, LONGEST = 4, 8, 256


@dataclass(frozen=True)
class Asked:
    """A request: its prompt and how many tokens it wants."""

    prompt: list[int]
    answer: int


def requests(count: int, vocabulary: int, seed: int = 0) -> list[Asked]:
    draw = Random(seed)

    def length(low: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(LONGEST))))

    return [
        Asked(
            [draw.randrange(3, vocabulary) for _ in range(length(SHORTEST_PROMPT))],
            length(SHORTEST_ANSWER),
        )
        for _ in range(count)
    ]


def by_engine(decoder: Decoder, asked: Sequence[Asked], places: int) -> tuple[float, list[Any]]:
    """CPU seconds, and the answers."""
    found = system("vllm").with_knobs(max_num_seqs=places)
    engine = Engine(decoder, Room(64 * places, 16))
    states = [
        RequestState(row, 0.0, len(one.prompt), one.answer, one.answer, Slo())
        for row, one in enumerate(asked)
    ]
    answers: list[Any] = [None] * len(asked)
    begin_s = time.process_time()
    instance = engine.instance(
        found.policy, lambda r: Tokens(list(asked[r.id].prompt)), RealClock()
    )
    instance.ended = lambda r, tokens: answers.__setitem__(r.id, tokens.tokens[r.prompt_tokens :])
    instance.inbox.extend(states)
    instance.run(float("inf"), False)
    return time.process_time() - begin_s, answers


def by_generate(model: Any, asked: Sequence[Asked], places: int) -> tuple[float, list[Any]]:
    """CPU seconds, and the answers."""
    answers = []
    begin_s = time.process_time()
    with torch.inference_mode():
        for first in range(0, len(asked), places):
            batch = asked[first : first + places]
            wide = max(len(one.prompt) for one in batch)
            ids = torch.zeros(len(batch), wide, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, one in enumerate(batch):
                ids[row, wide - len(one.prompt) :] = torch.tensor(one.prompt)
                mask[row, wide - len(one.prompt) :] = 1
            found = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.answer for one in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            rows = found[:, wide:].tolist()
            answers += [row[: one.answer] for row, one in zip(rows, batch, strict=True)]
    return time.process_time() - begin_s, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,100m")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3, help="of padded generate, a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'model':>6} {'at once':>8} {'requests':>9} {'engine tok/s':>13} {'generate tok/s':>15}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            path = make_tiny(Path(folder) / name, **MODELS[name])
            decoder = load_decoder(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for text in options.concurrency.split(","):
                show(name, int(text), decoder, model, options.rounds, options.batches)


def show(name: str, places: int, decoder: Decoder, model: Any, rounds: int, batches: int) -> None:
    asked = requests(batches * max(places, 2), decoder.config.vocab)
    tokens = sum(one.answer for one in asked)
    mine, theirs, same = [], [], 0
    for _ in range(rounds):
        mine_s, answers = by_engine(decoder, asked, places)
        theirs_s, expected = by_generate(model, asked, places)
        mine.append(mine_s)
        theirs.append(theirs_s)
        same = sum(a == b for a, b in zip(answers, expected, strict=True))
    a, b = tokens / min(mine), tokens / min(theirs)
    print(
        f"{name:>6} {places:>8} {len(asked):>9} {a:>13.1f} {b:>15.1f}   {a / b:.2f} times; "
        f"{same} of {len(asked)} answers are equal",
        flush=True,
    )


if __name__ == "__main__":
    main()
