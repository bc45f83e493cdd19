"""How much of the prompts a server had in its prefix cache that the workload does not share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ...workloads.arrays import Ints, Mask
from ...workloads.request import RequestType
from ...workloads.workload import Workload
from .http.conversations import PROMPT_FIELDS
from .http.http_options import HttpOptions, PromptFormat
from .http.request_columns import RequestColumns
from .server_metrics import MetricsByServer, names_in

_ALIKE_WORDS = 4  # with which made-up texts begin alike by chance: they have few different words


@dataclass(frozen=True)
class CacheCounters:
    """Tokens since the start of the servers by their metrics; None: unknown."""

    cached_tokens: float | None = None
    looked_up_tokens: float | None = None

    @classmethod
    def read(cls, pages: Iterable[str], by_server: MetricsByServer) -> CacheCounters:
        """Read one page of metrics for each server."""
        read_pages = [
            (names, names.totals(page)) for page in pages if (names := names_in(page, by_server))
        ]

        def total(counter: str) -> float | None:
            counts = [names.first(counter, sums) for names, sums in read_pages]
            reported = [count for count in counts if count is not None]
            return sum(reported) if reported else None

        return cls(total("cached_tokens"), total("looked_up_tokens"))

    def since(self, before: CacheCounters) -> CacheCounters:
        """The growth of the counters; None where it is not known or a counter has begun anew."""

        def growth(now: float | None, then: float | None) -> float | None:
            return None if now is None or then is None or now < then else now - then

        return CacheCounters(
            growth(self.cached_tokens, before.cached_tokens),
            growth(self.looked_up_tokens, before.looked_up_tokens),
        )


def given_prompts(workload: Workload, options: HttpOptions) -> Mask:
    """Which requests have a prompt of their own (text, messages), the same in every run."""
    fields = (*PROMPT_FIELDS, "input")
    has_prompt = np.full(len(workload), any(name in options.body for name in fields))
    if workload.texts is not None:
        has_prompt |= np.array([text is not None for text in workload.texts])
    if workload.bodies is not None:
        has_prompt |= np.array([body is not None and any(f in body for f in fields)
                           for body in workload.bodies])  # fmt: skip
    return has_prompt


def repeated_prompts(workload: Workload, options: HttpOptions) -> int:
    """Number of requests whose given prompt another one of the workload has had before."""
    new = given_prompts(workload, options) & (workload.follows < 0)  # others continue an answer
    rows = np.flatnonzero(new).tolist()
    texts = workload.texts or [None] * len(workload)
    bodies = workload.bodies or [None] * len(workload)
    return len(rows) - len({hash((texts[row], repr(bodies[row]))) for row in rows})


def shared_tokens(workload: Workload, options: HttpOptions) -> Ints:
    """Tokens of each prompt that another request of the workload may have left in the cache.

    All of a prompt that is given, that continues another's answer, or that is embedded: of these
    nothing can be said.
    """
    shared = np.zeros(len(workload), dtype=np.int64)
    if workload.prefix_blocks is not None:
        rows = list(workload.prefix_blocks)
        uses = Counter(block for row in rows for block in set(row))
        for row, blocks in enumerate(rows):
            common = sum(1 for _ in takewhile(lambda block: uses[block] > 1, blocks))
            shared[row] = common * workload.prefix_block_size
    whole = given_prompts(workload, options) | (workload.follows >= 0)
    whole |= workload.request_type == RequestType.EMBED
    return np.where(whole, workload.prompt_tokens, np.minimum(shared, workload.prompt_tokens))


def warm_cache_share(
    workload: Workload, options: HttpOptions, columns: RequestColumns, counters: CacheCounters
) -> float | None:
    """Share of the prompt tokens that were cached though the workload shares them not.

    From the usage of the answers, else from `counters`, the growth over the level, if the workload
    shares nothing. Tokens that the server counts beyond the workload's are those of its chat
    template, which all prompts share. None where the server says nothing, or shares prompts itself
    (several answers to each).
    """
    if options.body.get("n", 1) != 1:
        return None
    shared = shared_tokens(workload, options)
    theirs = columns.prompt_tokens
    prompts = np.where(theirs > 0, theirs, workload.prompt_tokens)
    alike = np.maximum(0, prompts - workload.prompt_tokens)
    if options.prompt_format is PromptFormat.TEXT:
        alike += _ALIKE_WORDS
    reported = (columns.cached_tokens >= 0) & (theirs > 0)
    if reported.any():
        excess = np.maximum(0, columns.cached_tokens - shared - alike)[reported].sum()
        return float(excess / prompts[theirs > 0].sum())  # some servers leave out a count of 0
    sent = np.isfinite(columns.sent_s)
    if not sent.any() or shared.any() or counters.cached_tokens is None:
        return None
    tokens = float(prompts[sent].sum())
    share = counters.cached_tokens / max(tokens, counters.looked_up_tokens or 0.0)
    return min(1.0, max(0.0, share - float(alike[sent].sum()) / tokens))
