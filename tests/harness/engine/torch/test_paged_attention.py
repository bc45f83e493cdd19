"""Attention in parts: along the sequence by log-sum-exp, by KV heads side by side."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from slo_bench.harness.engine.torch.attention import Partial, chunk, decode, merged  # noqa: E402
from slo_bench.harness.engine.torch.batch import Layout, Piece  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402

pytestmark = pytest.mark.torch


HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 6, 3, 8, 4, 60


def made(seed: int, window: int | None, scattered: bool):
    draw = random.Random(seed)
    free = list(range(BLOCKS))
    if scattered:
        draw.shuffle(free)
    sequences = []
    for _ in range(draw.randint(1, 5)):
        tokens = draw.randint(1, 40)
        held = [free.pop(0) for _ in range(-(-tokens // SIZE))]
        sequences.append(Sequence([1] * tokens, blocks=held))
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, BLOCKS, KV_HEADS, SIZE, DIM, generator=generator)
    queries = torch.randn(len(sequences), HEADS, DIM, generator=generator)
    layout = Layout(KV_HEADS, SIZE, window, torch.float32, torch.device("cpu"))
    return sequences, kv, queries, layout


def plain(queries, kv, sequences, window):
    """One head of one sequence after the other, in float64."""
    outputs = torch.zeros(queries.shape, dtype=torch.float64)
    for row, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        first = max(0, length - window) if window else 0
        for head in range(HEADS):
            keys, values = (
                kv[n, sequence.blocks, head * KV_HEADS // HEADS].reshape(-1, DIM)[first:length]
                for n in (0, 1)
            )
            scores = keys.double() @ queries[row, head].double() * DIM**-0.5
            outputs[row, head] = torch.softmax(scores, 0) @ values.double()
    return outputs


@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from([None, 5, 16]),
    scattered=st.booleans(),
)
def test_decode_equals_full_attention(seed: int, window: int | None, scattered: bool) -> None:
    sequences, kv, queries, layout = made(seed, window, scattered)
    batch = layout.batch(sequences, [])
    assert batch.decodes is not None
    outputs = decode(queries, kv, batch.decodes, DIM**-0.5).finished()
    expected = plain(queries, kv, sequences, window)
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 9))
def test_attention_of_two_parts_merges_to_that_of_the_whole(seed: int, cut: int) -> None:
    """The first `cut` blocks of each here, the others there, as on two devices."""
    sequences, kv, queries, layout = made(seed, None, True)
    whole = plain(queries, kv, sequences, None)
    parts = []
    for here in (True, False):
        held = []
        for sequence in sequences:
            blocks = sequence.blocks[:cut] if here else sequence.blocks[cut:]
            tokens = min(len(sequence.tokens), cut * SIZE)
            tokens = tokens if here else len(sequence.tokens) - tokens
            held.append(Sequence([1] * tokens, blocks=blocks))
        present = [row for row, portion in enumerate(held) if portion.blocks]
        values = torch.zeros(len(held), HEADS, DIM)
        weight = torch.zeros(len(held), HEADS)
        peak = torch.full((len(held), HEADS), -torch.inf)
        if present:
            to = layout.batch([held[row] for row in present], []).decodes
            assert to is not None
            outputs = decode(queries[present], kv, to, DIM**-0.5)
            values[present], weight[present], peak[present] = (
                outputs.values,
                outputs.weight,
                outputs.peak,
            )
        parts.append(Partial(values, weight, peak))
    outputs = merged(parts).finished().double()
    torch.testing.assert_close(outputs, whole, rtol=1e-5, atol=1e-5)


def test_kv_heads_on_a_helper_give_bitwise_equal_attention() -> None:
    """Heads need no common softmax: what a helper computes is put beside the rest."""
    sequences, kv, queries, layout = made(5, None, False)
    to = layout.batch(sequences, []).decodes
    assert to is not None
    whole = decode(queries, kv, to, DIM**-0.5).finished()
    group, outs = HEADS // KV_HEADS, []
    for heads in (range(2), range(2, KV_HEADS)):
        part = Layout(len(heads), SIZE, None, torch.float32, torch.device("cpu"))
        decodes = part.batch(sequences, []).decodes
        assert decodes is not None
        rows = slice(heads[0] * group, (heads[-1] + 1) * group)
        kept = kv[:, :, heads[0] : heads[-1] + 1].contiguous()
        outs.append(decode(queries[:, rows], kept, decodes, DIM**-0.5).finished())
    assert torch.equal(torch.cat(outs, 1), whole)


@pytest.mark.parametrize("before", [0, 5, 300])
@pytest.mark.parametrize("tokens", [9, 256, 600])
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_chunks_equal_causal_attention(
    before: int, tokens: int, window: int | None
) -> None:
    """Each token sees itself and those before it, whatever part of a chunk is computed at once."""
    generator = torch.Generator().manual_seed(before + tokens)
    whole, blocks = before + tokens, -(-(before + tokens) // SIZE)
    ids = torch.randperm(blocks, generator=generator).tolist()
    sequence = Sequence([1] * whole, blocks=ids)
    kv = torch.randn(2, blocks, KV_HEADS, SIZE, DIM, generator=generator)
    queries = torch.randn(tokens, HEADS, DIM, generator=generator)
    layout = Layout(KV_HEADS, SIZE, window, torch.float32, torch.device("cpu"))
    (piece,) = layout.batch([], [Piece(sequence, before, tokens)]).chunks
    keys, values = (kv[n, ids].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:whole] for n in (0, 1))
    outputs = chunk(queries, keys[before:], values[before:], kv, piece)
    place = torch.arange(whole)
    visible = place <= place[before:, None]
    if window is not None:
        visible &= place > place[before:, None] - window
    group = HEADS // KV_HEADS
    wide = [x.double().repeat_interleave(group, 1) for x in (keys, values)]
    scores = torch.einsum("qhd,khd->hqk", queries.double(), wide[0]) * DIM**-0.5
    shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", shares, wide[1])
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5)
