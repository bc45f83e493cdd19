"""Which prompts of LMBenchmark's `sharegpt` load continue which, as its published files have it.

LMBenchmark (LMCache/LMBenchmark, `sharegpt/run.json`) sends conversations of ShareGPT in turns:
every conversation's third question, then every fourth, and so on while they last. A prompt holds
the conversation so far with ShareGPT's answers, not with the server's. Before each level the second
questions are sent (`warmup.json`, two a second), and ten seconds pass.

`TURNS` follow from the lengths alone: a prompt is as long as the one before and its answer, and a
question more. That holds for all 197 that continue one.
"""

from __future__ import annotations

import numpy as np

from ....workloads.prefixes import BLOCK_SIZE, SessionBlocks
from .measurement import OpenLoop

# Measured requests of each conversation, and tokens of the answer before the first of them.
# fmt: off
TURNS = (
    4, 4, 4, 6, 3, 7, 5, 5, 4, 5, 4, 4, 3, 4, 3, 7, 6, 4, 3, 4, 3, 4, 3, 4, 6, 4, 3, 4, 5, 3, 3,
    9, 6, 5, 3, 3, 3, 4, 6, 5, 6, 10, 6, 6, 6, 3, 9, 3, 4, 4, 4, 3, 5, 5, 3,
)
ANSWERS_TOKENS = (
    319, 281, 244, 214, 282, 187, 343, 465, 425, 118, 235, 125, 226, 241, 59, 91, 128, 273, 47,
    319, 66, 12, 193, 430, 101, 341, 322, 242, 316, 212, 557, 117, 144, 264, 348, 482, 202, 280,
    227, 306, 146, 168, 213, 108, 121, 128, 128, 410, 440, 31, 214, 308, 206, 291, 309,
)
# fmt: on
QUESTION_TOKENS = 15  # median of the later ones
TEMPLATE_TOKENS = 5  # of Llama's chat template, behind a prompt
WARM_UP_RPS = 2.0
WARM_UP_TOKENS_PER_S = 20.0  # of the last answer before a level, assumed
PAUSE_S = 10.0


def conversations(load: OpenLoop) -> OpenLoop:
    """A level of `sharegpt` with the requests sent before it and the blocks that prompts share.

    A level with another number of requests is returned as it is.
    """
    if len(load.arrival_s) != sum(TURNS):
        return load
    turns, answers = np.array(TURNS), np.array(ANSWERS_TOKENS)
    n = len(turns)
    warm_up_s = np.arange(n) / WARM_UP_RPS
    begin_s = warm_up_s[-1] + answers[-1] / WARM_UP_TOKENS_PER_S + PAUSE_S
    second = np.maximum(1, load.prompt_tokens[:n] - answers - QUESTION_TOKENS)
    prompt_tokens = np.concatenate([second, load.prompt_tokens])
    conversation = [np.flatnonzero(turns > turn) for turn in range(max(TURNS))]
    return OpenLoop(
        np.concatenate([warm_up_s, begin_s + load.arrival_s]),
        prompt_tokens,
        np.concatenate([answers, load.output_tokens]),
        np.concatenate([np.zeros(n, dtype=np.bool_), load.answered]),
        SessionBlocks.of(
            np.concatenate([np.arange(n), *conversation]),
            np.maximum(0, prompt_tokens - TEMPLATE_TOKENS),
            0,
            BLOCK_SIZE,
        ),
    )
