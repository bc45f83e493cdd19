import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import answers
from slo_bench.harness.load_generator.http.answers import Raw, read_answer, unchunk
from slo_bench.harness.load_generator.http.faults import RequestFault

DONE = b"data: [DONE]\n\n"


def event(text=None, *, finish=None, usage=None, **more):
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish, **more}]
    body = {"id": "x", "choices": choices}
    if usage is not None:
        body["usage"] = usage
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def delta(finish=None, **fields):
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(tokens, prompt=3, **more):
    return {"prompt_tokens": prompt, "completion_tokens": tokens, **more}


def raw(*pieces, status=200, fault=RequestFault.NONE, embeds=False, max_tokens=None, chunked=False):
    """Each piece came a second after the one before."""
    return Raw(
        status,
        fault,
        "",
        array("d", range(1, len(pieces) + 1)),
        array("I", map(len, pieces)),
        b"".join(pieces),
        embeds,
        max_tokens,
        chunked,
    )


def read(*pieces, **options):
    return read_answer(raw(*pieces, **options))


def test_each_event_of_a_stream_is_a_token():
    answer = read(event(" a"), event(" b"), event(" c", finish="length"), DONE)
    assert answer.outcome is Outcome.FINISHED
    assert list(answer.token_s) == [1, 2, 3]
    assert (answer.chunks, answer.completion_tokens, answer.prompt_tokens) == (3, -1, -1)


def test_event_has_the_time_of_its_last_byte():
    first, second = event(" a"), event(" b", finish="stop")
    answer = read(first + second[:10], second[10:20], second[20:] + DONE)
    assert list(answer.token_s) == [1, 3]


def test_usage_divides_tokens_among_chunks():
    pieces = [event(" a b c"), event(" d e", finish="length"), event(usage=usage(6)), DONE]
    answer = read(*pieces)
    assert list(answer.token_s) == [1, 1, 1, 2, 2, 2]
    assert (answer.chunks, answer.completion_tokens, answer.prompt_tokens) == (2, 6, 3)


def test_continuous_usage_gives_exact_tokens_of_each_event():
    answer = read(
        event(" a", usage=usage(1)), event(" b c d", usage=usage(4), finish="length"), DONE
    )
    assert list(answer.token_s) == [1, 2, 2, 2]


def test_events_without_text_are_tokens_only_after_the_first_text():
    pieces = [event(""), event(" é"), event(""), event(" b", finish="length")]
    assert list(read(*pieces, event(usage=usage(3)), DONE).token_s) == [2, 3, 4]
    assert list(read(*pieces, event(usage=usage(2)), DONE).token_s) == [2, 4]
    assert list(read(*pieces, DONE).token_s) == [2, 4]


def test_role_event_is_no_token():
    answer = read(
        delta(role="assistant", content=""),
        delta(content="hi"),
        delta(reasoning_content="hm"),
        delta(finish="stop"),
        event(usage=usage(2, prompt_tokens_details={"cached_tokens": 2})),
        DONE,
    )
    assert list(answer.token_s) == [2, 3]
    assert answer.cached_tokens == 2


def test_texts_with_quotes_and_escapes_are_tokens():
    texts = [" a", '"', "\\", "\n", '"text":""', "é", " b"]
    answer = read_answer(raw(*[event(t) for t in texts], event(" z", finish="stop"), DONE))
    assert list(answer.token_s) == [1, 2, 3, 4, 5, 6, 7, 8]
    kept = read_answer(raw(*[event(t) for t in texts], DONE), keep_text=True)
    assert kept.text == "".join(texts)


@pytest.mark.parametrize(
    ("pieces", "options", "fault", "outcome"),
    [
        ([b'{"error": "busy"}'], {"status": 429}, RequestFault.STATUS, Outcome.REJECTED),
        ([b"oops"], {"status": 500}, RequestFault.STATUS, Outcome.FAILED),
        ([event(" a"), b"data: {no\n\n", DONE], {}, RequestFault.MALFORMED, Outcome.FAILED),
        ([b'data: {"error": {"message": "no"}}\n\n'], {}, RequestFault.ERROR_EVENT, Outcome.FAILED),
        ([event(" a")], {}, RequestFault.CUT, Outcome.FAILED),
        ([DONE], {}, RequestFault.EMPTY, Outcome.FAILED),
        ([], {}, RequestFault.CUT, Outcome.FAILED),
        ([event(" a"), event("", finish="abort"), DONE], {}, RequestFault.ABORTED, Outcome.DROPPED),
        ([event(" a")], {"fault": RequestFault.RESET}, RequestFault.RESET, Outcome.FAILED),
        ([], {"fault": RequestFault.TIME_LIMIT}, RequestFault.TIME_LIMIT, Outcome.UNFINISHED),
        ([b"{"], {}, RequestFault.MALFORMED, Outcome.FAILED),
        ([b'{"data": []}'], {"embeds": True}, RequestFault.EMPTY, Outcome.FAILED),
    ],
)
def test_incomplete_answers_have_their_fault_and_outcome(pieces, options, fault, outcome):
    answer = read(*pieces, **options)
    assert (answer.fault, answer.outcome) == (fault, outcome)


@pytest.mark.parametrize(
    "fault",
    [RequestFault.CUT, RequestFault.RESET, RequestFault.STALLED, RequestFault.TIME_LIMIT],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_answer_that_said_its_end_is_whole_however_its_connection_ends(fault, chunked):
    pieces = [event(" a"), event(" b", finish="length"), DONE]
    if chunked:
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]  # and no last chunk
    answer = read(*pieces, fault=fault, chunked=chunked)
    assert (answer.outcome, answer.fault, answer.detail) == (
        Outcome.FINISHED,
        RequestFault.NONE,
        "",
    )
    assert list(answer.token_s) == [1, 2]
    assert read(*pieces[:-1], fault=fault, chunked=chunked).fault is fault


def test_whole_answer_at_the_end_of_its_stream_is_no_token():
    """As MiniMax repeats it: in place of the last delta, with the usage."""
    last = {"index": 0, "finish_reason": "stop", "message": {"content": " a b c"}}
    pieces = [delta(content=" a"), delta(content=" b"), delta(content=" c")]
    end = b"data: " + json.dumps({"choices": [last], "usage": usage(3)}).encode() + b"\n\n"
    named = b'{"id": "x", "created": 1, '  # so that the second answer has the shapes of the first
    pieces = [piece.replace(b"{", named, 1) for piece in (*pieces, end)]
    for _ in range(2):
        answer = read_answer(raw(*pieces, DONE), keep_text=True)
        assert list(answer.token_s) == [1, 2, 3]
        assert (answer.text, answer.finish, answer.refuted) == (" a b c", "stop", False)
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, DONE, b"")]
        assert list(read(*chunks, chunked=True).token_s) == [1, 2, 3]


def message(text, finish=None, **more):
    choice = {"index": 0, "finish_reason": finish, "message": {"content": text}, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    "last",
    [
        [message(" a"), message(" b"), message(" c", "stop")],  # messages in place of deltas
        [
            delta(content=" a"),
            delta(content=" b"),
            message(" a b c", "stop", delta={"content": " c"}),
        ],
        [delta(role="assistant"), message(" a b c", "stop")],  # what the stream had not yet
    ],
)
def test_message_that_repeats_nothing_is_tokens(last):
    answer = read_answer(raw(*last, DONE), keep_text=True)
    assert (answer.text, answer.outcome) == (" a b c", Outcome.FINISHED)


def test_characters_cut_between_two_events_are_tokens():
    cut = [event("X").replace(b"X", half) for half in (b"\xf0\x9f", b"\x98\x80")]
    answer = read(*cut, event(" b", finish="stop"), DONE)
    assert (answer.outcome, list(answer.token_s)) == (Outcome.FINISHED, [1, 2, 3])


def test_event_without_data_is_none():
    answer = read(b"data:\n\n", event(" a"), b"data: \n\n", event(" b", finish="stop"), DONE)
    assert (answer.outcome, list(answer.token_s)) == (Outcome.FINISHED, [2, 4])


def test_stop_reason_of_a_policy_gives_rejected_or_dropped():
    end = event("", finish="abort", stop_reason="slo_bench: rejected")
    assert read(end, DONE).outcome is Outcome.REJECTED
    end = event("", finish="abort", stop_reason="slo_bench: dropped")
    assert read(event(" a"), end, DONE).outcome is Outcome.DROPPED


@pytest.mark.parametrize(
    ("says", "outcome"),
    [("rejected", Outcome.REJECTED), ("dropped", Outcome.DROPPED)],
)
def test_error_of_a_policy_gives_rejected_or_dropped(says, outcome):
    message = f"slo_bench: {says} by the policy"
    body = {"object": "error", "message": message, "type": "ServiceUnavailable", "code": 503}
    streamed = b"data: " + json.dumps({"error": body}).encode() + b"\n\n"
    whole = json.dumps(body).encode()
    for answer in (read(event(" a"), streamed, DONE), read(streamed), read(whole, status=503)):
        assert (answer.fault, answer.outcome, answer.detail) == (
            RequestFault.ABORTED,
            outcome,
            message,
        )


def test_status_503_of_a_busy_server_is_a_status_fault():
    body = json.dumps({"message": "queue full, not slo_bench: dropped", "code": 503}).encode()
    answer = read(body, status=503)
    assert (answer.fault, answer.outcome) == (RequestFault.STATUS, Outcome.REJECTED)
    assert answer.detail.startswith("503: queue full")


def test_answer_that_is_not_streamed_has_one_time():
    choice = {"text": "a b", "finish_reason": "length"}
    body = json.dumps({"choices": [choice], "usage": usage(2)}).encode()
    answer = read(body[:9], body[9:])
    assert (answer.outcome, list(answer.token_s)) == (Outcome.FINISHED, [2, 2])
    embedding = json.dumps({"data": [{"embedding": [0.0]}], "usage": {"prompt_tokens": 4}})
    answer = read(embedding.encode(), embeds=True)
    assert (answer.outcome, answer.prompt_tokens) == (Outcome.FINISHED, 4)


@pytest.mark.slow
@given(st.text(max_size=8).map(lambda t: t or "x"), st.data())
def test_stream_cut_anywhere_gives_the_same_tokens(text, data):
    events = [event(text), event(text), event(" z", finish="length"), event(usage=usage(3)), DONE]
    stream = b"".join(events)
    ends = data.draw(st.lists(st.integers(1, len(stream) - 1), unique=True).map(sorted))
    pieces = [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]
    answer = read(*pieces)
    assert answer.outcome is Outcome.FINISHED
    last = [sum(len(e) for e in events[: k + 1]) - 2 for k in range(3)]  # bytes, the newlines aside
    expected = [1 + sum(end < position for end in ends) for position in last]
    assert list(answer.token_s) == expected


TEXT = st.sampled_from(["", " a", " bc", '"', "\\", "\n", "é", "\ud83d", '"text":""', "event:"])
IDS = st.sampled_from([None, [5], [12], [0], [3, 4], []])
COUNT = st.sampled_from([event("", usage=usage(tokens)) for tokens in (0, 3, 30)])
LIKE = st.builds(lambda t, i: event(t, **({} if i is None else {"token_ids": i})), TEXT, IDS)
ODD = st.sampled_from(
    [
        *(b": ping\n\n", b"data: {no\n\n", event(" u", usage=usage(1)), delta(content=" a")),
        *(event(" o", index=1), event(" a").replace(b"\n", b"\r\n"), b'data: {"x":"\n\n'),
        *(event(" a").replace(b" a", b"\xff"), event(" a").replace(b" a", b"\t")),
        *(delta(reasoning="r"), delta(content="", reasoning_content="c"), b"event: error\n\n"),
        *(event(" a", token_ids=[7]).replace(b"7", b"07"), event(" a")[:-1], b"id: 1\n" + DONE),
    ]
)


def of_answer(name, events):
    """The events with the id and time of an answer."""
    opening = b'"id":"%b","object":"text_completion","created":%d,' % (name, len(name))
    return [event.replace(b'"id":"x",', opening) for event in events]


@st.composite
def streams(draw):
    """Events, most of which have one shape, and perhaps an id and a time as other answers have."""
    events = draw(st.lists(LIKE, max_size=12)) + draw(st.lists(ODD, max_size=1))
    events += draw(st.lists(LIKE, max_size=6)) + draw(st.lists(ODD, max_size=3))
    events = [*events, event(" z", finish="length"), *draw(st.lists(COUNT, max_size=1)), DONE]
    line_end = draw(st.sampled_from([b"\n", b"\r\n"]))
    events = [event.replace(b"\r\n", b"\n").replace(b"\n", line_end) for event in events]
    name = draw(st.sampled_from([None, b"cmpl-1", b"cmpl-22", b"", b"\\u0041", b"\xff", b'"']))
    return events if name is None else of_answer(name, events)


def torn(stream, ends):
    return [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]


def cuts(stream):
    return st.lists(st.integers(1, len(stream) - 1), unique=True, max_size=12).map(sorted)


def read_as_json(raw, keep_text):
    """Take chunks apart, and read without shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers.Shape, "of", lambda event, data_at: None)
        patch.setattr(answers._Reader, "read_chunks", lambda self: False)
        patch.setattr(answers, "without_names", lambda data: None)
        return read_answer(raw, keep_text=keep_text)


@pytest.mark.parametrize("keep_text", [False, True])
@given(streams(), st.data())
def test_events_read_by_shape_equal_events_read_as_json(keep_text, events, data):
    """Events of one shape are not parsed; what they say is the same."""
    stream = b"".join(events)
    pieces = torn(stream, data.draw(cuts(stream)))
    answer = read_answer(raw(*pieces), keep_text=keep_text)
    assert answer == read_as_json(raw(*pieces), keep_text)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_event_has_the_time_of_its_data_and_not_of_the_empty_line_after_it(line_end):
    events = [event(text).replace(b"\n", line_end) for text in (" a", " b", " c")]
    stream = b"".join([*events, event(" z", finish="length"), DONE])
    for position in range(1, len(stream)):
        answer = raw(*torn(stream, [position]))
        assert read_answer(answer) == read_as_json(answer, False)


def chunk(body):
    return b"%x\r\n%b\r\n" % (len(body), body)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_chunked_body_cut_anywhere_is_decoded(bodies, data):
    stream = b"".join(map(chunk, bodies)) + b"0\r\n\r\n"
    ends = data.draw(st.lists(st.integers(1, len(stream) - 1), unique=True).map(sorted))
    reads = [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]
    stamps = array("d", range(len(reads)))
    body = unchunk(reads, stamps)
    assert body.complete
    assert body.pieces == bodies
    assert list(body.stamps) == sorted(body.stamps)
    part = unchunk(reads[:-1], stamps)
    assert b"".join(bodies).startswith(b"".join(part.pieces))
    if len(reads[-1]) > 1 or not reads[:-1]:
        assert not part.complete


@pytest.mark.parametrize("keep_text", [False, True])
@pytest.mark.parametrize("whole_events", [False, True])
@given(streams(), st.data())
def test_chunked_answer_equals_the_answer_of_its_body(keep_text, whole_events, events, data):
    bodies = events if whole_events else torn(stream := b"".join(events), data.draw(cuts(stream)))
    chunks = [*map(chunk, bodies), b"0\r\n\r\n"]
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(chunks)))
        chunks.insert(
            position, data.draw(st.sampled_from([b"x", b"0\r\n\r\n", b"5;a\r\nhello\r\n"]))
        )
    stream = b"".join(chunks)
    reads = chunks if data.draw(st.booleans()) else torn(stream, data.draw(cuts(stream)))
    response = raw(*reads, chunked=True)
    assert read_answer(response, keep_text=keep_text) == read_as_json(response, keep_text)


def test_most_chunks_of_a_stream_are_not_parsed():
    texts = [" a", "é", '"', "\n", " long"] * 40
    events = [event(text, token_ids=[k % 50]) for k, text in enumerate(texts)]
    chunks = [*map(chunk, [*events, event("", finish="stop"), DONE]), b"0\r\n\r\n"]
    chunks[-2:] = [b"".join(chunks[-2:])]
    with pytest.MonkeyPatch.context() as patch:
        parsed = []
        patch.setattr(answers, "_parsed", lambda data: parsed.append(data) or json.loads(data))
        answer = read_answer(raw(*chunks, chunked=True), keep_text=True)
    assert len(parsed) == 2
    assert (answer.text, list(answer.token_s)) == ("".join(texts), list(range(1, 201)))
    assert answer.token_ids == [k % 50 for k in range(200)]


@pytest.mark.parametrize("keep_text", [False, True])
def test_events_of_a_second_answer_are_read_as_those_of_the_first(keep_text):
    events = [
        *(delta(reasoning=text).replace(b"{", b'{"id":"x",', 1) for text in (" r", " s")),
        *(delta(content=text).replace(b"{", b'{"id":"x",', 1) for text in (" b", " c")),
        *(event(usage=usage(9, completion_tokens_details={"reasoning_tokens": 5})), DONE),
    ]
    first, second = (
        raw(*map(chunk, of_answer(name, events)), b"0\r\n\r\n", chunked=True)
        for name in (b"cmpl-1", b"cmpl-22")
    )
    expected = read_as_json(second, keep_text)
    read_answer(first, keep_text=keep_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_parsed", lambda data: pytest.fail(f"{data} is parsed"))
        assert read_answer(second, keep_text=keep_text) == expected


@pytest.mark.parametrize("chunked", [False, True])
def test_tokens_of_three_choices_in_turn_belong_to_their_choice(chunked):
    """After so many events unlike each other no more shapes are made of them."""
    events = [event(f" {index}", index=index) for _ in range(9) for index in range(3)] + [DONE]
    pieces = [*map(chunk, events), b"0\r\n\r\n"] if chunked else events
    answer = read_answer(raw(*pieces, chunked=chunked))
    assert [list(sequence) for sequence in answer.sequences] == [
        list(range(1 + index, 28, 3)) for index in range(3)
    ]


def test_malformed_chunk_is_a_problem():
    body = unchunk([b"3\r\nabc\r\nxyz\r\n"], array("d", [0.0]))
    assert body.pieces == [b"abc"]
    assert "xyz" in body.problem


@pytest.mark.parametrize(
    "counted",
    [
        [event(" a"), event(" b", finish="stop"), event(usage=usage(4))],
        [event(" a", usage=usage(1)), event(" bcd", finish="stop", usage=usage(4))],
        [event(" a"), *[event(" b", finish="stop")] * 3],
    ],
)
def test_more_tokens_than_asked_for_are_a_surplus(counted):
    answer = read(*counted, DONE, max_tokens=3)
    assert (answer.outcome, answer.surplus, len(answer.token_s)) == (Outcome.FINISHED, True, 4)
    assert not read(*counted, DONE, max_tokens=4).surplus


def test_usage_that_no_context_holds_is_malformed():
    answer = read(event(" a"), event(" b", finish="stop"), event(usage=usage(1 << 40)), DONE)
    assert (answer.fault, answer.outcome) == (RequestFault.MALFORMED, Outcome.FAILED)
    assert answer.detail == "usage of 1,099,511,627,776 tokens, more than any context holds"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("order", [0, 1])
def test_error_event_ends_the_answer(end, order):
    lines = [b"event: error", b'data: {"message": "out of memory"}']
    failed = end.join(lines if order == 0 else reversed(lines)) + end + end
    whole = event(" a").replace(b"\n", end), failed, DONE.replace(b"\n", end)
    answer = read(*whole)
    assert (answer.fault, answer.detail) == (RequestFault.ERROR_EVENT, "out of memory")
    assert list(answer.token_s) == [1]
    named = event(" a", finish="stop").replace(b"data:", b"event: message\ndata:")
    assert read(named, DONE).outcome is Outcome.FINISHED


def test_comment_or_other_field_of_a_stream_is_no_event():
    comment = b": " + event(" not a token")
    answer = read(comment, event(" a", finish="stop"), b"id: " + event(" nor this"), DONE)
    assert list(answer.token_s) == [2]
    assert answer.outcome is Outcome.FINISHED
