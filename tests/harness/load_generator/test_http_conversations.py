"""Follow-ups hold what the server answered: bodies as a recording server receives them."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import Api, Endpoint, HttpOptions, PromptFormat
from slo_bench.harness.load_generator.http.answers import CompletionResult
from slo_bench.harness.load_generator.http.conversations import (
    Conversations,
    answers_held,
    contexts_of,
)
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.http.wire_requests import BodyMaker
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.mock import MockConfig
from slo_bench.workloads.arrivals import Poisson
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.lengths import Fixed, pair
from slo_bench.workloads.prefixes import SessionBlocks
from slo_bench.workloads.request import RequestType
from slo_bench.workloads.sessions import Volume, parse_agents, parse_sessions
from slo_bench.workloads.streams import Streams
from slo_bench.workloads.workload import Workload

LENIENT = {"send_delay_limit_s": 60.0, "rate_limit_share": 1.0}
PIECES = ('an "', "é", "\ud83d", "\ude00", "\n", " end")  # halves of a character, as streams have


def answer_of(row, tokens):
    """Token ids that no other row has."""
    return [100_000 + 1000 * row + k for k in range(tokens)]


@contextmanager
def recording(*, fails=(), with_ids=True, reasons=False):
    """A server that keeps the bodies it gets by row; all answers differ."""
    bodies = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            row = int(self.headers["x-request-id"].removeprefix("slo-bench-"))
            bodies[row] = body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if row in fails:
                self.send_error(500)
                return
            events = []
            for k in range(body["max_tokens"]):
                text = f"{row}:" if k == 0 else PIECES[(k - 1) % len(PIECES)]
                if "messages" in body:
                    thought = reasons and k < 2
                    choice = {"delta": {"reasoning_content" if thought else "content": text}}
                else:
                    choice = {"text": text}
                if with_ids and body.get("return_token_ids"):
                    choice["token_ids"] = [answer_of(row, k + 1)[-1]]
                events.append({"choices": [choice]})
            size = len(json.dumps(body))
            usage = {"prompt_tokens": size, "completion_tokens": body["max_tokens"]}
            events.append({"choices": [], "usage": usage})
            stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            data = f"{stream}data: [DONE]\n\n".encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Endpoint.parse(f"http://127.0.0.1:{server.server_port}"), bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sent(workload, **options):
    server = {
        name: options.pop(name) for name in ("fails", "with_ids", "reasons") if name in options
    }
    with recording(**server) as (endpoint, bodies):
        measurement = measure(
            workload, [endpoint], HttpOptions(**LENIENT, **{"processes": 1, **options})
        )
    return measurement, bodies


def sessions(count=1, turns=3):
    """Prompts of 20 tokens more a turn and answers of 8; rows turn by turn."""
    n, each = count * turns, 28
    session = np.tile(np.arange(count), turns)
    turn = np.repeat(np.arange(turns), count)
    prompt = 20 + each * turn
    return Workload(
        np.zeros(n),
        prompt,
        np.full(n, 8),
        session=session,
        follows=np.where(turn, np.arange(n) - count, -1),
        prefix_blocks=SessionBlocks.of(session, prompt + 8, 0, 16),
    )


def text_of(row, tokens):
    text = "".join((f"{row}:", *(PIECES[k % len(PIECES)] for k in range(tokens - 1))))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_follow_up_prompt_has_the_token_ids_of_the_answers():
    load = sessions()
    measurement, bodies = sent(load)
    prompts = [BodyMaker(load, HttpOptions()).body(load[row])["prompt"] for row in range(3)]
    assert bodies[0]["prompt"] == prompts[0]
    assert bodies[1]["prompt"] == prompts[0] + answer_of(0, 8) + prompts[1][28:]
    assert bodies[2]["prompt"] == bodies[1]["prompt"] + answer_of(1, 8) + prompts[2][56:]
    assert [len(bodies[row]["prompt"]) for row in range(3)] == load.prompt_tokens.tolist()
    # The record holds what the server counted.
    assert measurement.columns.prompt_tokens.tolist() == [
        len(json.dumps(bodies[row])) for row in range(3)
    ]


def test_chat_follow_up_has_a_message_for_each_turn():
    _, bodies = sent(sessions(), api=Api.CHAT)
    first, second, third = (bodies[row]["messages"] for row in range(3))
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]
    assert second[0] == first[0]
    assert second[1] == {"role": "assistant", "content": text_of(0, 8)}
    assert third[:3] == second
    assert third[3]["content"] == text_of(1, 8)
    assert len(third[4]["content"].split()) == 20
    assert "return_token_ids" not in bodies[0]


def test_reasoning_text_is_left_out_of_later_messages():
    _, bodies = sent(sessions(turns=2), api=Api.CHAT, reasons=True)
    assert bodies[1]["messages"][1]["content"] == text_of(0, 8).removeprefix('0:an "')


def test_text_follow_up_contains_the_earlier_text():
    _, bodies = sent(sessions(turns=2), prompt_format=PromptFormat.TEXT)
    assert "return_token_ids" not in bodies[0]
    assert bodies[1]["prompt"].startswith(bodies[0]["prompt"] + text_of(0, 8) + " ")
    assert len(bodies[1]["prompt"].removeprefix(bodies[0]["prompt"] + text_of(0, 8)).split()) == 20


def test_shorter_answer_gives_a_shorter_follow_up_prompt():
    """`max_tokens` of the body is 5: the prompt holds 5 tokens of an answer, not 8."""
    load = sessions(turns=2)
    _, bodies = sent(load, body={"max_tokens": 5})
    assert bodies[1]["prompt"][20:-20] == answer_of(0, 5)


def test_joined_prompt_contains_answers_of_parallel_sub_agents():
    """An agent, two sub-agents with two steps each, and the agent's next step, which holds its own
    answer and theirs.
    """
    parent, left, right = range(0, 10), range(100, 110), range(200, 210)
    load = Workload(
        np.zeros(6),
        np.array([32, 20, 20, 48, 48, 32 + 8 + 16 + 4]),
        np.full(6, 8),
        session=np.zeros(6, dtype=np.int64),
        class_index=np.array([0, 1, 1, 1, 1, 0]),
        class_names=("agent", "subagent"),
        follows=np.array([-1, 0, 0, 1, 2, 0]),
        joins=[(), (), (), (), (), (3, 4)],
        prefix_blocks=[
            tuple(hashes[:n])
            for hashes, n in zip(
                (parent, left, right, left, right, parent), (2, 1, 1, 3, 3, 3), strict=True
            )
        ],
    )
    assert contexts_of(load, HttpOptions()).tolist() == [-1, -1, -1, 1, 2, 0]
    _, bodies = sent(load)
    ids = {row: body["prompt"] for row, body in bodies.items()}
    for row, before in ((3, 1), (4, 2)):
        assert ids[row][:28] == ids[before] + answer_of(before, 8)
    assert ids[5][:-4] == ids[0] + answer_of(0, 8) + answer_of(3, 8) + answer_of(4, 8)
    assert [len(ids[row]) for row in range(6)] == load.prompt_tokens.tolist()
    _, bodies = sent(load, api=Api.CHAT)
    *context, message = bodies[5]["messages"]
    assert context == [*bodies[0]["messages"], {"role": "assistant", "content": text_of(0, 8)}]
    assert message["content"].startswith(f"{text_of(3, 8)}\n{text_of(4, 8)}\n")


def test_reasoning_tokens_are_cut_from_follow_up_token_ids():
    """The next prompt has place for 4 of 8 tokens and a message of one: the answer's end."""
    load = Workload(np.zeros(2), np.array([16, 21]), np.full(2, 8), follows=np.array([-1, 0]))
    _, bodies = sent(load)
    assert bodies[1]["prompt"][16:-1] == answer_of(0, 8)[4:]


def test_failed_answer_ends_the_session():
    measurement, bodies = sent(sessions(count=2), fails={2})
    assert sorted(bodies) == [0, 1, 2, 3, 5]
    assert measurement.columns.outcome[[2, 4]].tolist() == [Outcome.FAILED, Outcome.CANCELLED]
    assert bodies[5]["prompt"][: 48 + 8] == bodies[3]["prompt"] + answer_of(3, 8)


def joined(**columns):
    """A request, two that come after it, and one that continues it and joins both."""
    return Workload(
        np.zeros(4),
        np.array([16, 8, 8, 40]),
        np.full(4, 4),
        follows=np.array([-1, 0, 0, 0]),
        joins=[(), (), (), (1, 2)],
        **columns,
    )


def finished(**more):
    return CompletionResult(Outcome.FINISHED, RequestFault.NONE, "", **more)


def test_awaited_embedding_adds_no_answer_to_the_prompt():
    kinds = np.array([RequestType.GENERATE, RequestType.EMBED, *[RequestType.GENERATE] * 2])
    assert list(answers_held(joined(request_type=kinds), 3)) == [(0, 4), (2, 4)]


def test_answers_are_held_as_long_as_a_later_prompt_may_hold_them():
    load, options = joined(), HttpOptions()
    conversations = Conversations(load, contexts_of(load, options), options)
    answer = finished(content="x", token_ids=[1])
    conversations.ended(0, answer)
    conversations.ended(1, answer)
    assert [conversations.needs(row) for row in range(4)] == [True, True, True, False]
    conversations.ended(2, None)  # it failed, so that the last one is never sent
    conversations.ended(3, None)
    assert not any(conversations.needs(row) for row in range(4))


def test_empty_answer_is_held_as_none():
    load, options = joined(), HttpOptions()
    conversations = Conversations(load, contexts_of(load, options), options)
    conversations.ended(0, finished())
    with pytest.raises(SloBenchError, match="does not return their token ids"):
        conversations.ended(1, finished(content="x"))


@pytest.mark.slow
def test_conversations_work_over_several_processes():
    load = sessions(count=5)
    _, bodies = sent(load, processes=2)
    for row in range(5, 15):
        before = bodies[row - 5]["prompt"]
        assert bodies[row]["prompt"][: len(before) + 8] == before + answer_of(row - 5, 8)


def test_server_without_token_ids_is_refused_for_token_prompts():
    with pytest.raises(SloBenchError, match="--prompt-format text, --api chat"):
        sent(sessions(turns=2), with_ids=False)
    sent(sessions(turns=2), with_ids=False, prompt_format=PromptFormat.TEXT)


def test_requests_without_context_are_sent_as_written(workload):
    """Also those that follow others without their context."""
    load = workload(4, follows=np.array([-1, 0, -1, 2]))
    assert not contexts_of(load, HttpOptions())
    assert not contexts_of(workload(4), HttpOptions())
    _, bodies = sent(load)
    assert bodies == {row: BodyMaker(load, HttpOptions()).body(load[row]) for row in range(4)}


@pytest.mark.parametrize(
    "columns", [{"texts": ["a", "b", "c"]}, {"bodies": [None, {"messages": []}, None]}]
)
def test_workload_with_texts_or_messages_has_no_contexts(columns):
    load = Workload(
        np.zeros(3), np.array([8, 20, 30]), np.full(3, 4), follows=np.array([-1, 0, 1]), **columns
    )
    assert not contexts_of(load, HttpOptions(api=Api.CHAT))


@pytest.mark.parametrize(
    "drawn",
    [
        parse_sessions("sessions(turns=fixed(3), think_s=0, system_prompt_tokens=32)"),
        parse_agents(
            "agents(steps=fixed(4), spawn=0.5, subagents=fixed(2), subagent_steps=fixed(2),"
            " tool_s=0, think_tokens=fixed(5))"
        ),
    ],
    ids=["sessions", "agents"],
)
def test_follow_up_prompts_keep_the_drawn_lengths(drawn, run):
    """Whatever is answered, prompts are as long as the simulation has them."""
    load = drawn.make(
        pair(Fixed(24), Fixed(6)),
        Poisson(),
        Streams(3),
        Volume(200.0, 40, None),
    )
    measurement, truths = run(load, MockConfig(ttft_s=0.0, itl_s=0.0))
    assert (measurement.columns.outcome == Outcome.FINISHED).all()
    assert [truths[row].prompt_tokens for row in range(len(load))] == load.prompt_tokens.tolist()
    held = [row for row, context in enumerate(contexts_of(load, HttpOptions())) if context >= 0]
    assert len(held) > 10
