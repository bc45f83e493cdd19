"""Requests that are too long for a model or its memory: refused, cut, or an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....predictors.embedder import Embedder
from ....workloads.blocks import WorkloadBlocks
from ....workloads.errors import SloBenchError
from ....workloads.prefixes import PrefixRows
from ....workloads.request import RequestType
from ....workloads.workload import Workload

OVERLONG_REQUESTS = ("error", "reject", "truncate")

Rows = NDArray[np.int64]


def fit(
    workload: Workload,
    limit_tokens: int,
    overlong_requests: str,
    *,
    reserved: bool,
    embeds_apart: bool = False,
) -> tuple[Workload, Rows]:
    """The workload with every request within the limit, and the rows to refuse.

    `embeds_apart`: embedding requests are none of the language model's (see `fit_embeds`).

    Raises:
        SloBenchError: a request is too long under `error`, or nothing would be left of any.
    """
    answers = workload.max_output_tokens if reserved else workload.output_tokens
    mine = (
        workload.request_type == RequestType.GENERATE
        if embeds_apart
        else np.ones(len(workload), dtype=bool)
    )
    rows = np.flatnonzero(mine & (workload.prompt_tokens + answers > limit_tokens))
    nobody = np.empty(0, dtype=np.int64)
    if not len(rows):
        return workload, nobody
    if overlong_requests == "error":
        raise _too_long(workload, int(rows[0]), len(rows), len(workload), limit_tokens, reserved)
    if overlong_requests == "reject":
        return workload, rows
    if limit_tokens < 2:
        raise SloBenchError(
            f"{max(limit_tokens, 0)} tokens fit the KV cache, so that nothing can be truncated to "
            "fit; use more GPUs or another model"
        )
    answer_limits = np.minimum(workload.max_output_tokens, limit_tokens - 1)
    output = np.minimum(workload.output_tokens, answer_limits)
    kept = answer_limits if reserved else output
    prompt = np.where(
        mine, np.minimum(workload.prompt_tokens, limit_tokens - kept), workload.prompt_tokens
    )
    prefixes = workload.prefix_blocks
    if prefixes is not None:
        # A prompt that is cut from the front shares no prefix any more.
        cut = frozenset(np.flatnonzero(prompt < workload.prompt_tokens).tolist())
        prefixes = _Without(prefixes, cut)
    return (
        dataclasses.replace(
            workload,
            prompt_tokens=prompt,
            output_tokens=output,
            max_output_tokens=answer_limits,
            prefix_blocks=prefixes,
        ),
        nobody,
    )


def _too_long(
    workload: Workload,
    row: int,
    overlong: int,
    requests: int,
    limit_tokens: int,
    reserved: bool,
    first_row: int = 0,
) -> SloBenchError:
    """The error where `overlong` requests are too long, `row` of `workload` as the first."""
    answers = workload.max_output_tokens if reserved else workload.output_tokens
    return SloBenchError(
        f"{overlong} of {requests} requests are too long: request {first_row + row} has "
        f"{workload.prompt_tokens[row]} prompt and {answers[row]} "
        f"{'maximum ' if reserved else ''}output tokens, {limit_tokens} fit the context and "
        "the KV cache; use --overlong-requests reject or truncate, more GPUs or another model"
    )


def fit_blocks(
    blocks: WorkloadBlocks, limit_tokens: int, overlong_requests: str, *, reserved: bool
) -> Iterator[tuple[Workload, Workload, Rows]]:
    """Each block as it was drawn, and what `fit` makes of it.

    Raises:
        SloBenchError: as `fit`, before the first block.
    """
    if overlong_requests == "error":
        _check_fit(blocks, limit_tokens, reserved)
    for drawn in blocks.draw():
        yield (drawn, *fit(drawn, limit_tokens, overlong_requests, reserved=reserved))


def _check_fit(blocks: WorkloadBlocks, limit_tokens: int, reserved: bool) -> None:
    first: tuple[Workload, int, int] | None = None
    overlong = passed = 0
    for block in blocks.draw():
        answers = block.max_output_tokens if reserved else block.output_tokens
        rows = np.flatnonzero(block.prompt_tokens + answers > limit_tokens)
        if len(rows) and first is None:
            first = block, int(rows[0]), passed
        overlong += len(rows)
        passed += len(block)
    if first is not None:
        block, row, first_row = first
        raise _too_long(block, row, overlong, len(blocks), limit_tokens, reserved, first_row)


@dataclass(frozen=True)
class _Without(PrefixRows):
    """Prefix blocks row by row, none for the rows in `cut`."""

    blocks: Sequence[tuple[int, ...]]
    cut: frozenset[int]

    def __len__(self) -> int:
        return len(self.blocks)

    def row(self, row: int) -> tuple[int, ...]:
        return () if row in self.cut else self.blocks[row]


def fit_embeds(
    workload: Workload, embedder: Embedder, blocks: int, overlong_requests: str
) -> tuple[Workload, Rows]:
    """The workload with every text within the embedder's context, and the rows to reject, whose
    pass alone would need more than all `blocks`.

    Raises:
        SloBenchError: under `error`, a text is too long or a pass too large; under `truncate`, a
            pass is too large whose texts are not too long.
    """
    embeds = workload.request_type == RequestType.EMBED
    context = embedder.model.context_tokens
    length = workload.prompt_tokens // workload.num_inputs
    too_long = embeds & (length > context)
    if too_long.any() and overlong_requests == "error":
        row = int(np.flatnonzero(too_long)[0])
        raise SloBenchError(
            f"{int(too_long.sum())} embedding requests have texts that are too long: those of "
            f"request {row} have {length[row]} tokens, {embedder.model.name} reads {context}; use "
            "--overlong-requests reject or truncate, or another embedder"
        )
    if too_long.any() and overlong_requests == "truncate":
        length = np.minimum(length, context)
        tokens = np.where(embeds, workload.num_inputs * length, workload.prompt_tokens)
        workload = dataclasses.replace(workload, prompt_tokens=tokens)
    shapes, shape_of = np.unique(
        np.stack((workload.num_inputs, length)), axis=1, return_inverse=True
    )
    needed = np.array([embedder.blocks([(int(n), int(tokens))]) for n, tokens in shapes.T])
    too_large = embeds & (needed[shape_of.ravel()] > blocks)
    if too_large.any() and overlong_requests != "reject":
        row = int(np.flatnonzero(too_large)[0])
        raise SloBenchError(
            f"{int(too_large.sum())} embedding requests are too large: request {row} embeds "
            f"{workload.num_inputs[row]} texts of {length[row]} tokens, whose pass takes "
            f"{needed[shape_of.ravel()][row]} of {blocks} blocks; use --overlong-requests reject, "
            "fewer texts a request or more memory"
        )
    refused = too_large | (too_long if overlong_requests == "reject" else False)
    return workload, np.flatnonzero(refused)
