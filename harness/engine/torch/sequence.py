"""What a real engine keeps of a request: its tokens, its blocks, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. A temperature of 0 takes the likeliest.

    A draw follows from `seed` and the token's place alone: a request that is computed again after
    a preemption draws the same.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0


GREEDY = Sampling()


@dataclass
class TokenLogprobs:
    """Log-probabilities of an answer's tokens before temperature, `top_k` and `top_p`: of each
    token, and of the `top` likeliest in its place, as pairs of a token and its log-probability.
    """

    top: int
    entries: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


@dataclass(frozen=True)
class OffloadedBlocks:
    """The first blocks of a sequence, which are at a worker: their ids there."""

    rank: int
    blocks: list[int]


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and all that was given back; while it decodes, the last of them has
    no KV yet. `blocks` are ids of KV blocks in the order of the tokens. The answer ends with the
    first of the tokens in `ends`, if one comes before its length is reached. With `offloaded`,
    `blocks` are those after the lent ones.
    """

    tokens: list[int]
    sampling: Sampling = GREEDY
    ends: frozenset[int] = frozenset()
    blocks: list[int] = field(default_factory=list)
    num_cpu_blocks: list[int] = field(default_factory=list)  # where its KV lies while swapped out
    offloaded: OffloadedBlocks | None = None
    logprobs: TokenLogprobs | None = None  # filled where they are wanted

    @property
    def offloaded_blocks(self) -> int:
        """Number of its blocks at another worker."""
        return len(self.offloaded.blocks) if self.offloaded else 0
