"""Blocks of captured prompts: what is shared, what is not, and what cannot be guessed."""

from __future__ import annotations

import pytest

from slo_bench.harness.servers.gateway import captured_prompts
from slo_bench.harness.servers.gateway.captured_prompts import PromptBlocks, prompt_text

SALT = b"0123456789abcdef"


def blocks(size: int = 16, *, salt: bytes = SALT, numbered: bool = False) -> PromptBlocks:
    return PromptBlocks(size, salt, numbered=numbered)


def ids(prompt_blocks: PromptBlocks, tokens: int | None, **body: object) -> tuple[int, ...]:
    text = prompt_text(body)
    assert text is not None
    return prompt_blocks.read(text, tokens).context.ids


@pytest.mark.parametrize("size", [16, 512])
def test_prompts_of_token_ids_share_exactly_their_common_blocks(size):
    prompt_blocks = blocks(size)
    first = ids(prompt_blocks, 4 * size, prompt=list(range(4 * size)))
    second = ids(prompt_blocks, 4 * size, prompt=[*range(3 * size - 1), *([7] * (size + 1))])
    assert len(first) == len(second) == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]


def test_texts_share_blocks_of_their_common_part_whatever_follows():
    prompt_blocks, common = blocks(), "shared words " * 100
    first = ids(prompt_blocks, 260 + 40, prompt=common + "abcd " * 40)
    second = ids(prompt_blocks, 260 + 900, prompt=common + "once upon a midnight dreary " * 180)
    alike = sum(a == b for a, b in zip(first, second, strict=False))
    assert abs(alike - 260 // 16) <= 2
    assert (len(first), len(second)) == (300 // 16, 1160 // 16)


def test_other_models_salts_and_tools_share_nothing():
    prompt_blocks = blocks()
    body = {"messages": [{"role": "user", "content": "word " * 99}]}
    first = {*ids(prompt_blocks, 99, **body)}
    for other in ({"model": "m"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}):
        assert not first & {*ids(prompt_blocks, 99, **body, **other)}
    assert first == {*ids(blocks(), 99, **body)}
    assert not first & {*ids(blocks(salt=b"f" * 16), 99, **body)}


def test_numbered_blocks_count_from_zero():
    prompt_blocks = blocks(numbered=True)
    assert ids(prompt_blocks, 48, prompt=list(range(48))) == (0, 1, 2)
    assert ids(prompt_blocks, 48, prompt=[*range(32), *range(16)]) == (0, 1, 3)


def test_tokens_that_are_not_told_are_estimated_by_those_before():
    prompt_blocks = blocks()
    ids(prompt_blocks, 100_000, prompt="ab" * 100_000)
    text = prompt_text({"prompt": "cd" * 500})
    read = prompt_blocks.read(text, None)
    assert read.is_estimate
    assert read.tokens == pytest.approx(500, rel=0.05)


def test_images_count_as_parts_of_one_size_and_odd_bodies_as_nothing():
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    text = prompt_text({"messages": [{"role": "user", "content": [image]}, None, 3]})
    assert text is not None
    assert sum(map(len, text.segments)) < 200
    for body in ({}, {"prompt": []}, {"prompt": ["a", "b"]}, {"messages": 3}, {"prompt": {}}):
        assert prompt_text(body) is None
    assert prompt_text({"prompt": [[2**40, -1]]}) is not None
    assert prompt_text({"messages": [{"role": "user", "content": "\ud800"}]}) is not None


def test_old_chunks_are_forgotten(monkeypatch):
    monkeypatch.setattr(captured_prompts, "MOST_CHUNKS", 8)
    prompt_blocks = blocks()
    for first in range(0, 16_000, 160):
        ids(prompt_blocks, 160, prompt=list(range(first, first + 160)))
    assert len(prompt_blocks._chunks) == 8
