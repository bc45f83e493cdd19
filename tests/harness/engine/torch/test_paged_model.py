"""The model alone: its tokens are those of transformers, however a batch is put together."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from slo_bench.harness.engine.torch import decoder, weights  # noqa: E402
from slo_bench.harness.engine.torch.batch import Piece  # noqa: E402
from slo_bench.harness.engine.torch.cache import KvCache, Swapper, stretches  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.runner import Runner  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sampling, Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import loaded  # noqa: E402

pytestmark = pytest.mark.torch


Greedy = Callable[[str, list[int], int], list[int]]
Folder = Callable[[str], Path]
FAMILIES = ("llama", "llama-biased", "llama-tied", "mistral", "qwen2", "qwen3", "opt")
BLOCKS = 96
DEVICE = os.environ.get("SLO_BENCH_TEST_DEVICE", "cpu")  # cuda:0 on a machine that has one


class Bench:
    """A runner whose blocks are given out by hand, in any order."""

    def __init__(
        self,
        folder: Path,
        block_size: int = 8,
        draw: random.Random | None = None,
        dtype: str = "float32",
    ) -> None:
        decoder = load_decoder(folder, DEVICE, dtype)
        self.cache = KvCache(decoder.config, BLOCKS, block_size, decoder.dtype, decoder.device)
        self.runner = Runner(decoder, self.cache)
        self.free = list(range(BLOCKS))
        if draw is not None:
            draw.shuffle(self.free)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * self.cache.block_size < tokens:
            sequence.blocks.append(self.free.pop())

    def step(self, decodes: list[Sequence], pieces: list[Piece]) -> None:
        for sequence in decodes:
            self.grow(sequence, len(sequence.tokens))
        for piece in pieces:
            self.grow(piece.sequence, piece.before + piece.tokens)
        tokens = self.runner.run(decodes, pieces)
        sequences = [*decodes, *(piece.sequence for piece in pieces if piece.last)]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)

    def answer(self, sequence: Sequence, tokens: int) -> list[int]:
        self.step([], [Piece(sequence, 0, len(sequence.tokens))])
        for _ in range(tokens - 1):
            self.step([sequence], [])
        return sequence.tokens


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(3, 160) for _ in range(tokens)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_tokens_of_mixed_batches_equal_those_of_transformers(
    family: str,
    scattered: bool,
    large: bool,
    model_folder: Folder,
    generated: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if large:  # else oneDNN has only large weights, and only long prompts are in tiles
        monkeypatch.setattr(weights, "_LARGE_BYTES", 0)
        monkeypatch.setattr(decoder, "_TILE", 8)
    draw = random.Random(3)
    bench = Bench(model_folder(family), draw=draw if scattered else None)
    prompts = [prompt(draw, tokens) for tokens in (1, 7, 8, 33, 61)]
    expected = [generated(family, prompt_tokens, 24) for prompt_tokens in prompts]
    assert (
        len({token for prompt_tokens in expected for token in prompt_tokens}) > 40
    )  # not always the same answer
    sequences = [Sequence(list(prompt_tokens)) for prompt_tokens in prompts]
    computed = [0] * len(sequences)
    while any(len(s.tokens) < len(w) for s, w in zip(sequences, expected, strict=True)):
        decodes, pieces = [], []
        for k, sequence in enumerate(sequences):
            missing = len(prompts[k]) - computed[k]
            if missing and draw.random() < 0.6:
                tokens = draw.randint(1, missing)
                pieces.append(Piece(sequence, computed[k], tokens))
                computed[k] += tokens
            elif not missing and len(sequence.tokens) < len(expected[k]):
                decodes.append(sequence)
        if decodes or pieces:
            bench.step(decodes, pieces)
    assert [s.tokens for s in sequences] == expected


@pytest.mark.parametrize("rows", [0, 1, 2, 257])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plus", [False, True])
def test_packed_projection_equals_the_plain_one(
    rows: int, bias: bool, plus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_LARGE_BYTES", 0)
    torch.manual_seed(0)
    weight, x = torch.randn(96, 40), torch.randn(rows, 40)
    added = torch.randn(96) if bias else None
    onto = torch.randn(rows, 96) if plus else None
    linear = weights.Linear(weights.packed(weight), added)
    assert torch.equal(linear.dense(), weight)
    expected = torch.nn.functional.linear(x, weight, added)
    outputs = linear(x, onto)
    torch.testing.assert_close(outputs, expected if onto is None else expected + onto)
    assert torch.equal(loaded(saved(linear))(x, onto), outputs)


def saved(message: object) -> bytes:
    file = io.BytesIO()
    torch.save(message, file)
    return file.getvalue()


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_cached_prefix_is_not_computed_again(
    family: str, model_folder: Folder, generated: Greedy
) -> None:
    draw = random.Random(4)
    bench = Bench(model_folder(family))
    common = prompt(draw, 32)
    first = Sequence(common + prompt(draw, 3))
    bench.answer(first, 2)
    second = Sequence(common + prompt(draw, 9), blocks=first.blocks[:4])
    bench.step([first], [Piece(second, 32, 9)])
    for _ in range(10):
        bench.step([second, first], [])
    for sequence, length in ((first, 35), (second, 41)):
        prompt_tokens = sequence.tokens[:length]
        assert sequence.tokens == generated(family, prompt_tokens, len(sequence.tokens) - length)


def test_tokens_are_unchanged_by_blocks_swapped_to_host_memory(
    model_folder: Folder, generated: Greedy
) -> None:
    draw = random.Random(5)
    bench = Bench(model_folder("qwen3"), draw=draw)
    decoder = bench.runner.decoder
    host = KvCache(decoder.config, 8, 8, decoder.dtype, torch.device("cpu"), pinned=True)
    swapper = Swapper(bench.cache, host)
    prompt_tokens = prompt(draw, 21)
    moved, other = Sequence(list(prompt_tokens)), Sequence(prompt(draw, 40))
    bench.answer(moved, 5)
    held = moved.blocks
    swapper.out(held, [6, 2, 5, 1][: len(held)])
    for layer in bench.cache.layers:
        layer[:, held] = 77.0
    bench.answer(other, 5)
    moved.blocks = [bench.free.pop() for _ in held]
    swapper.into([6, 2, 5, 1][: len(held)], moved.blocks)
    swapper.wait()
    for _ in range(12):
        bench.step([moved], [])
    assert moved.tokens == generated("qwen3", prompt_tokens, 17)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True))
def test_adjacent_block_copies_are_merged(num_cpu_blocks: list[int]) -> None:
    """As few as there are, and every block to its place."""
    host = torch.zeros(2, 16, 2, 4, 3)
    staged = torch.randn(2, len(num_cpu_blocks), 2, 4, 3)
    pairs = list(stretches(num_cpu_blocks, host, staged))
    for there, here in pairs:
        assert there.is_contiguous()
        assert here.is_contiguous()
        there.copy_(here)
    assert torch.equal(host[:, num_cpu_blocks], staged)
    breaks = sum(b != a + 1 for a, b in pairwise(num_cpu_blocks))
    assert len(pairs) == 2 * (1 + breaks)


@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen3", "opt"])
def test_bfloat16_tokens_are_nearly_best_in_float32(family: str, model_folder: Folder) -> None:
    """Sums are rounded in other places than by transformers, and differently on each kind of CPU,
    so a near tie may fall the other way. In float32, with the same weights, the logit of each
    token is short of the largest by at most twice what transformers loses in bfloat16.
    """
    transformers = pytest.importorskip("transformers")
    folder, draw, steps = model_folder(family), random.Random(7), 40
    bench = Bench(folder, dtype="bfloat16")
    prompts = [prompt(draw, tokens) for tokens in (1, 9, 33)]
    sequences = [Sequence(list(prompt_tokens)) for prompt_tokens in prompts]
    bench.step([], [Piece(s, 0, len(s.tokens)) for s in sequences])
    for _ in range(steps):
        bench.step(sequences, [])
    load = transformers.AutoModelForCausalLM.from_pretrained
    rounded = load(folder, dtype=torch.bfloat16).eval()
    exact = load(folder, dtype=torch.bfloat16).eval().float()
    equal = 0
    for sequence, prompt_tokens in zip(sequences, prompts, strict=True):
        tokens = torch.tensor([sequence.tokens])
        with torch.inference_mode():
            theirs, logits = (
                model(tokens).logits[0, len(prompt_tokens) - 1 : -1].float()
                for model in (rounded, exact)
            )
        answer = torch.tensor(sequence.tokens[len(prompt_tokens) :])
        short = logits.amax(1) - logits.gather(1, answer.unsqueeze(1))[:, 0]
        assert float(short.max()) <= 2 * float((theirs - logits).abs().max())
        equal += int((logits.argmax(1) == answer).sum())
    assert equal > 0.9 * len(prompts) * (steps + 1)


def test_sharded_weights_give_the_same_tokens(
    save_model: Callable[..., Path], generated: Greedy
) -> None:
    folder = save_model("llama", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    prompt_tokens = prompt(random.Random(6), 12)
    assert Bench(folder).answer(Sequence(list(prompt_tokens)), 16) == generated(
        "llama", prompt_tokens, 16
    )


def test_linear_rope_scaling_equals_transformers(save_model: Callable[..., Path]) -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    folder = save_model("llama", rope_parameters=scaling)
    prompt_tokens = prompt(random.Random(8), 30)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    input_ids = torch.tensor([prompt_tokens])
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 16}
    output_ids = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
    assert Bench(folder).answer(Sequence(list(prompt_tokens)), 16) == output_ids[0].tolist()


def test_sampled_tokens_depend_on_seed_and_position(
    model_folder: Folder, generated: Greedy
) -> None:
    prompt_tokens = prompt(random.Random(9), 10)

    def answer(sampling: Sampling) -> list[int]:
        return Bench(model_folder("llama")).answer(Sequence(list(prompt_tokens), sampling), 20)

    hot = Sampling(temperature=1.5, seed=3)
    assert answer(hot) == answer(hot)
    assert answer(hot) != answer(Sampling(temperature=1.5, seed=4))
    greedy = generated("llama", prompt_tokens, 20)
    assert answer(hot) != greedy
    assert answer(Sampling(temperature=1.5, top_k=1)) == greedy
    assert answer(Sampling(temperature=1.5, top_p=1e-6)) == greedy


def test_sampled_tokens_follow_temperature_top_k_and_top_p() -> None:
    from slo_bench.harness.engine.torch.runner import next_tokens

    chances = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    rows = 2000

    def shares(**how: float) -> list[float]:
        sequences = [
            Sequence([0] * 3, Sampling(temperature=1.0, seed=s, **how))  # type: ignore[arg-type]
            for s in range(rows)
        ]
        drawn = torch.tensor(next_tokens(chances.log().expand(rows, -1), sequences))
        return [float((drawn == token).float().mean()) for token in range(5)]

    assert shares() == pytest.approx([0.5, 0.25, 0.125, 0.125, 0], abs=0.04)
    assert shares(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], abs=0.04)
    assert shares(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], abs=0.04)


def test_a_cpu_without_instructions_for_bfloat16_keeps_its_weights_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(weights, "_X86", True)
    weight = torch.randn(64, 32, dtype=torch.bfloat16)
    assert weights.packed(weight).data_ptr() == weight.data_ptr()
    monkeypatch.setattr(weights, "_X86", False)  # whose answer is the first function's alone
    assert weights._onednn_has(torch.bfloat16)
