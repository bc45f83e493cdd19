"""Answers that are none of the API are told as what they are."""

import gzip
import json
import zlib
from array import array

import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http.answers import Raw, read_answer
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.http.odd_answers import message_of

PAGE = b"<!doctype html><html><head><title>Sign in</title><style>a{}</style></head><p>x</html>"
EVENTS = (
    b'data: {"choices":[{"text":" a"}]}\n\n',
    (b'data: {"choices":[{"text":" b","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'),
)


def read(*pieces, status=200, **headers):
    """Each piece came a second after the one before."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    times_s = array("d", range(1, len(pieces) + 1))
    lengths = array("I", map(len, pieces))
    body = b"".join(pieces)
    return read_answer(
        Raw(status, RequestFault.NONE, "", times_s, lengths, body, False, headers=names)
    )


@pytest.mark.parametrize(
    ("body", "headers"), [(PAGE, {}), (b"<p>Sign in", {"content_type": "text/html; charset=x"})]
)
def test_page_with_status_200_is_told_as_a_page_with_its_title(body, headers):
    answer = read(body, **headers)
    assert answer.fault is RequestFault.MALFORMED
    assert answer.detail == "a page (text/html) came in place of an answer: Sign in"


def test_text_with_status_200_is_told_by_its_kind():
    answer = read(b"upstream is starting", content_type="text/plain")
    assert answer.detail == "text/plain came in place of an answer: upstream is starting"


def test_status_200_without_an_answer_says_what_came():
    assert read(b"").detail == "status 200 with an empty body"
    listed = read(b"[]", content_type="application/json")
    assert listed.detail == "application/json came in place of an answer: []"
    cut = read(b"data: {", content_type="application/json")
    assert cut.fault is RequestFault.CUT


def test_lines_that_end_with_a_carriage_return_alone_are_lines():
    answer = read(*(event.replace(b"\n", b"\r") for event in EVENTS))
    assert (answer.outcome, list(answer.token_s)) == (Outcome.FINISHED, [1, 2])


@pytest.mark.parametrize(
    ("coding", "window_bits"), [("gzip", 31), ("deflate", 15), ("deflate", -15)]
)
def test_compressed_stream_is_read_with_the_times_of_its_pieces(coding, window_bits):
    compress = zlib.compressobj(wbits=window_bits)
    pieces = [compress.compress(part) + compress.flush(zlib.Z_SYNC_FLUSH) for part in EVENTS]
    answer = read(*pieces, compress.flush(), content_encoding=coding)
    assert answer.outcome is Outcome.FINISHED
    assert list(answer.token_s) == [1, 2]


@pytest.mark.parametrize(("coding", "problem"), [("br", "compressed (br)"), ("gzip", "is no gzip")])
def test_body_that_cannot_be_decompressed_says_so(coding, problem):
    answer = read(b"\x1babc", content_encoding=coding)
    assert answer.fault is RequestFault.MALFORMED
    assert problem in answer.detail


def test_compressed_refusal_has_its_message():
    body = gzip.compress(json.dumps({"error": {"message": "too long"}}).encode())
    assert read(body, status=413, content_encoding="gzip").detail == "413: too long"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"message": "c"}, "c"),
        ({"detail": "d"}, "d"),
        (
            {"detail": [{"loc": ["body", "max_tokens"], "msg": "too many"}]},
            "body.max_tokens: too many",
        ),
        ({"errors": [{"message": "e"}]}, "e"),
        ([{"error": {"message": "f"}}], "f"),
        ({"title": "g", "status": 400}, "g"),
        ({"error": {}}, "{'error': {}}"),
        ("h", "h"),
    ],
)
def test_message_of_an_error_is_found_whatever_its_form(body, message):
    assert message_of(json.dumps(body).encode()) == message


def test_message_of_a_page_is_its_title_or_its_text():
    assert message_of(PAGE) == "Sign in"
    assert message_of(b"<body><h1>401 &amp; so</h1>x</body>") == "401 & so"
    assert message_of(b"<b>no</b> <i>way</i>") == "no way"
    assert message_of(b"plain") == "plain"


def test_refusal_says_when_to_come_again_and_where_to_go():
    refused = read(b'{"error":"busy"}', status=429, retry_after="20")
    assert refused.outcome is Outcome.REJECTED
    assert refused.detail == "429 (retry-after: 20 s): busy"
    moved = read(b"", status=307, location="https://h/v1/")
    assert moved.detail.startswith("307 (redirected to https://h/v1/; redirects are not followed")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ({"code": 429, "message": "m"}, Outcome.REJECTED),
        ({"code": "503", "message": "m"}, Outcome.REJECTED),
        ({"type": "rate_limit_error", "message": "m"}, Outcome.REJECTED),
        ({"code": 500, "message": "m"}, Outcome.FAILED),
        ({"message": "m"}, Outcome.FAILED),
    ],
)
def test_refusal_within_a_stream_is_rejected_as_one_with_a_status(error, outcome):
    answer = read(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    assert (answer.fault, answer.outcome) == (RequestFault.ERROR_EVENT, outcome)


def test_objects_on_lines_are_told_by_their_kind():
    answer = read(b'{"response":" a"}\n{"response":" b"}\n', content_type="application/x-ndjson")
    assert answer.fault is RequestFault.MALFORMED
    assert answer.detail.startswith("application/x-ndjson came in place of an answer: ")


def test_event_that_is_text_is_shown():
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: Internal Server Error\n\n'
    answer = read(body, content_type="text/event-stream")
    assert answer.fault is RequestFault.MALFORMED
    assert answer.detail == "an event is no JSON object: Internal Server Error"
