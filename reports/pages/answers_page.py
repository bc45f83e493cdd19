"""Sentences on the answers of real servers: failed, not streamed, longer or shorter, cached."""

from __future__ import annotations

import pandas as pd

from ...harness.results.run_columns import FAULT_COLUMN, WARM_CACHE_COLUMN
from ..figures.figure import percent_text, rate_text

_LEAST_RATIO = 1.03  # of the server's prompt tokens to ours, or the inverse
_COUNTS = {
    "unstreamed_answers": "answers came in one piece: their TPOT is not known, and meets no bound",
    "uncounted_answers": "answers have more tokens by their usage than they show (hidden "
    "reasoning?): their TPOT is not known, and meets no bound",
    "silent_openings": "answers opened long before their first text, and their usage counts more "
    "tokens than events: if the server hides reasoning, their TPOT is too short",
    "refuted_usages": "answers have a usage that is no number, counts fewer tokens than they show "
    "or their prompt with them: what came is counted",
    "split_token_answers": "answers have fewer tokens by their usage than events with text: a "
    "token is taken to begin where its text does",
    "unreported_outputs": "answers have no usage, and fewer events with text than tokens were "
    "requested: if an event holds several tokens, their TPOT is too long",
    "surplus_outputs": "answers have more tokens than requested",
    "truncated_outputs": "answers have fewer tokens than requested: those levels had less work "
    "than offered",
}


def sentences(cells: pd.DataFrame) -> list[str]:
    """What is to be known of the answers beside those that failed, without full stops."""
    texts = (counted_text(cells, column, noun) for column, noun in _COUNTS.items())
    return [text for text in (*texts, prompt_text(cells), *cache_texts(cells)) if text]


def prompt_text(cells: pd.DataFrame) -> str:
    """How much longer prompts are by the server's count; empty within a few percent."""
    if "prompt_tokens_ratio" not in cells:
        return ""
    ratio = float(cells["prompt_tokens_ratio"].median())
    if not (ratio > _LEAST_RATIO or ratio < 1 / _LEAST_RATIO):
        return ""
    return (
        f"Prompts have {ratio:.3g} times as many tokens for the server as the workload says "
        "(median; another tokenizer, a chat template): give --tokenizer, or compare by "
        "server_prompt_tokens"
    )


_LEAST_WARM_SHARE = 0.01  # of the prompt tokens


def cache_texts(cells: pd.DataFrame) -> list[str]:
    """Which levels a prefix cache made faster than the workload says, and which it may have."""
    texts = []
    if WARM_CACHE_COLUMN in cells:
        shares = cells[WARM_CACHE_COLUMN]
        warm = cells[cells["valid"] & (shares >= _LEAST_WARM_SHARE)]
        if len(warm):
            points = ", ".join(
                f"{row['series']} at {rate_text(float(row['level_rps']))} req/s "
                f"({percent_text(float(row[WARM_CACHE_COLUMN]))})"
                for _, row in warm.drop_duplicates(["series", "level_rps"]).iterrows()
            )
            texts.append(
                f"Warm cache: the server had prompts of another run in its prefix cache, which "
                f"this workload does not share; TTFT is too short: {points} of the prompt tokens"
            )
    if own_prompts := counted_text(cells, "given_prompts", "requests have a prompt of their own"):
        texts.append(
            f"{own_prompts}, the same in every run: a server's prefix cache may hold it from before"
        )
    if repeated := counted_text(cells, "repeated_prompts", "requests repeat a prompt of their run"):
        texts.append(f"{repeated}: a prefix cache serves them faster than other prompts")
    return texts


def failed_text(cells: pd.DataFrame) -> str:
    """`12 of 300 requests failed (status: 400: too long)`; empty where none did."""
    columns = [
        name for name in map(str, cells) if name.startswith("fault_") and name != FAULT_COLUMN
    ]
    counts = cells[columns].apply(pd.to_numeric).sum(axis=1)
    if not (failed := int(counts.sum())):
        return ""
    text = f"{failed:,} of {int(cells['requests'].sum()):,} requests failed"
    cells_with_fault = (
        cells[cells[FAULT_COLUMN].fillna("") != ""] if FAULT_COLUMN in cells else cells[:0]
    )
    if cells_with_fault.empty:
        return text
    fault = cells_with_fault[FAULT_COLUMN][counts[cells_with_fault.index].idxmax()]
    return f"{text} ({fault})" if (counts > 0).sum() == 1 else f"{text} (most in one run: {fault})"


def surplus_text(surplus_outputs: int, requests: int) -> str:
    """`12 of 300 answers have more tokens than requested`; empty where none does."""
    if not surplus_outputs:
        return ""
    return f"{surplus_outputs:,} of {requests:,} {_COUNTS['surplus_outputs']}"


def counted_text(cells: pd.DataFrame, column: str, noun: str) -> str:
    """`12 of 3,000` and the noun, by the sum of a column; empty where that is 0 or missing."""
    count = int(cells[column].fillna(0).sum()) if column in cells else 0
    return f"{count:,} of {int(cells['requests'].sum()):,} {noun}" if count else ""
