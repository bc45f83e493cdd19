import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.cli.options.names import names
from slo_bench.workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from slo_bench.workloads.readers.formats import FORMATS, Format, detect_format, read
from slo_bench.workloads.source import load_source

SHARED = Path(os.environ.get("SLO_BENCH_SHARED", Path(__file__).resolve().parents[3] / "shared"))

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_2 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
7.5,a1,3.2,ChatGPT,10,20,30,Conversation log
9.0,,1.0,ChatGPT,11,21,32,API log
"""
MOONCAKE = """\
{"timestamp": 27482, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 512, "output_length": 26, "hash_ids": [46]}
"""
BAILIAN = """\
{"chat_id": 1, "timestamp": 61.114, "input_length": 33, "output_length": 132, "type": "text",\
 "parent_chat_id": -1, "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 2, "timestamp": 62.5, "input_length": 40, "output_length": 10, "type": "search",\
 "parent_chat_id": 1, "turn": 2, "hash_ids": [1, 2, 9]}
"""
PLAIN = """arrival_s,prompt_tokens,output_tokens,class,ttft_slo_s,slo_met
1.5,10,20,chat,0.5,True
2.25,11,21,code,,False
"""


def stored(tmp_path, text, name="trace.csv", packed=False):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("text", "format_name", "arrival_s", "prompt", "output"),
    [
        (AZURE, "azure", [0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55]),
        (AZURE_2024, "azure", [0, 0.007405], [2162, 2399], [5, 6]),
        (BURSTGPT, "burstgpt", [0, 113], [472, 417], [18, 276]),
        (BURSTGPT_2, "burstgpt", [0, 1.5], [10, 11], [20, 21]),
        (MOONCAKE, "mooncake", [0, 3.053], [1025, 512], [52, 26]),
        (BAILIAN, "bailian", [0, 1.386], [33, 40], [132, 10]),
        (PLAIN, "csv", [0, 0.75], [10, 11], [20, 21]),
    ],
)
def test_trace_formats_are_recognised_and_begin_at_zero(
    tmp_path, text, format_name, arrival_s, prompt, output, packed
):
    path = stored(tmp_path, text, packed=packed)
    assert detect_format(path) == format_name
    trace = read(path)
    assert trace.has_arrivals
    np.testing.assert_allclose(trace.workload.arrival_s, arrival_s, atol=1e-9)
    assert trace.workload.prompt_tokens.tolist() == prompt
    assert trace.workload.output_tokens.tolist() == output


def test_burstgpt_leaves_failed_requests_out_with_a_note(tmp_path):
    trace = read(stored(tmp_path, BURSTGPT))
    assert trace.notes == (
        "1 of 3 requests with no output token left out",
        "not used: Total tokens",
    )
    assert [r.model for r in trace.workload] == ["ChatGPT", "GPT-4"]
    assert [r.class_name for r in trace.workload] == ["Conversation log"] * 2


def test_mooncake_keeps_hashes_of_full_blocks(tmp_path):
    workload = read(stored(tmp_path, MOONCAKE)).workload
    assert workload.prefix_block_size == 512
    assert list(workload.prefix_blocks) == [(46, 47), (46,)]


@pytest.mark.parametrize(
    ("begin", "step", "unit"),
    [(0, 500, "ms"), (1_700_000_000, 0.5, "s"), (1.7e12, 500, "ms"), (1.7e15, 5e5, "us")],
)
def test_times_of_mooncake_since_1970_have_the_unit_of_their_size(tmp_path, begin, step, unit):
    rows = (
        f'{{"timestamp": {begin + k * step}, "input_length": 9, "output_length": 1}}\n'
        for k in range(3)
    )
    trace = read(stored(tmp_path, "".join(rows)))
    assert trace.workload.arrival_s.tolist() == [0, 0.5, 1]
    assert trace.notes == (f"arrival_s is read from timestamp ({unit})",)


@pytest.mark.parametrize(("begin", "step_s"), [(1_000_000_123, 0.5), (1_400_000_000, 30)])
def test_slice_of_a_mooncake_trace_that_begins_after_eleven_days_is_in_ms(tmp_path, begin, step_s):
    rows = (
        f'{{"timestamp": {begin + k * 1000 * step_s}, "input_length": 9, "output_length": 1}}\n'
        for k in range(3)
    )
    trace = read(stored(tmp_path, "".join(rows)))
    assert trace.workload.arrival_s.tolist() == [0, step_s, 2 * step_s]


def test_mooncake_times_that_may_be_ms_or_seconds_are_refused_with_both_mends(tmp_path):
    rows = (
        f'{{"timestamp": {1_700_000_000 + 500 * k}, "input_length": 9, "output_length": 1}}\n'
        for k in range(3)
    )
    with pytest.raises(FileFormatError) as refusal:
        read(stored(tmp_path, "".join(rows)))
    # Packed files, too, and lines without a time.
    assert "for ms run gzip -dcf " in str(refusal.value)
    assert " | jq -c '(.timestamp | numbers) -= 1700000000' > trace.new" in str(refusal.value)
    assert " | jq -c '(.timestamp | numbers) *= 1000' > trace.new" in str(refusal.value)


def test_mooncake_times_since_1970_with_fractions_are_seconds(tmp_path):
    rows = (
        f'{{"timestamp": {1_700_000_000.25 + 2.5 * k}, "input_length": 9, "output_length": 1}}\n'
        for k in range(3)
    )
    assert read(stored(tmp_path, "".join(rows))).workload.arrival_s.tolist() == [0, 2.5, 5]


def test_what_metadata_holds_stands_back_behind_columns_of_their_own(tmp_path):
    usage = {"input_tokens": 9, "output_tokens": 2}
    within = {"arrival": 70, "input_tokens": 800, "cache_read_input_tokens": 5}
    both = [
        {"metadata": within | {"arrival": 7 * k}, "timestamp": k, "usage": usage} for k in (0, 1)
    ]
    trace = read(stored(tmp_path, "".join(f"{json.dumps(row)}\n" for row in both)))
    assert trace.workload.arrival_s.tolist() == [0, 1]
    assert trace.workload.prompt_tokens.tolist() == [9, 9]
    alone = [{"metadata": {"timestamp": 7 * k}, "usage": usage} for k in (0, 1)]
    trace = read(stored(tmp_path, "".join(f"{json.dumps(row)}\n" for row in alone)))
    assert trace.workload.arrival_s.tolist() == [0, 7]


def test_a_column_named_in_utc_stands_back_behind_one_that_is_not(tmp_path):
    text = "timestamp_utc,timestamp,input_tokens,output_tokens\n"
    text += "2026-01-01 00:00:00,0,9,1\n2026-01-01 00:00:00,0.5,9,1\n"
    assert read(stored(tmp_path, text)).workload.arrival_s.tolist() == [0, 0.5]


@pytest.mark.parametrize(
    "cells",
    [
        ("1.5e9", "1.500000001e9", "1.500000002e9"),  # all digits are there
        ("1.5e+18", "1.500000001e+18", "1.500000002e+18"),
        ("46037", "46038", "46039"),
        ("46037.5", "46038.5", "46039.5"),  # a request a second
        ("2026-01-31 12:00:00 UTC", "2026-01-31 12:00:01 UTC", "2026-01-31 12:00:02 UTC"),
    ],
)
def test_times_that_no_spreadsheet_has_changed_are_read(tmp_path, cells):
    text = "timestamp,ISL,osl\n" + "".join(f"{cell},9,1\n" for cell in cells)
    trace = read(stored(tmp_path, text))
    assert trace.workload.arrival_s.tolist() == [0, 1, 2]
    assert trace.workload.prompt_tokens.tolist() == [9, 9, 9]


@pytest.mark.parametrize(("step_s", "noted"), [(1e-4, True), (1000, True), (1, False)])
def test_a_rate_that_speaks_for_another_unit_is_noted(tmp_path, step_s, noted):
    text = H + "".join(f"{k * step_s},9,1\n" for k in range(9))
    notes = read(stored(tmp_path, text)).notes
    assert any("are the times in another unit?" in note for note in notes) == noted


@pytest.mark.parametrize("packed", [b"\x1f\x8bx", b"PAR1", "x".encode("utf-16"), b"BZh"])
def test_what_is_no_text_within_gzip_is_told_as_what_it_is(tmp_path, packed):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(packed))
    with pytest.raises(FileFormatError, match=r"within gzip; run gzip -dc .*trace\.csv\.gz > "):
        read(path)


def test_conversations_of_lmsys_and_wildchat_are_read_and_their_times_noted(tmp_path):
    turns = [{"role": "user", "content": "How are you"}, {"role": "assistant", "content": "Fine"}]
    line = json.dumps({"conversation": turns, "timestamp": "2023-04-09T00:02:53"})
    trace = read(stored(tmp_path, f"{line}\n{line}\n"))
    assert trace.workload.texts == ["How are you"] * 2
    assert "not used: timestamp" in trace.notes


def test_rows_of_commas_and_columns_without_a_name_are_left_out(tmp_path):
    text = ",arrival_s,prompt_tokens,output_tokens\n0,0,9,1\n1,1,8,2\n,,,\n\n"
    trace = read(stored(tmp_path, text))
    assert trace.workload.prompt_tokens.tolist() == [9, 8]
    assert trace.notes == ()


@pytest.mark.parametrize("size", [512, 64])
def test_hashes_of_full_blocks_alone_have_their_block_size(tmp_path, size):
    lengths = [int(1.2 * size), int(1.9 * size), size] + ([3 * size] if size == 64 else [])
    rows = (
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": [7] * (n // size)}
        for n in lengths
    )
    workload = read(stored(tmp_path, "".join(f"{json.dumps(row)}\n" for row in rows))).workload
    assert workload.prefix_block_size == size
    assert [len(blocks) for blocks in workload.prefix_blocks] == [n // size for n in lengths]


def test_requests_without_counts_are_left_out_with_a_note(tmp_path):
    text = "Timestamp (UTC),InputTokens,OutputTokens\n"
    text += "2026-01-01 00:00:00,9,1\n2026-01-01 00:00:01,9,\n2026-01-01 00:00:02,,\n"
    trace = read(stored(tmp_path, text + "2026-01-01 00:00:03,8,2\n"))
    assert trace.workload.arrival_s.tolist() == [0, 3]
    assert "2 of 4 requests with no output token left out" in trace.notes


def test_bailian_has_sixteen_token_blocks_and_types(tmp_path):
    workload = read(stored(tmp_path, BAILIAN)).workload
    assert workload.prefix_block_size == 16
    assert list(workload.prefix_blocks) == [(1, 2), (1, 2)]
    assert workload.class_names == ("text", "search")


def test_plain_csv_columns_are_read(tmp_path):
    text = (
        "arrival_s,prompt_tokens,output_tokens,max_output_tokens,model,session,follows,think_s,"
        "priority,tpot_slo_s,request_type,prefix_blocks,prefix_block_size,unknown\n"
        "0,8,2,100,a,3,-1,0,-2,0.1,0,0-1,4,x\n"
        "1,12,3,,b,3,0,2.5,7,,1,0-1 9,4,y\n"
    )
    first, second = read(stored(tmp_path, text)).workload
    assert first.max_output_tokens == 100
    assert second.max_output_tokens == 3
    assert (first.model, second.model) == ("a", "b")
    assert (second.session, second.follows, second.think_s) == (3, 0, 2.5)
    assert (first.priority, second.priority) == (-2, 7)
    assert (first.slo.tpot_s, second.slo.tpot_s) == (0.1, np.inf)
    assert second.prefix_blocks == (0, 1, 9)
    assert second.request_type == 1


def test_request_types_are_names_or_numbers(tmp_path):
    head = "arrival_s,prompt_tokens,output_tokens,request_type,num_inputs\n"
    rows = "0,8,2,generate,\n1,64,1,Embed,4\n2,8,2,,\n3,64,1,1,2\n"
    workload = read(stored(tmp_path, head + rows)).workload
    assert workload.request_type.tolist() == [0, 1, 0, 1]
    assert workload.num_inputs.tolist() == [1, 4, 1, 2]
    with pytest.raises(
        FileFormatError, match="request_type must be generate or embed but is 'rank'"
    ):
        read(stored(tmp_path, head + "0,8,2,rank,\n"))


def test_unsorted_rows_are_sorted_with_a_note(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens,follows\n9,1,1,-1\n5,2,1,-1\n9,3,1,1\n5,4,1,-1\n"
    trace = read(stored(tmp_path, text))
    assert trace.workload.prompt_tokens.tolist() == [2, 4, 1, 3]
    assert trace.workload.arrival_s.tolist() == [0, 0, 4, 4]
    assert trace.workload.follows.tolist() == [-1, -1, -1, 0]
    assert "sorted" in trace.notes[0]


def test_trace_of_lengths_has_no_arrivals(tmp_path):
    trace = read(stored(tmp_path, "prompt_tokens,output_tokens\n5,6\n"))
    assert not trace.has_arrivals
    jsonl = '{"prompt_tokens": 5, "output_tokens": 6}\n{"prompt_tokens": 5, "output_tokens": 0}\n'
    trace = read(stored(tmp_path, jsonl))
    assert not trace.has_arrivals
    assert trace.notes == ("1 of 2 requests with no output token left out",)


def test_sharegpt_takes_the_first_exchange(tmp_path):
    data = [
        {"conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "y" * 8}]},
        {"conversations": [{"from": "gpt", "value": "no question"}]},
        {"conversations": []},
        {
            "prompt_tokens": 7,
            "output_tokens": 70,
            "conversations": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
    ]
    path = stored(tmp_path, json.dumps(data), "s.json")
    assert detect_format(path) == "sharegpt"
    trace = read(path)
    assert trace.workload.prompt_tokens.tolist() == [3, 7]
    assert trace.workload.output_tokens.tolist() == [2, 70]
    assert trace.workload.texts == ["x" * 9, "q"]
    assert "2 of 4" in trace.notes[0]
    assert "four characters" in trace.notes[1]


def test_chats_are_read_in_every_form(tmp_path):
    """System turns go before the prompt; a chat that the assistant begins has no first prompt."""
    parts = [{"type": "text", "text": "What is 2 + 2?"}]
    chats = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "4"}]},
        {
            "conversations": [
                {"from": "system", "value": "Be short."},
                {"role": "user", "content": "Why?"},
                {"from": "assistant", "value": "So."},
            ]
        },
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
    ]
    texts = ["Hi", "What is 2 + 2?", "Be short.\nWhy?"]
    array = read(stored(tmp_path, json.dumps(chats), "chats.json"))
    one_a_line = read(stored(tmp_path, "".join(json.dumps(c) + "\n" for c in chats), "c.jsonl"))
    lists = [next(iter(chat.values())) for chat in chats]
    bare = read(stored(tmp_path, "".join(json.dumps(c) + "\n" for c in lists), "b.jsonl"))
    for trace in (array, one_a_line, bare):
        assert list(trace.workload.texts) == texts
        assert trace.notes[0] == "1 of 4 entries without a first prompt and answer left out"


def test_alpaca_joins_instruction_and_input(tmp_path):
    data = [{"instruction": "a" * 6, "input": "b" * 5, "output": "c" * 4}]
    path = stored(tmp_path, json.dumps(data, indent=1), "a.json")
    assert detect_format(path) == "sharegpt"  # an array; the reader tells them apart
    trace = read(path)
    assert trace.workload.prompt_tokens.tolist() == [3]
    assert trace.workload.texts == ["aaaaaa\nbbbbb"]


def test_custom_prompts_have_vllms_default_output_length(tmp_path):
    text = '{"prompt": "12345678", "output_tokens": 9}\n\n{"prompt": "1"}\n'
    path = stored(tmp_path, text, "d.jsonl")
    assert detect_format(path) == "custom"
    trace = read(path)
    assert trace.workload.prompt_tokens.tolist() == [2, 1]
    assert trace.workload.output_tokens.tolist() == [9, 256]
    assert any("256" in note for note in trace.notes)


def test_custom_prompts_have_counts_by_other_names(tmp_path):
    text = '{"prompt": "12345678", "prompt_tokens_count": 5, "output_len": 9}\n'
    trace = read(stored(tmp_path, text))
    assert trace.workload.prompt_tokens.tolist() == [5]
    assert trace.workload.output_tokens.tolist() == [9]
    assert trace.notes == (
        "prompt_tokens is read from prompt_tokens_count",
        "output_tokens is read from output_len",
    )


def batch_request(number: int, **body: object) -> str:
    """A line of OpenAI's batch API."""
    line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**line, "body": {"model": "m", **body}})


def test_requests_of_the_batch_api_keep_messages_and_fields(tmp_path):
    messages = [{"role": "system", "content": "1234"}, {"role": "user", "content": "1234567"}]
    requests = (
        batch_request(1, messages=messages, max_tokens=100, temperature=0.3),
        batch_request(2, messages=messages[1:], max_completion_tokens=50),
        batch_request(3, prompt="1234"),
        batch_request(4, input="an embedding"),
    )
    path = stored(tmp_path, "\n".join(requests), "d.jsonl")
    assert detect_format(path) == "batch"
    trace = read(path)
    assert trace.workload.prompt_tokens.tolist() == [3, 2, 1]
    assert trace.workload.output_tokens.tolist() == [100, 50, 256]
    assert trace.workload.texts == [None, None, "1234"]
    assert trace.workload.bodies is not None
    assert trace.workload.bodies[0] == {"messages": messages, "temperature": 0.3}
    assert "1 of 4 left out, as no chat and no completion of a text" in trace.notes
    assert "1 requests without max_tokens ask for 256" in trace.notes


def test_fields_of_batch_requests_that_are_null_are_as_if_not_there(tmp_path):
    request = batch_request(1, prompt="1234", messages=None, tools=None, max_tokens=9, stop=None)
    trace = read(stored(tmp_path, request))
    assert trace.workload.prompt_tokens.tolist() == [1]
    assert trace.workload.bodies is None


def test_what_is_not_sent_of_a_batch_request_is_told(tmp_path):
    chat = {"messages": [{"role": "user", "content": "1234"}], "max_tokens": 9}
    embedding = {"custom_id": "3", "url": "/v1/embeddings", "body": chat}
    requests = (
        batch_request(1, model="a", n=4, stream=True, **chat),
        batch_request(2, model="b", n=1, **chat),
        json.dumps({**embedding, "timestamp": 5}),
    )
    trace = read(stored(tmp_path, "\n".join(requests)))
    assert trace.workload.prompt_tokens.tolist() == [1, 1]
    assert "1 requests that ask for several answers (n) get one" in trace.notes
    assert "all are of one model, though they name 2" in trace.notes
    assert "1 of 3 left out, as no chat and no completion of a text" in trace.notes
    assert "not used: timestamp" in trace.notes


def test_a_batch_request_with_an_image_may_tell_its_tokens(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 9}
    request = {"custom_id": "1", "url": "/v1/chat/completions", "body": body}
    with pytest.raises(FileFormatError, match="give prompt_tokens"):
        read(stored(tmp_path, json.dumps(request)))
    trace = read(stored(tmp_path, json.dumps({**request, "prompt_tokens": 900})))
    assert trace.workload.prompt_tokens.tolist() == [900]
    with pytest.raises(FileFormatError, match="prompt_tokens must be a whole number"):
        read(stored(tmp_path, json.dumps({**request, "prompt_tokens": "900"})))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"custom_id": "1", "body": 3}', "body must be a JSON object"),
        (batch_request(1, prompt="a", max_tokens="9"), "max_tokens must be a whole number"),
        (batch_request(1, prompt="a", max_tokens=0), "max_tokens must be a whole number"),
        (batch_request(1, messages="a"), "messages must be a list"),
        (batch_request(1, input="a"), "no request has messages"),
    ],
)
def test_a_batch_request_that_cannot_be_read_is_told(tmp_path, line, problem):
    with pytest.raises(FileFormatError, match=problem):
        read(stored(tmp_path, line))


def test_prompts_with_completions_ask_for_as_much(tmp_path):
    text = '{"prompt": "abcd", "completion": "12345678"}\n{"prompt": "abcd", "response": "1"}\n'
    trace = read(stored(tmp_path, text))
    assert trace.workload.output_tokens.tolist() == [2, 1]
    assert trace.notes == ("token counts are approximate: four characters a token",)


def test_longbench_task_has_its_output_limit(tmp_path):
    text = '{"context": "cccc", "input": "qqq", "answers": ["aaaaa", "b"], "length": 2}\n'
    path = stored(tmp_path, text, "qasper.jsonl")
    assert detect_format(path) == "longbench"
    trace = read(path)
    assert not trace.has_arrivals
    assert trace.workload.prompt_tokens.tolist() == [2]
    assert trace.workload.output_tokens.tolist() == [2]


H = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (H + "0,1,1\n1,two,1\n", "prompt_tokens must be a number but is 'two' .*line 3"),
        (H + "0,1,1\n1,2\n", "2 cells, the header 3 .*line 3"),
        (H + "0,1,1\n-1,1,1\n", "arrival_s must be a number from 0 on but is '-1' .*line 3"),
        (H + "nan,1,1\n", "arrival_s .*'nan' .*line 2"),
        (H + "inf,1,1\n", "finite .*line 2"),
        (H + "0,0,1\n", "must have a prompt token at least .*line 2"),
        (H + "0,1,0\n", "no request in the trace has an output token .*line 2"),
        (H + "0,1.5,1\n", "whole number but is 1.5 .*line 2"),
        (H + "0,,1\n", "must have a prompt token at least .*line 2"),
        (H, "empty"),
        ("", "empty"),
        ("\n\n", "empty"),
        ("a,b\n1,2\n", "lacks prompt_tokens and output_tokens"),
        (
            "arrival_s,prompt_tokens, prompt_tokens,output_tokens\n0,1,9,1\n",
            "'prompt_tokens' twice .*line 1",
        ),
        (H + '0,"1,1\n', "CSV"),
        (AZURE + "yesterday,1,1\n", "date and time .UTC. but is 'yesterday' .*line 5"),
        (AZURE + ",1,1\n", "date and time .*line 5"),
        (AZURE + "2023-11-16 18:15:46,-1,1\n", "ContextTokens .*line 5"),
        (AZURE + "2023-11-16 18:15:46,0,1\n", "prompt token at least .*line 5"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,5,0\n", "no request"),
        (MOONCAKE + "{broken\n", "JSON.*line 3"),
        (MOONCAKE + "[1]\n", "JSON object.*line 3"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "lacks 'output_length' .*line 3"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": null, "output_length": 1}\n',
            "number from 0 on but is None .*line 3",
        ),
        (
            '{"timestamp": 1, "input_length": 100, "output_length": 1, "hash_ids": [1,2,3,4,5]}\n',
            "block size.*line 1",
        ),
        (
            MOONCAKE + '{"timestamp":1,"input_length":9,"output_length":1,"hash_ids":["a"]}\n',
            "whole numbers .*line 3",
        ),
        ('{"what": 1}\n', "neither timestamp"),
        ('{"prompt": ""}\n', "prompt must be a text .*line 1"),
        ('{"prompt": "a", "output_tokens": -1}\n', "output_tokens .*line 1"),
        ('{"context": "c", "input": "", "answers": []}\n', "list of answers .*line 1"),
        ("[]", "empty"),
        ("[1]", "element 0"),
        ("[{]", "JSON"),
        (H[:-1] + ",follows\n0,1,1,0\n", "earlier row.*line 2"),
        (H[:-1] + ",prefix_blocks\n0,1,1,a-b\n", "prefix_blocks .*line 2"),
    ],
)
def test_malformed_trace_is_refused_with_its_line(tmp_path, text, says):
    with pytest.raises(FileFormatError, match=says):
        read(stored(tmp_path, text))


def test_truncated_gzip_and_other_encodings_are_refused(tmp_path):
    whole = gzip.compress((H + "0,1,1\n" * 5000).encode())
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileFormatError, match=r"cut short.*cut\.csv\.gz, line"):
        read(cut)
    latin = tmp_path / "latin.csv"
    latin.write_bytes((H + "0,1,1\n").encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(FileFormatError, match="not UTF-8"):
        read(latin)


@pytest.mark.parametrize(
    ("text", "arrival_s", "note"),
    [
        ("timestamp,prompt_tokens,output_tokens\n0.5,9,1\n60,8,2\n", [0, 59.5], "timestamp (s)"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,9,1\n4.3,8,2\n", [0, 4.3], "(s)"),
        ("Arrival Time (ms),Input Tokens,Output Tokens\n5,9,1\n30,8,2\n", [0, 0.025], "(ms)"),
        ("created_at,input_len,output_len\n1732000000123,9,1\n1732000001123,8,2\n", [0, 1], "(ms)"),
        (
            "ts,input_len,output_len\n1732000000000000001,9,1\n1732000000000000004,8,2\n",
            [0, 3e-9],
            "ts (ns)",
        ),
        (
            "time,input_len,output_len\n2026-01-01T10:00:00+02:00,9,1\n2026-01-01T08:00:07Z,8,2\n",
            [0, 7],
            "time (dates)",
        ),
        (
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
            "\n0,2,0,1,1,9,1\n1,2,0,3,1,8,2\n",
            [0, 2],
            "arrival_timestamp (s)",
        ),
        (
            '{"input_toks": 9, "output_toks": 1, "arrival_time_ns": 46926808}\n'
            '{"input_toks": 8, "output_toks": 2, "arrival_time_ns": 1046926808}\n',
            [0, 1],
            "arrival_time_ns (ns)",
        ),
        (
            '{"startTime": "2026-02-01T00:00:00.5Z", "usage": {"prompt_tokens": 9, '
            '"completion_tokens": 1}}\n{"startTime": "2026-02-01T00:00:01Z", "usage": '
            '{"prompt_tokens": 8, "completion_tokens": 2}}\n',
            [0, 0.5],
            "startTime (dates)",
        ),
    ],
)
def test_columns_are_known_by_other_names_and_units(tmp_path, text, arrival_s, note):
    trace = read(stored(tmp_path, text))
    assert trace.has_arrivals
    np.testing.assert_allclose(trace.workload.arrival_s, arrival_s, atol=1e-12)
    assert trace.workload.prompt_tokens.tolist() == [9, 8]
    assert trace.workload.output_tokens.tolist() == [1, 2]
    assert any(line.startswith("arrival_s is read from ") and note in line for line in trace.notes)


def test_columns_are_named_by_the_user(tmp_path):
    text = "when,in,out,class,cost\n1000,9,1,a,2\n3000,8,2,b,2\n"
    columns = "arrival_s=when:ms, prompt_tokens=in, output_tokens=out, class="
    trace = read(stored(tmp_path, text), columns=columns)
    assert trace.workload.arrival_s.tolist() == [0, 2]
    assert trace.workload.class_names == ("",)
    assert trace.notes[-1] == "not used: cost, class"
    with pytest.raises(FileFormatError, match="the header lacks inn; it has when, in, out"):
        read(stored(tmp_path, text), columns="prompt_tokens=inn")
    for wrong in ("prompt_tokens", "arrival_s=a,arrival_s=b"):
        with pytest.raises(SloBenchError, match="cannot read columns"):
            read(stored(tmp_path, text), columns=wrong)
    with pytest.raises(SloBenchError, match="azure"):
        read(stored(tmp_path, AZURE), "azure", "arrival_s=TIMESTAMP")
    with pytest.raises(SloBenchError, match="columns are of a trace file"):
        load_source("azure-conv", columns="arrival_s=TIMESTAMP")


def test_a_table_whose_times_cannot_be_found_is_refused(tmp_path):
    text = "clock_time,prompt_tokens,output_tokens\n0,9,1\n7,8,2\n"
    with pytest.raises(FileFormatError, match=r"'clock_time' looks like one: .*arrival_s=clock_ti"):
        read(stored(tmp_path, text))
    assert not read(stored(tmp_path, text), columns="arrival_s=").has_arrivals
    lengths = "e2e_latency,ttft,prompt_tokens,output_tokens\n0,9,1,1\n"
    trace = read(stored(tmp_path, lengths))
    assert trace.notes == ("not used: e2e_latency, ttft",)


@pytest.mark.parametrize(
    ("header", "output"),
    [
        ("timestamp,output_tokens/s,prompt_tokens,output_tokens", 8),
        ("timestamp,completion_tokens/s,prompt_tokens,completion_tokens", 8),
    ],
)
def test_a_rate_is_no_count_of_tokens(tmp_path, header, output):
    trace = read(stored(tmp_path, f"{header}\n0,50.5,9,{output}\n"))
    assert trace.workload.output_tokens.tolist() == [output]
    assert "not used: " + header.split(",")[1] in trace.notes


def test_units_hold_for_every_time_and_columns_may_be_swapped(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens,slo\n0,9,1,500\n1,8,2,\n"
    swapped = "prompt_tokens=output_tokens,output_tokens=prompt_tokens,ttft_slo_s=slo:ms"
    workload = read(stored(tmp_path, text), columns=swapped).workload
    assert workload.prompt_tokens.tolist() == [1, 2]
    assert workload.output_tokens.tolist() == [9, 8]
    assert workload.ttft_slo_s.tolist() == [0.5, np.inf]
    with pytest.raises(SloBenchError, match="prompt_tokens is no time"):
        read(stored(tmp_path, text), columns="prompt_tokens=slo:ms")
    with pytest.raises(UnknownNameError, match="did you mean prompt_tokens"):
        read(stored(tmp_path, text), columns="prompt_toks=slo")


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("1700000000 1700000001 x", "timestamp must be a number but is 'x' .*line 4"),
        ("now now now", "timestamp must be a number but is 'now' .*line 2"),
        ("1999 2000-01-01 2000-01-02", "must be a date as 2026-.* but is '1999' .*line 2"),
        ("31.01.2026T12:00:00 x x", "must be a number or a date as 2026-01-31T12:00:00 but"),
        ("12:00:00 12:00:01 12:00:02", "must be a number or a date as 2026-"),
        ("1.767E+12 1.767E+12 1.768E+12", "'1.767E.12' was rounded to more than a second"),
        ("46037.5 46037.5001 46037.5002", "looks like a day of a spreadsheet: export .*line 2"),
        ("20240101120000 20240101120001 20240101120002", "no time since 1970 .*line 4"),
    ],
)
def test_what_is_no_time_is_refused_with_its_line(tmp_path, cells, says):
    rows = "".join(f"{cell},9,1\n" for cell in cells.split())
    with pytest.raises(FileFormatError, match=says):
        read(stored(tmp_path, f"timestamp,prompt_tokens,output_tokens\n{rows}"))


def test_turns_of_a_mooncake_trace_follow_each_other(tmp_path):
    text = (
        '{"timestamp": 10, "session_id": "a", "input_length": 100, "output_length": 40}\n'
        '{"session_id": "a", "delay": 50, "input_length": 220, "output_length": 30}\n'
        '{"timestamp": 40, "session_id": "b", "input_length": 90, "output_length": 10}\n'
    )
    workload = read(stored(tmp_path, text)).workload
    assert workload.arrival_s.tolist() == [0, 0, 0.03]
    assert workload.follows.tolist() == [-1, 0, -1]
    assert workload.think_s.tolist() == [0, 0.05, 0]
    assert workload.session.tolist() == [0, 0, 1]
    orphan = '{"session_id": "c", "input_length": 1, "output_length": 1}\n'
    with pytest.raises(FileFormatError, match=r"no line before it .*line 4"):
        read(stored(tmp_path, text + orphan))
    with pytest.raises(FileFormatError, match=r"input_length must be a number but is True.*line 4"):
        read(
            stored(tmp_path, text + '{"timestamp": 1, "input_length": true, "output_length": 1}\n')
        )
    bailian = '{"timestamp": 1, "chat_id": 3, "input_length": 1, "output_length": 1}\n'
    with pytest.raises(FileFormatError, match="some lines have chat_id: give --format bailian"):
        read(stored(tmp_path, text + bailian))


def test_missing_files_folders_and_formats_are_refused(tmp_path):
    with pytest.raises(SloBenchError, match="no file"):
        read(tmp_path / "absent.csv")
    with pytest.raises(SloBenchError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(UnknownNameError, match="did you mean azure"):
        read(stored(tmp_path, AZURE), "azur")


def test_byte_order_mark_is_ignored(tmp_path):
    assert len(read(stored(tmp_path, "\ufeff" + H + "0,1,1\n")).workload) == 1


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data folder")
@pytest.mark.parametrize(
    ("name", "requests", "block_size"),
    [("azure_2023_conv.csv.gz", 15493, None), ("mooncake_conversation.jsonl.gz", 9625, 512)],
)
def test_shared_traces_are_read(name, requests, block_size):
    workload = read(SHARED / "data" / "traces" / name).workload
    assert len(workload) == requests
    assert (workload.prefix_blocks is not None) == (block_size is not None)
    if block_size:
        assert workload.prefix_block_size == block_size


AT = "(APIServer pid=7) {} {} [entrypoints/.../utils/request_logger.py:74] "


def vllm_log(path, *requests):
    """As RequestLogger of vLLM 0.32 prints; a request: time, ids of prompt, of answer or limit."""
    lines = ["INFO 12-31 23:59:57 [api_server.py:1] Started"]
    for number, (time, ids, answer) in enumerate(requests):
        debug, info = (AT.format(level, time) for level in ("DEBUG", "INFO"))
        lines.append(
            f"{debug}Request cmpl-{number} details: prompt: 'x', prompt_token_ids: {ids}, "
        )
        limit = answer if isinstance(answer, int) else 99
        params = f"SamplingParams(n=1, max_tokens={limit}, min_tokens=0)"
        lines.append(f"{info}Received request cmpl-{number}: params: {params}, lora_request: None.")
        if not isinstance(answer, int):
            lines.append(
                f"{debug}Generated response cmpl-{number} details: output_token_ids: {answer}"
            )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_vllm_request_log_is_read(tmp_path):
    system = list(range(40))
    path = vllm_log(
        tmp_path / "server.log",
        ("12-31 23:59:58", system, [1, 2, 3]),
        ("12-31 23:59:58", [*system, 7, 8], [1]),
        ("01-01 00:00:01", [*system[:32], *range(50, 66)], 12),  # the next year
    )
    assert detect_format(path) == "vllm-log"
    trace = read(path)
    work = trace.workload
    assert work.arrival_s.tolist() == [0.0, 0.5, 3.0]
    assert work.prompt_tokens.tolist() == [40, 42, 48]
    assert work.output_tokens.tolist() == [3, 1, 12]
    first, second, third = work.prefix_blocks
    assert first == second == third[:2]
    assert len(third) == 3
    assert "1 answers are not logged" in trace.notes[1]
    assert load_source(path).has_arrivals


def test_vllm_request_log_without_prompts_is_refused(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(AT.format("INFO", "12-31 23:59:58") + "Received request a: params: x.\n")
    with pytest.raises(FileFormatError, match=r"no request .*--log-level DEBUG"):
        read(path)


def test_a_format_added_in_one_place_is_recognised_listed_and_refused_by_name(
    tmp_path, monkeypatch
):
    """One `Format`: recognition, `list formats`, the completion and the error follow from it."""

    def read_pairs(path):
        lengths = [row.split("|") for row in path.read_text().splitlines()[1:]]
        text = "".join(f"{prompt},{output}\n" for prompt, output in lengths)
        return FORMATS["csv"].read(stored(tmp_path, f"prompt_tokens,output_tokens\n{text}", "p"))

    pairs = Format("pairs", read_pairs, "lengths with a bar", "columns", ("in|out",))
    monkeypatch.setitem(FORMATS, "pairs", pairs)
    path = stored(tmp_path, "in|out\n5|6\n7|8\n")
    assert detect_format(path) == "pairs"
    drawn = load_source(path).make(rate_rps=1, requests=2)
    assert sorted(drawn.prompt_tokens.tolist()) == [5, 7]
    listed = json.loads(CliRunner().invoke(app, ["list", "formats", "pairs", "--json"]).output)
    assert listed == [
        {"name": "pairs", "description": "lengths with a bar", "recognised_by": "in|out"}
    ]
    assert names("formats")[-1] == "pairs"
    with pytest.raises(UnknownNameError, match="did you mean pairs"):
        read(path, "pair")


def test_the_page_of_file_formats_names_what_each_format_is_recognised_by():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "file-formats.md").read_text(encoding="utf-8")
    table = page.split("## Input files")[1].split("Files may be compressed")[0]
    words = {
        word
        for form in FORMATS.values()
        if form.part in ("document", "keys", "columns")
        for word in form.header
    }
    assert {word for word in words if word not in table} == {"context", "answers"}  # LongBench


CAPTURED = (
    '{"arrival_s":0,"prompt_tokens":40,"output_tokens":30,"follows":-1,"hash_ids":[1,2,3],'
    '"answer_hash_ids":[4,5]}\n'
    '{"arrival_s":1,"prompt_tokens":9,"output_tokens":0,"follows":-1,"hash_ids":[8]}\n'
    '{"arrival_s":2,"prompt_tokens":80,"output_tokens":1,"follows":0,"hash_ids":[1,2,4,5,7]}\n'
)


def test_captured_answers_have_blocks_and_requests_without_answers_are_left_out(tmp_path):
    path = tmp_path / "capture.jsonl"
    path.write_text(CAPTURED)
    trace = read(path)
    assert trace.workload.prefix_blocks == [(1, 2, 4, 5), (1, 2, 4, 5, 7)]
    assert trace.workload.follows.tolist() == [-1, 0]
    assert trace.notes == ("1 of 3 requests with no output token left out",)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"follows":0', '"follows":1', "others follow must have an output token.*line 2"),
        ("[4,5]}", '["a"]}', "answer_hash_ids must be a list of whole numbers.*line 1"),
    ],
)
def test_damaged_capture_is_refused_with_its_line(tmp_path, old, new, problem):
    path = tmp_path / "capture.jsonl"
    path.write_text(CAPTURED.replace(old, new))
    with pytest.raises(FileFormatError, match=problem):
        read(path)


def test_block_size_fits_all_prompts_after_many_short_ones(tmp_path):
    path = tmp_path / "capture.jsonl"
    line = '{"arrival_s":0,"prompt_tokens":%d,"output_tokens":1,"hash_ids":%s}\n'
    path.write_text(line % (3, [0]) * 300 + line % (40, [1, 2, 3]))
    workload = read(path).workload
    assert workload.prefix_block_size == 16
    assert workload.prefix_blocks[-1] == (1, 2)
