"""Step times of data-parallel attention: ranks with requests of their own, experts shared by all.

All ranks take a step together, because each layer's experts need the tokens of all. A step takes as
long as the rank with most tokens to prefill; sequences that decode are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .step_time_table import Curve, DecodeGrid, Host, MixedGrid, TableStepTime, as_one_chunk


class DataParallelStepTime(TableStepTime):
    """Step times of `ranks` ranks, whose sequences, KV tokens and chunks are counted together.

    Args:
        ranks: number of ranks.
        linear: seconds of all but the experts by the tokens of one rank.
        experts: seconds of experts, and of what moves tokens to them, by the tokens of all ranks.
        per_sequence, decode, mixed, host: of one rank, as in `TableStepTime`.
    """

    def __init__(
        self,
        ranks: int,
        linear: Curve,
        experts: Curve,
        per_sequence: Curve,
        decode: DecodeGrid,
        mixed: MixedGrid,
        host: Host,
    ) -> None:
        super().__init__(
            linear,
            per_sequence,
            replace(decode, sequences=decode.sequences * ranks),
            replace(mixed, sequences=mixed.sequences * ranks),
            host,
        )
        self._ranks = ranks
        self._experts = experts
        self._experts_s: dict[int, float] = {}

    def step_s(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        tail_s: float = 0.0,
    ) -> float:
        if not chunks:
            return super().step_s(decode_seqs, decode_kv_tokens, chunks, tail_s)
        ranks = self._ranks
        busiest = self._busiest(chunks)
        tokens, length, before = as_one_chunk(busiest)
        decoding = -(-decode_seqs // ranks)
        sequences = decoding + len(busiest)
        seconds = (
            self._of_rank(tokens + decoding)
            + self._of_experts(decode_seqs + sum(chunk for _, chunk in chunks))
            + (self._sequence_s.get(sequences) or super()._sequences(sequences))
            + self._attention(decode_seqs, decode_kv_tokens, length, before)
        )
        return max(seconds, self.host.prefill_s)

    def _busiest(self, chunks: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The chunks of the rank with most tokens, where each goes to the rank with the fewest."""
        if len(chunks) == 1:
            return chunks
        held: list[list[tuple[int, int]]] = [[] for _ in range(self._ranks)]
        tokens = [0] * self._ranks
        for chunk in sorted(chunks, key=lambda pair: -pair[1]):
            rank = tokens.index(min(tokens))
            held[rank].append(chunk)
            tokens[rank] += chunk[1]
        return held[tokens.index(max(tokens))]

    def _of_rank(self, tokens: int) -> float:
        return self._fixed_s.get(tokens) or super()._fixed(tokens)

    def _of_experts(self, tokens: int) -> float:
        if tokens not in self._experts_s:
            self._experts_s[tokens] = self._experts(tokens)
        return self._experts_s[tokens]

    def _fixed(self, tokens: int) -> float:
        return self._of_rank(-(-tokens // self._ranks)) + self._of_experts(tokens)

    def _sequences(self, sequences: int) -> float:
        return super()._sequences(-(-sequences // self._ranks))
