"""What each field of an answer does to TTFT, TPOT, ITL and counts: the rows of docs/metrics.md."""

import json
import math
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import time_per_output_token_s
from slo_bench.harness.load_generator.http.answers import Raw, read_answer
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.http.token_counts import spread

DONE = b"data: [DONE]\n\n"


def sse(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def choices(*parts):
    return sse({"choices": list(parts)})


def delta(finish=None, index=0, logprobs=None, **fields):
    choice = {"index": index, "delta": fields, "finish_reason": finish}
    return choice if logprobs is None else {**choice, "logprobs": logprobs}


def chat(*args, **fields):
    return choices(delta(*args, **fields))


def usage(tokens, **more):
    return sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, **more}})


def read(*events, end=DONE, max_tokens=None, hides=False):
    """Each event comes a tenth of a second after the one before; the first at 0.1 s."""
    events = [*events, end]
    stamps = array("d", (0.1 * k for k in range(1, len(events) + 1)))
    lengths = array("I", map(len, events))
    return read_answer(
        Raw(
            *(200, RequestFault.NONE, "", stamps, lengths, b"".join(events), False, max_tokens),
            hides=hides,
        )
    )


def figures(answer):
    """TTFT, TPOT (infinite: not known; NaN: none) and number of tokens."""
    times_s = answer.token_s
    ends_s = np.array(times_s[0]), np.array(times_s[-1])
    n = np.array(len(times_s))
    tpot_s = float(time_per_output_token_s(*ends_s, n, answer.untimed_tokens))
    return times_s[0], tpot_s, len(times_s)


LOOK = {"type": "function", "function": {"name": "look", "arguments": ""}}
TOOL = [
    chat(role="assistant", tool_calls=[{"index": 0, "id": "c", **LOOK}]),
    chat(tool_calls=[{"index": 0, "function": {"arguments": '{"q":'}}]),
    chat(tool_calls=[{"index": 0, "function": {"arguments": '"x"}'}}]),
]
INF = float("inf")
ROWS = {
    # name: events, (TTFT s, TPOT s, tokens)
    "text": ([chat(content=" a"), chat(content=" b")], (0.1, 0.1, 2)),
    "role alone": ([chat(role="assistant", content=""), chat(content="a"), chat(content="b")],
                   (0.2, 0.1, 2)),
    "role with text": ([chat(role="assistant", content="a"), chat(content="b")], (0.1, 0.1, 2)),
    "null content": ([chat(role="assistant", content=None), chat(content="a"),
                      chat(content=None), chat(content="b")], (0.2, 0.2, 2)),
    "empty first, usage of more": ([chat(content=""), chat(content=" a b"), chat(content=" c d"),
                                    usage(4)], (0.2, 0.05, 4)),
    "empty between, usage counts it": ([chat(content="a"), chat(content=""), chat(content="é"),
                                        usage(3)], (0.1, 0.1, 3)),
    "empty between, usage does not": ([chat(content="a"), chat(), chat(content="b"), usage(2)],
                                      (0.1, 0.2, 2)),
    "empty delta": ([chat(), chat(content="a"), chat(content="b")], (0.2, 0.1, 2)),
    "no choices": ([choices(), chat(content="a"), chat(content="b")], (0.2, 0.1, 2)),
    "several in the first": ([chat(content=" one two three"), chat(content=" x"), usage(4)],
                             (0.1, 0.1, 4)),
    "running usage": (
        [sse({"choices": [delta(content="a b c")], "usage": {"completion_tokens": 3}}),
         sse({"choices": [delta(content="d")], "usage": {"completion_tokens": 4}})],
        (0.1, 0.1, 4)),
    "running usage of silence": (
        [sse({"choices": [delta(content="")], "usage": {"completion_tokens": 5}}),
         sse({"choices": [delta(content="a")], "usage": {"completion_tokens": 11}}),
         sse({"choices": [delta(content="b")], "usage": {"completion_tokens": 12}})],
        (0.2, 0.1, 2)),
    "usage in the middle": ([chat(content="a"), chat(content="b"), usage(2), chat(content="c"),
                             chat(content="d")], (0.1, 0.4 / 3, 4)),
    "usage of the prompt first": ([usage(0), chat(content="a"), chat(content="b")], (0.2, 0.1, 2)),
    "usage of zero": ([chat(content="a"), chat(content="b"), usage(0)], (0.1, 0.1, 2)),
    "usage of one": ([chat(content="a"), chat(content="b"), usage(1)], (0.1, 0.1, 2)),
    "usage null": ([sse({"choices": [delta(content=t)], "usage": None}) for t in "ab"],
                   (0.1, 0.1, 2)),
    "usage of other names": (
        [chat(content=" a b"), chat(content=" c d"),
         sse({"choices": [], "usage": {"input_tokens": 3, "output_tokens": 4}})], (0.1, 0.05, 4)),
    "usage of Groq": ([chat(content=" a b"), sse({"choices": [delta(content=" c d")], "x_groq": {
        "usage": {"prompt_tokens": 3, "completion_tokens": 4}}})], (0.1, 0.05, 4)),
    "fewer tokens than events": ([*[chat(content="x")] * 9, usage(3)], (0.1, 0.4, 3)),
    "hidden reasoning": ([chat(role="assistant", content=""), chat(content="a"), chat(content="b"),
                          usage(12, completion_tokens_details={"reasoning_tokens": 10})],
                         (0.2, 0.1, 2)),
    "hidden reasoning beside": (
        [chat(content="a"), chat(content="b"),
         usage(2, total_tokens=15, completion_tokens_details={"reasoning_tokens": 10})],
        (0.1, 0.1, 2)),
    "hidden reasoning of SGLang": ([chat(content="a"), chat(content="b"),
                                    usage(12, reasoning_tokens=10)], (0.1, 0.1, 2)),
    "hidden, unsaid": ([chat(content="a"), chat(content="b"), usage(50)], (0.1, INF, 2)),
    "reasoning within the text": (
        [chat(content="<think>hm a"), chat(content="</think> b"),
         usage(6, completion_tokens_details={"reasoning_tokens": 4})], (0.1, 0.1 / 3, 6)),
    "reasoning then text": ([chat(reasoning_content="r"), chat(content="a"),
                             usage(2, completion_tokens_details={"reasoning_tokens": 1})],
                            (0.1, 0.1, 2)),
    "reasoning then nothing": ([chat(reasoning="r"), chat(reasoning="s"), chat("length")],
                               (0.1, 0.1, 2)),
    "reasoning twice named": ([chat(reasoning="r s", reasoning_content="r s"), chat(content=" x y"),
                               usage(4)], (0.1, 0.05, 4)),
    "reasoning details": ([chat(reasoning_details=[{"type": "reasoning.text", "text": "r"}]),
                           chat(content="a")], (0.1, 0.1, 2)),
    "encrypted reasoning": ([chat(reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]),
                             chat(content="a"), chat(content="b")], (0.2, 0.1, 2)),
    "thinking": ([chat(thinking="r"), chat(content="a")], (0.1, 0.1, 2)),
    "content as a list": (
        [chat(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}]),
         chat(content=[{"type": "text", "text": "a"}]), chat(content=[])], (0.1, 0.1, 2)),
    "refusal": ([chat(refusal="no"), chat(refusal=" way")], (0.1, 0.1, 2)),
    "tool call": (TOOL, (0.1, 0.1, 3)),
    "tool call without arguments": ([chat(tool_calls=[{"index": 0, "function": {"arguments": ""}}]),
                                     *TOOL], (0.2, 0.1, 3)),
    "function call": ([chat(function_call={"name": "look", "arguments": ""}),
                       chat(function_call={"arguments": "{}"})], (0.1, 0.1, 2)),
    "arguments as an object": (
        [chat(tool_calls=[{"function": {"name": "f", "arguments": {"q": 1}}}]), chat(content="a")],
        (0.1, 0.1, 2)),
    "logprobs alone": ([chat(content="", logprobs={"content": [{"token": "x"}]}),
                        chat(content="a", logprobs={"content": [{"token": "a"}]})], (0.1, 0.1, 2)),
    "logprobs of several": (
        [chat(content="ab", logprobs={"content": [{"token": "a"}, {"token": "b"}]}),
         chat(content="c", logprobs={"content": [{"token": "c"}]})], (0.1, 0.1, 3)),
    "token ids": ([choices({"index": 0, "text": "ab", "token_ids": [1, 2, 3]}),
                   choices({"index": 0, "text": "", "token_ids": [4]})], (0.1, 0.1, 4)),
    "several choices": ([chat(content=t, index=i) for t in "ab" for i in (0, 1)], (0.1, 0.2, 4)),
    "choices in one event": ([choices(delta(content=t), delta(index=1, content=t)) for t in "abc"],
                             (0.1, 0.1, 6)),
    "same usage in all events": (
        [sse({"choices": [delta(content=t)], "usage": {"completion_tokens": 8}})
         for t in (" one two", " three four", " five six", " seven")], (0.1, 0.05, 8)),
    "same small usage in all events": (
        [sse({"choices": [delta(content=t)], "usage": {"completion_tokens": 2}}) for t in "abcd"],
        (0.1, 0.1, 4)),
    "usage that falls": (
        [sse({"choices": [delta(content=t)], "usage": {"completion_tokens": 4 - k}})
         for k, t in enumerate("abcd")], (0.1, 0.1, 4)),
    "running usage of each choice": (
        [sse({"choices": [delta(content=t, index=i)], "usage": {"completion_tokens": k + 1}})
         for k, t in enumerate("abc") for i in (0, 1)], (0.1, 0.2, 6)),
    "usage as text": ([chat(content=" a b"), chat(content=" c d"), usage("4")], (0.1, 0.05, 4)),
    "usage as 4.0": ([chat(content=" a b"), chat(content=" c d"), usage(4.0)], (0.1, 0.05, 4)),
    "choices without an index": ([choices({"delta": {"content": t}}, {"delta": {"content": t}})
                                  for t in "abc"], (0.1, 0.1, 6)),
    "index as text": ([choices(*(delta(content=t, index=i) for i in ("0", "1"))) for t in "abc"],
                      (0.1, 0.1, 6)),
    "one huge event": ([chat(content="x " * 40_000), usage(40_000)], (0.1, INF, 40_000)),
    "one token": ([chat(content="a"), usage(1)], (0.1, float("nan"), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_each_kind_of_answer_has_its_ttft_tpot_and_count(name):
    events, (ttft_s, tpot_s, tokens) = ROWS[name]
    answer = read(*events)
    assert answer.fault is RequestFault.NONE
    expected = pytest.approx((ttft_s, tpot_s, tokens), nan_ok=True)
    assert figures(answer) == expected


def milliseconds(time_s):
    if math.isnan(time_s):
        return "–"
    return "unknown" if time_s == INF else f"{1000 * time_s:.3g}"


def test_page_of_kinds_has_the_values_of_these_rows():
    page = Path(__file__).parents[3] / "docs" / "measurements" / "answers.md"
    section = page.read_text("utf-8").split("\n## ")[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    assert len(lines) == 33  # with two of the head
    for name, before, now in lines[2:]:
        ttft_s, tpot_s, tokens = ROWS[name][1]
        assert now == f"{milliseconds(ttft_s)}, {milliseconds(tpot_s)}, {tokens:,}", name
        assert now != before


def test_number_that_usage_and_texts_contradict_is_unsure():
    assert read(*ROWS["hidden, unsaid"][0]).unsure
    assert not read(*ROWS["hidden reasoning"][0]).unsure
    assert not read(*ROWS["one huge event"][0]).unsure


@pytest.mark.parametrize("tokens", [0, 1, -5, "many", 2.5, [2]])
def test_usage_that_the_events_refute_is_not_used_and_noted(tokens):
    answer = read(chat(content=" one"), chat(content=" two"), usage(tokens))
    assert (len(answer.token_s), answer.refuted) == (2, True)


def test_usage_that_is_missing_or_right_is_not_refuted():
    texts = [chat(content="a"), chat(content="b")]
    for end in ([], [usage(2)], [sse({"choices": [], "usage": None})]):
        assert not read(*texts, *end).refuted
    assert not read(*ROWS["usage of the prompt first"][0]).refuted
    assert not read(*ROWS["running usage of each choice"][0]).refuted


@pytest.mark.parametrize(
    ("reported", "prompt_tokens", "more", "max_tokens", "refuted"),
    [
        (15, 12, {}, 3, True),
        (15, 12, {"total_tokens": 15}, None, True),
        (17, 12, {"total_tokens": 17}, 6, True),  # several tokens in an event
        (17, 12, {"total_tokens": 29}, 16, False),  # so have speculative steps beyond the bound
        (15, 12, {"completion_tokens_details": {"reasoning_tokens": 12}}, 3, False),  # hidden
        (15, 12, {"total_tokens": 27}, None, False),  # nothing speaks against 15
        (15, 12, {}, 20, False),
        (15, 4, {}, 3, False),  # nor do 11 fit the bound
        (13, 12, {}, 3, False),  # nor 1 the events
        (15, 0, {}, 3, False),
    ],
)
def test_prompt_within_the_usage_of_the_answer_is_taken_off_and_noted(
    reported, prompt_tokens, more, max_tokens, refuted
):
    texts = [chat(content=f" word {k}") for k in range(3)]
    events = [*texts, usage(reported, prompt_tokens=prompt_tokens, **more)]
    answer = read(*events, max_tokens=max_tokens)
    counted = (
        reported - prompt_tokens if refuted or "completion_tokens_details" in more else reported
    )
    assert (len(answer.token_s), answer.refuted) == (counted, refuted)
    assert (answer.completion_tokens, answer.unsure) == (reported, False)
    assert answer.surplus == (not refuted and max_tokens in (3, 16))


def test_running_usage_with_the_prompt_counts_as_one_without():
    events = [
        sse({"choices": [delta(content=t)], "usage": {"prompt_tokens": 9, **counts}})
        for t, n in (("a b c", 12), ("d", 13))
        for counts in [{"completion_tokens": n, "total_tokens": n}]
    ]
    assert figures(read(*events, max_tokens=4)) == pytest.approx((0.1, 0.1, 4))


OPENING = [chat(role="assistant", content=""), *[chat()] * 4]  # half a second
WORDS = [chat(content=" one"), chat(content=" two")]


@pytest.mark.parametrize(
    ("events", "silent"),
    [
        ([*OPENING, *WORDS, usage(6)], True),
        ([*OPENING, *WORDS, usage(2)], False),  # one token an event
        ([*OPENING[:2], *WORDS, usage(6)], False),  # not for long
        ([*OPENING, chat(reasoning="hm"), *WORDS, usage(6)], False),
        ([*OPENING, *TOOL, usage(6)], False),
        ([*WORDS, usage(6)], False),
        ([*OPENING, *WORDS, usage(6, completion_tokens_details={"reasoning_tokens": 4})], False),
    ],
)
def test_silence_after_the_opening_is_noted_where_it_may_hide_tokens(events, silent):
    answer = read(*events)
    assert (answer.silent, answer.unsure) == (silent, False)


def test_usage_beyond_the_events_is_unsure_where_the_request_hides_reasoning():
    assert read(*WORDS, usage(6), hides=True).unsure
    assert not read(*WORDS, usage(2), hides=True).unsure
    details = {"completion_tokens_details": {"reasoning_tokens": 4}}
    assert not read(*WORDS, usage(6, **details), hides=True).unsure


@pytest.mark.parametrize("finish", ["error", "content_filter", "failed", "timeout"])
def test_answer_that_ends_with_an_error_fails_with_its_reason(finish):
    answer = read(chat(content="a"), chat(finish))
    assert answer.fault is RequestFault.ERROR_EVENT
    assert answer.detail == f"the answer ended with finish_reason {finish}"
    assert read(chat("cancelled", content="a")).fault is RequestFault.ABORTED
    assert read(chat("stop", content="a"), chat("stop")).fault is RequestFault.NONE


@pytest.mark.parametrize(
    "event",
    [
        sse({"error": {"message": "out of memory"}}),
        sse({"errors": [{"message": "out of memory"}]}),
        sse({"message": "out of memory", "code": 500}),
        sse({"detail": "out of memory"}),
        sse({"choices": [{"delta": {}, "error": {"message": "out of memory"}}]}),
        b"event: error\n" + sse({"message": "out of memory"}),
    ],
)
def test_error_within_a_stream_fails_with_its_message(event):
    answer = read(chat(content="a"), event, chat("stop"))
    assert answer.fault is RequestFault.ERROR_EVENT
    assert "out of memory" in answer.detail


def test_hidden_reasoning_alone_is_no_answer():
    answer = read(
        chat(role="assistant", content=""), chat("length"),
        usage(20, completion_tokens_details={"reasoning_tokens": 20}),
    )  # fmt: skip
    assert answer.fault is RequestFault.EMPTY
    assert answer.detail == "20 tokens by the usage, and none shown"


@pytest.mark.parametrize(
    "change",
    [
        lambda stream: "﻿".encode() + stream,
        lambda stream: stream.replace(b"data: ", b"data:"),
        lambda stream: stream.replace(b"\n", b"\r\n"),
        lambda stream: b": keep-alive\n\n" + stream.replace(b"data: {", b"id: 7\ndata: {"),
        lambda stream: stream.replace(b"data: {", b"event: message\nretry: 10\ndata: {"),
        lambda stream: stream.replace(b'"choices"', b'\ndata: "choices"'),
    ],
    ids=["byte order mark", "no space", "CRLF", "comment and id", "event, retry", "two data lines"],
)  # fmt: skip
def test_form_of_the_events_changes_nothing(change):
    stream = chat(content=" a b") + chat(content=" c") + chat("stop") + usage(3)
    answer = read(change(stream))
    assert (answer.fault, len(answer.token_s), answer.completion_tokens) == ("", 3, 3)


def test_stream_behind_a_buffer_has_no_tpot():
    together = b"".join(chat(content=f" {k}") for k in range(20))
    answer = read(together + chat("length"), usage(20))
    assert (answer.outcome.name, len(answer.token_s), answer.untimed_tokens) == ("FINISHED", 20, 20)
    halves = [chat(content=" x") * 10 for _ in range(2)]  # a flush in two reads, 0.1 ms apart
    stamps, lengths = array("d", [0.5, 0.5001, 0.6]), array("I", [*map(len, halves), len(DONE)])
    raw = Raw(200, RequestFault.NONE, "", stamps, lengths, b"".join([*halves, DONE]), False)
    assert read_answer(raw).untimed_tokens == 20


TOKENS = st.lists(
    st.sampled_from([" a", " word", "é", "x", " longer token"]), min_size=3, max_size=30
)


@given(TOKENS, st.data())
def test_figures_do_not_depend_on_how_tokens_are_cut_into_events(tokens, data):
    """Tokens come a tenth of a second apart; events join some, are empty, and have roles."""
    n = len(tokens)
    ends = sorted({*data.draw(st.sets(st.integers(1, n - 1))), n})
    style = data.draw(st.sampled_from(["content", "reasoning", "thinking", "text"]))
    running = data.draw(st.booleans())
    events, stamps = [], []

    def say(payload, time_s):
        events.append(sse(payload))
        stamps.append(time_s)

    for _ in range(data.draw(st.integers(0, 2))):  # nothing is shown yet
        say({"choices": [delta(**data.draw(st.sampled_from([{}, {"content": ""}])))]}, 0.01)
    for start, end in zip([0, *ends], ends, strict=False):
        text = "".join(tokens[start:end])
        part = {"index": 0, "text": text} if style == "text" else delta(**{style: text})
        counts = {"usage": {"prompt_tokens": 3, "completion_tokens": end}} if running else {}
        say({"choices": [part], **counts}, 0.1 * end)
    say({"choices": [delta("length")]}, 0.1 * n)
    say({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": n}}, 0.1 * n)
    raw = Raw(
        200, RequestFault.NONE, "", array("d", stamps), array("I", map(len, events)),
        b"".join(events), False,
    )  # fmt: skip
    answer = read_answer(raw)
    assert len(answer.token_s) == n
    assert answer.token_s[0] == 0.1 * ends[0]  # the first event that shows something
    assert answer.token_s[-1] == 0.1 * n
    if len(ends) == 1:
        assert answer.untimed_tokens == n
    elif running:
        assert answer.untimed_tokens == ends[0]
        assert figures(answer)[1] == pytest.approx(0.1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 400))
def test_spread_gives_all_tokens_and_one_to_each_event_that_shows_something(sizes, tokens):
    shares = spread(tokens, sizes)
    assert sum(shares) == tokens
    assert min(shares) >= 0
    showing = [share for share, size in zip(shares, sizes, strict=True) if size]
    if tokens >= len(showing) > 0:
        assert min(showing) >= 1
        if tokens <= sum(sizes):
            assert all(share <= max(size, 1) for share, size in zip(shares, sizes, strict=True))
    elif showing and tokens > 1:
        assert showing[0] >= 1
        assert showing[-1] >= 1


def test_answer_of_20_000_choices_is_counted_in_one_pass():
    """Once for each choice, it took minutes."""
    answer = read(choices(*({"index": k, "text": "a"} for k in range(20_000))))
    assert len(answer.sequences) == 20_000
