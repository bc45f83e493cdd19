"""Speculative decoding: step times in which sequences advance by several tokens.

A draft proposes k tokens, one pass of the model verifies them (Leviathan et al. 2023, Fast
Inference from Transformers via Speculative Decoding). With the share a_i of proposals at position i
that is accepted where all before it were, a sequence advances by 1 + a_1 + a_1 a_2 + ... tokens in
the mean. The simulator's steps give one token each, so a step takes 1 / mean of drafting and
verification: means of TPOT and throughput are those of speculation, gaps between tokens are evened
out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ..workloads.errors import SloBenchError
from .model_spec import ModelSpec
from .profiles.step_time_table import Line, TableStepTime

OFF = "none"
_HEADS = ("eagle", "eagle3")  # a checkpoint beside the model's: on real servers `eagle=FOLDER`
_OF_THE_MODEL = ("ngram", *_HEADS, "mtp")
_FORM = re.compile(r"([^:@<=]+)(?:=([^:@<=]+))?:(\d+)(?:@([^@<*]+)(?:\*([\d.]+))?)?(?:<(\d+))?")
_SHARES = re.compile(r"[\d.]+(/[\d.]+)*")


@dataclass(frozen=True)
class Speculation:
    """`tokens` proposals a step by `method`: `ngram`, `eagle`, `eagle3`, `mtp` or a draft model.

    `acceptance` is by position, the last for all that follow; none: it is measured, or stands in
    `source`, a run folder or log. `drafted` is the share of a sequence's steps with proposals
    (n-grams do not always find any). Off with more than `most_seqs` sequences. `head` is the
    checkpoint of an EAGLE head, which real servers need.
    """

    method: str
    tokens: int
    acceptance: tuple[float, ...] = ()
    most_seqs: float = inf
    drafted: float = 1.0
    head: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        text = self.method + (f"={self.head}" if self.head else "") + f":{self.tokens}"
        if self.acceptance or self.source:
            text += "@" + (self.source or "/".join(f"{share:g}" for share in self.acceptance))
        text += f"*{self.drafted:g}" if self.drafted != 1.0 else ""
        return text + (f"<{self.most_seqs:.0f}" if self.most_seqs != inf else "")

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens by which a sequence advances in a step.

        Raises:
            SloBenchError: the acceptance is not known.
        """
        if not self.acceptance:
            raise SloBenchError(
                f"a simulation needs the acceptance of speculation, as {self}@0.6/0.4, or "
                f"{self}@FOLDER with the run folder of a real server"
            )
        total, so_far = 1.0, self.drafted
        for position in range(self.tokens):
            so_far *= self.acceptance[min(position, len(self.acceptance) - 1)]
            total += so_far
        return total

    def drafter(self, served: ModelSpec) -> ModelSpec | str | None:
        """The shape that computes proposals, or its name; None: they cost nothing (n-gram).

        EAGLE is one dense layer with the output head, multi-token prediction one of the model's own
        layers with it.
        """
        if served.linear is not None:
            raise SloBenchError(
                "speculation with linear attention is not modelled: leaving tokens out does not "
                "undo its states; leave speculation out"
            )
        if self.method == "ngram":
            return None
        if self.method in _HEADS:
            return replace(served, layers=1, experts=None, window=None)
        if self.method == "mtp":
            experts = served.experts and replace(served.experts, dense_layers=0)
            return replace(served, layers=1, experts=experts, window=None)
        return self.method


def parse_speculation(text: str) -> Speculation | None:
    """The speculation called `text`, as `eagle:3@0.8/0.6<64`; None: `none`.

    Raises:
        SloBenchError: it has another form, or a share is not between 0 and 1.
    """
    if text == OFF:
        return None
    form = _FORM.fullmatch(text)
    try:
        if form is None:
            raise ValueError
        method, head, tokens, acceptance_text, drafted, max_seqs = form.groups()
        is_shares = acceptance_text is not None and _SHARES.fullmatch(acceptance_text) is not None
        acceptance = (
            tuple(float(share) for share in acceptance_text.split("/")) if is_shares else ()
        )
        share = 1.0 if drafted is None else float(drafted)
        if not 1 <= int(tokens) <= 32 or not all(
            0 <= fraction <= 1 for fraction in (*acceptance, share)
        ):
            raise ValueError
        if (head and method not in _HEADS) or (drafted and not is_shares):
            raise ValueError
    except ValueError:
        raise SloBenchError(
            f"speculation must be METHOD:TOKENS@ACCEPTANCE, with shares of 0 to 1 and 1 to 32 "
            f"tokens, as eagle:3@0.7, ngram:4@0.6/0.4*0.5<64, ngram:4@FOLDER of a run or "
            f"qwen3-0.6b:4@0.7, but is {text!r}; methods: {', '.join(_OF_THE_MODEL)} or a draft "
            "model"
        ) from None
    return Speculation(
        method,
        int(tokens),
        acceptance,
        inf if max_seqs is None else int(max_seqs),
        share,
        head,
        None if is_shares else acceptance_text,
    )


class SpeculativeStepTime(TableStepTime):
    """Step times of `served` with speculation; `draft` are those of what proposes (None: n-gram).

    Verification computes tokens + 1 positions of each sequence that has proposals, and one of each
    other; KV is read once.
    """

    def __init__(
        self, served: TableStepTime, speculation: Speculation, draft: TableStepTime | None
    ) -> None:
        tables = served.tables
        super().__init__(
            tables.linear, tables.per_sequence, tables.decode, tables.mixed, tables.host
        )
        self._plain = served
        self._draft = draft
        self._speculation = speculation
        self._gain = speculation.tokens_per_step

    def step_s(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        tail_s: float = 0.0,
    ) -> float:
        if not chunks or not 0 < decode_seqs <= self._speculation.most_seqs:
            return super().step_s(decode_seqs, decode_kv_tokens, chunks, tail_s)
        # A sequence gets all its tokens in this step; those after the first are taken as steps of
        # their own that only decode, so that their time is taken off here.
        alone_s = super().step_s(decode_seqs, decode_kv_tokens, ())
        plain_s = self._plain.step_s(decode_seqs, decode_kv_tokens, ())
        mixed_s = super().step_s(decode_seqs, decode_kv_tokens, chunks, tail_s)
        return max(alone_s, mixed_s - plain_s + alone_s)

    def _line(self, sequences: int) -> Line:
        if sequences > self._speculation.most_seqs:
            return super()._line(sequences)
        tokens = self._speculation.tokens
        wide = round(sequences * (self._speculation.drafted * tokens + 1))
        line = self._plain._line(sequences)
        extra_s = self._fixed(wide) + self._sequences(wide)
        extra_s -= self._fixed(sequences) + self._sequences(sequences)
        if self._draft is not None:
            line = _sum(line, self._draft._line(sequences), tokens)
        scaled = Line(
            line.ends,
            [(base_s + extra_s) / self._gain for base_s in line.base_s],
            [slope_s / self._gain for slope_s in line.slope_s],
            False,
        )
        self._lines[sequences] = scaled
        return scaled


def _sum(line: Line, other: Line, times: int) -> Line:
    """`line` and `times` times `other`, piece by piece."""
    ends = sorted({*line.ends, *other.ends})
    base_s, slope_s = [], []
    for begin in (0.0, *ends[:-1]):
        i, j = bisect_right(line.ends, begin), bisect_right(other.ends, begin)
        base_s.append(line.base_s[i] + times * other.base_s[j])
        slope_s.append(line.slope_s[i] + times * other.slope_s[j])
    return Line(ends, base_s, slope_s, False)
