"""Streams and answers of `/v1/responses` and `/v1/messages`, with the values that are right."""

import json
from array import array

import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http.answers import Raw, read_answer
from slo_bench.harness.load_generator.http.faults import RequestFault


def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def read(*pieces, **options):
    """Each piece came a second after the one before."""
    times_s = array("d", range(1, len(pieces) + 1))
    lengths = array("I", map(len, pieces))
    raw = Raw(200, RequestFault.NONE, "", times_s, lengths, b"".join(pieces), False)
    return read_answer(raw, **options)


def messages_delta(**delta):
    return event("content_block_delta", index=0, delta=delta)


MESSAGES = (
    event(
        "message_start",
        message={"usage": {"input_tokens": 10, "cache_read_input_tokens": 4, "output_tokens": 1}},
    ),
    event("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""}),
    event("ping"),
    messages_delta(type="thinking_delta", thinking="hm"),
    messages_delta(type="signature_delta", signature="abc"),
    event("content_block_stop", index=0),
    messages_delta(type="text_delta", text="Hello"),
    messages_delta(type="text_delta", text=" world"),
    event("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 3}),
    event("message_stop"),
)


def test_stream_of_messages_has_a_token_for_each_text_and_thought():
    answer = read(*MESSAGES, keep_text=True)
    assert answer.outcome is Outcome.FINISHED
    assert list(answer.token_s) == [4, 7, 8]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (14, 3, 4)
    assert (answer.text, answer.content, answer.finish) == (
        "hmHello world",
        "Hello world",
        "length",
    )


def test_stream_of_messages_with_a_call_of_a_tool():
    answer = read(
        event("content_block_start", index=0, content_block={"type": "tool_use", "name": "f"}),
        messages_delta(type="input_json_delta", partial_json='{"a":'),
        messages_delta(type="input_json_delta", partial_json="1}"),
        event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 3}),
        event("message_stop"),
    )
    assert list(answer.token_s) == [1, 2, 3]
    assert answer.finish == "tool_calls"


def test_error_event_of_messages_is_a_refusal_if_it_says_overloaded():
    answer = read(
        MESSAGES[0], event("error", error={"type": "overloaded_error", "message": "Overloaded"})
    )
    assert (answer.fault, answer.outcome) == (RequestFault.ERROR_EVENT, Outcome.REJECTED)
    assert answer.detail == "Overloaded"


def test_stream_of_messages_that_ends_early_is_cut():
    assert read(*MESSAGES[:-2]).fault is RequestFault.CUT


def responses_end(kind="completed", **fields):
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    response = {"status": kind, "error": None, "usage": usage, **fields}
    return event(f"response.{kind}", response=response)


RESPONSES = (
    event("response.created", response={"status": "in_progress", "error": None, "usage": None}),
    event("response.output_item.added", item={"type": "reasoning"}),
    event("response.reasoning_text.delta", delta="hm"),
    event("response.output_text.delta", delta="Hello"),
    event("response.output_text.delta", delta=" world"),
    event("response.output_text.done", text="Hello world"),
)


@pytest.mark.parametrize(("kind", "finish"), [("completed", "stop"), ("incomplete", "length")])
def test_stream_of_responses_has_a_token_for_each_delta(kind, finish):
    answer = read(*RESPONSES, responses_end(kind), keep_text=True)
    assert answer.outcome is Outcome.FINISHED
    assert list(answer.token_s) == [3, 4, 5]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 3, 2)
    assert (answer.text, answer.content, answer.finish) == ("hmHello world", "Hello world", finish)


def test_failed_response_is_an_error_with_its_message():
    error = {"code": "server_error", "message": "it broke"}
    answer = read(*RESPONSES[:3], responses_end("failed", error=error))
    assert (answer.fault, answer.detail) == (RequestFault.ERROR_EVENT, "it broke")


def test_stream_of_responses_that_ends_early_is_cut():
    assert read(*RESPONSES).fault is RequestFault.CUT


WHOLE = {
    "messages": {
        "type": "message",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 9, "output_tokens": 3},
    },
    "responses": {
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
        ],
        "usage": {"input_tokens": 9, "output_tokens": 3},
    },
}


@pytest.mark.parametrize("api", WHOLE)
def test_whole_answer_of_another_api_has_its_text_and_usage(api):
    answer = read(json.dumps(WHOLE[api]).encode(), keep_text=True)
    assert answer.outcome is Outcome.FINISHED
    assert (answer.prompt_tokens, answer.completion_tokens) == (9, 3)
    assert (answer.text, answer.content, answer.finish) == ("hmHello", "Hello", "stop")
