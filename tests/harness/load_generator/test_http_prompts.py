import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.wire import priority_from_wire, slo_from_wire, to_wire
from slo_bench.harness.load_generator.http import Api, HttpOptions, PromptFormat
from slo_bench.harness.load_generator.http.prompts import PromptMaker, Vocabulary
from slo_bench.harness.load_generator.http.wire_requests import Bodies, BodyMaker
from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.request import Request, RequestType, Slo
from slo_bench.workloads.source import load_source

VOCABULARY = Vocabulary.span(1000, 30000)


def maker(block_size=4, salt="", encoder=None):
    return PromptMaker(VOCABULARY, block_size, salt, encoder)


def request(tokens=10, row=0, blocks=(), **more):
    return Request(row, 0.0, tokens, 5, 5, prefix_blocks=blocks, **more)


hashes = st.integers(-(2**63), 2**64 - 1)


@given(st.integers(1, 60), st.integers(0, 10**9), st.lists(hashes, max_size=20).map(tuple))
def test_token_id_prompt_has_exactly_its_tokens(tokens, row, blocks):
    ids = maker().token_ids(request(tokens, row, blocks))
    assert len(ids) == tokens
    assert all(1000 <= token < 30000 for token in ids)
    assert ids == maker().token_ids(request(tokens, row, blocks))


def test_token_ids_json_equals_token_ids():
    prompts = PromptMaker(Vocabulary.span(7, 1200), 4, "")
    for row in range(40):  # the texts of all ids are made on the way
        drawn_request = request(row * 3, row)
        assert json.loads(prompts.token_ids_json(drawn_request)) == prompts.token_ids(drawn_request)


@given(st.lists(hashes, max_size=6), st.lists(hashes, max_size=6), st.lists(hashes, max_size=6))
def test_shared_prefix_blocks_give_shared_token_ids(common, first_tail, second_tail):
    first = maker().token_ids(request(40, 1, (*common, *first_tail)))
    second = maker().token_ids(request(40, 2, (*common, *second_tail)))
    shared = 4 * len(common)
    assert first[:shared] == second[:shared]


def test_hot_prefixes_are_sent_as_equal_tokens():
    workload = load_source("hot-prefixes(prefixes=3,tokens=100,prompt=50,output=2)").make(
        rate_rps=2, requests=30
    )
    prompts = maker(workload.prefix_block_size)
    starts: dict[int, set[tuple[int, ...]]] = {}
    tails = set()
    for row in range(len(workload)):
        ids = prompts.token_ids(workload[row])
        starts.setdefault(workload.prefix_blocks[row][0], set()).add(tuple(ids[:96]))
        tails.add(tuple(ids[96:]))
    assert [len(prefix) for prefix in starts.values()] == [1, 1, 1]
    assert len(set.union(*starts.values())) == 3
    assert len(tails) == 30


def test_prompts_differ_by_row_and_salt():
    """Another cell must not find this one's prompts in the server's cache."""
    ids = {tuple(maker(salt=s).token_ids(request(8, row, (7,)))) for s in "ab" for row in (1, 2)}
    assert len(ids) == 4
    starts = {prompt[:4] for prompt in ids}
    assert len(starts) == 2  # the shared block, once for each salt


def test_words_prompt_has_a_word_for_each_token():
    assert len(maker().words(request(30)).split()) == 30


def test_words_prompt_is_exact_with_a_tokenizer():
    """Of a tokenizer that takes two tokens for each word that has an `e`."""

    class Encoder:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return SimpleNamespace(ids=[0] * sum(1 + ("e" in w) for w in text.split(" ")))

    encoder = Encoder()
    lengths = [
        len(encoder.encode(maker(encoder=encoder).words(request(40, row)), False).ids)
        for row in range(20)
    ]
    assert max(abs(n - 40) for n in lengths) <= 1
    assert lengths.count(40) >= 10


def test_vocabulary_leaves_special_tokens_out(tmp_path):
    table = {
        "model": {"vocab": {"a": 0, "b": 1, "<s>": 2, "c": 3}},
        "added_tokens": [{"id": 2}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert Vocabulary.read(tmp_path).ids.tolist() == [0, 1, 3]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0], ["b", 1]]}}))
    assert Vocabulary.read(tmp_path).ids.tolist() == [0, 1]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"vocab_size": 6}')
    assert Vocabulary.read(tmp_path).ids.tolist() == [3, 4, 5]
    with pytest.raises(FileFormatError, match="neither"):
        Vocabulary.read(tmp_path / "none")
    with pytest.raises(SloBenchError, match="LOW:HIGH"):
        Vocabulary.span(5, 6)


def body(workload, row=0, **options):
    return BodyMaker(workload, HttpOptions(**options)).body(workload[row])


def test_encoded_bodies_hold_the_fields_of_their_own_request(workload):
    """Bodies that differ in their prompts alone are encoded once."""
    load = workload(tokens=np.array([3, 3, 4, 3, 3, 4]), priority=np.array([0, 0, 0, 1, 1, 0]))
    maker = BodyMaker(load, HttpOptions(model="m"))
    for request in load:
        assert json.loads(maker.encoded(request)) == maker.body(request)


def test_completion_body_asks_for_exactly_the_traces_tokens(workload):
    fields = body(workload(max_output_tokens=np.full(6, 99)), model="m")
    assert len(fields.pop("prompt")) == 8
    assert fields == {
        "model": "m",
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    fields = body(workload(max_output_tokens=np.full(6, 99)), exact_output=False)
    assert fields["max_tokens"] == 99
    assert "ignore_eos" not in fields


def test_body_uses_texts_in_chat_and_completions(workload):
    load = workload(2, texts=["Grüße", None])
    assert body(load, 0, api=Api.CHAT)["messages"] == [{"role": "user", "content": "Grüße"}]
    assert body(load, 0)["prompt"] == "Grüße"
    (message,) = body(load, 1, api=Api.CHAT)["messages"]
    assert len(message["content"].split()) == 8
    assert isinstance(body(load, 1, prompt_format=PromptFormat.TEXT)["prompt"], str)
    with pytest.raises(SloBenchError, match="chat API takes no token ids"):
        body(load, 1, api=Api.CHAT, prompt_format=PromptFormat.TOKEN_IDS)


def test_body_of_an_embedding_request(workload):
    fields = body(workload(request_type=np.full(6, RequestType.EMBED)), model="e")
    assert len(fields["input"]) == 8
    assert set(fields) == {"input", "model"}


def test_body_of_several_texts_is_a_list(workload):
    embeds = {"request_type": np.full(6, RequestType.EMBED), "num_inputs": np.full(6, 4)}
    texts = body(workload(**embeds))["input"]
    assert [len(text) for text in texts] == [2] * 4
    assert len({tuple(text) for text in texts}) == 4
    texts = body(workload(**embeds), prompt_format=PromptFormat.TEXT)["input"]
    assert [len(text.split(" ")) for text in texts] == [2] * 4


def test_body_carries_priority_model_and_slo(workload):
    load = workload(
        priority=np.arange(6),
        model_index=np.array([0, 1, 0, 0, 0, 0]),
        model_names=("", "lora"),
        ttft_slo_s=np.full(6, 0.5),
        deadline_s=np.full(6, 9.0),
    )
    fields = body(load, 1, model="base", values_field="vllm_xargs", body={"temperature": 1, "x": 2})
    assert (fields["model"], fields["priority"], fields["temperature"], fields["x"]) == (
        "lora",
        1,
        1,
        2,
    )
    assert fields["vllm_xargs"] == {
        "row": 1,
        "max_output_tokens": 5,
        "priority": 1,
        "ttft_slo_s": 0.5,
        "deadline_in_s": pytest.approx(8.99),
    }
    assert body(load, 0, model="base")["model"] == "base"


bounds = st.floats(0, 1e6) | st.just(float("inf"))


@given(st.builds(Slo, bounds, bounds, bounds), st.floats(0, 1e6))
def test_slo_survives_the_wire(slo, arrival_s):
    sent = Request(3, arrival_s, 8, 5, 9, slo=slo, class_name="chat")
    wire = json.loads(json.dumps(to_wire(sent)))
    assert slo_from_wire(wire, 100.0) == slo
    assert (wire["row"], wire["max_output_tokens"], wire["class_name"]) == (3, 9, "chat")
    assert priority_from_wire({"priority": 3}) == 3
    assert priority_from_wire({}) == priority_from_wire({"priority": "high"}) == 0
    assert priority_from_wire({"priority": 1e300}) == 0
    assert slo_from_wire({}, 0.0) == slo_from_wire({"ttft_slo_s": "soon"}, 0.0) == Slo()


def test_wire_deadline_counts_from_the_arrival():
    sent = Request(0, 10.0, 8, 5, 5, slo=Slo(deadline_s=25.0))
    assert slo_from_wire(to_wire(sent), 100.0).deadline_s == 115.0


def test_bodies_file_reads_back_as_written(workload, tmp_path):
    load = workload(texts=["a", "", "ü" * 50, None, "b", "c"])
    written = Bodies.write(load, HttpOptions(), tmp_path / "bodies")
    again = Bodies.read(tmp_path / "bodies")
    for row in range(6):
        assert json.loads(written[row]) == json.loads(again[row]) == body(load, row)
    written.close()
    again.close()
