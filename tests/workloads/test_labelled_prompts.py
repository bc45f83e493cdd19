"""Prompts with answers: formats, what is refused, and the split by prompt."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.labelled_prompts import (
    LabelledPrompt,
    TokenCount,
    prompt_key,
    read_labelled_prompts,
    refuse_answers,
    split_by_prompt,
)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_labelled_json_lines_with_counts(tmp_path):
    path = lines(
        tmp_path / "d.jsonl",
        {"prompt": "Hi", "prompt_tokens": 1, "output_tokens": 7, "model": "m"},
        {"prompt": "Ho", "output_tokens": 9},
    )
    labelled = read_labelled_prompts(path)
    assert labelled.rows[0] == LabelledPrompt("Hi", 1, 7, "m", "d")
    assert labelled.rows[1].model == "d"  # the file's name, where nobody says who answered
    assert labelled.labels == "output_tokens of the data"
    assert read_labelled_prompts(path, model="n").rows[1].model == "n"


def test_labelled_alpaca_array(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(
        json.dumps(
            [
                {"instruction": "Add", "input": "1 2", "output": "three"},
                {"instruction": "Say", "input": "", "output": ""},
            ],
            indent=1,
        )
    )
    labelled = read_labelled_prompts(path, tokens=TokenCount(len, "letters"))
    assert [(row.prompt, row.output_tokens) for row in labelled.rows] == [("Add\n1 2", 5)]
    assert labelled.labels == "answers counted by letters"
    assert labelled.notes == ("1 rows without an answer left out",)


def test_labelled_sharegpt(tmp_path):
    path = tmp_path / "chat.json"
    talk = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "abcdefgh"}]
    path.write_text(json.dumps([{"conversations": talk}]))
    (row,) = read_labelled_prompts(path).rows
    assert (row.prompt, row.output_tokens, row.answer) == ("Who?", 2, "abcdefgh")


def test_labelled_rows_of_several_models(tmp_path):
    row = {
        "instruction": "Name one",
        "outputs": {"x": "aa", "y": "bb"},
        "output_tokens": {"x": 3, "y": 40},
    }
    labelled = read_labelled_prompts(lines(tmp_path / "d.jsonl", row)).rows
    assert [(r.model, r.output_tokens, r.answer) for r in labelled] == [
        ("x", 3, "aa"),
        ("y", 40, "bb"),
    ]


def test_labelled_gzip_with_reference_answers(tmp_path):
    path = tmp_path / "nq.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "when?", "answer": ["in 1972", "1972"]}\n'))
    (row,) = read_labelled_prompts(path).rows
    assert (row.prompt, row.answer, row.output_tokens, row.corpus) == ("when?", "in 1972", 2, "nq")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"[]", "the data is empty: no prompt with an answer in it"),
        (b'{"prompt": "x"}\n', r"neither output_tokens nor an answer's text .* line 1"),
        (b'{"prompt": "x", "output_tokens": 2}\n{"text": 1}\n', "no prompt, instruction.* line 2"),
        (b'{"prompt": "x", "output_tokens": -1}\n', "from 1 to 1099511627776 but is -1"),
        (b'{"prompt": "x", "output_tokens": 1.5}\n', "from 1 to 1099511627776 but is 1.5"),
        (b'{"prompt": "x", "output_tokens": 9999999999999}\n', "but is 9999999999999"),
        (b'{"prompt": 3, "output_tokens": 1}\n', "the prompt must be a text"),
        (b'{"prompt": "\xff", "output_tokens": 1}\n', "the text is not UTF-8"),
        (b'[{"prompt": "x"', "not readable as JSON"),
        (b"[3]", "element 1 is no object"),
    ],
)
def test_malformed_labelled_prompts_are_refused(tmp_path, content, problem):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=problem):
        read_labelled_prompts(path)


@pytest.mark.parametrize(
    "column", ["output", "Answer", "output_tokens", "expected_output_tokens", "response"]
)
def test_columns_with_the_answer_are_refused_as_input(tmp_path, column):
    path = lines(tmp_path / "d.jsonl", {"q": "x", "output_tokens": 1, column: "y"})
    with pytest.raises(SloBenchError, match=f"column '{column}' holds the answer"):
        read_labelled_prompts(path, columns=("q", column))
    with pytest.raises(SloBenchError, match="no column is named"):
        refuse_answers(())


def test_answer_under_another_column_name_is_detected(tmp_path):
    rows = [
        {
            "text": f"{number}: " + "so it goes " * 9 + str(number),
            "output": "so it goes " * 9 + str(number),
        }
        for number in range(4)
    ]
    path = lines(tmp_path / "d.jsonl", *rows)
    with pytest.raises(SloBenchError, match="4 of 4 prompts contain their answer word for word"):
        read_labelled_prompts(path, columns=("text",))


def test_missing_prompt_column_is_refused(tmp_path):
    path = lines(tmp_path / "d.jsonl", {"q": "x", "output_tokens": 1})
    with pytest.raises(FileFormatError, match="lacks 'body'; it has q, output_tokens"):
        read_labelled_prompts(path, columns=("body",))


SHARES = {"train": 0.7, "held": 0.3}


@given(st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=40), st.integers(0, 9))
def test_split_by_prompt_keeps_a_prompt_in_one_part(prompts, seed):
    rows = [LabelledPrompt(prompt, 1, number + 1, "", "") for number, prompt in enumerate(prompts)]
    parts = split_by_prompt(rows, SHARES, seed)
    assert sorted(r.output_tokens for part in parts.values() for r in part) == [
        row.output_tokens for row in rows
    ]
    keys = [{prompt_key(row.prompt) for row in part} for part in parts.values()]
    assert not keys[0] & keys[1]
    # Data beside it moves nobody.
    alone = split_by_prompt(rows[:1], SHARES, seed)
    assert all(row in parts[name] for name, part in alone.items() for row in part)


def test_split_by_prompt_keeps_the_shares():
    rows = [LabelledPrompt(f"prompt {number}", 1, 1, "", "") for number in range(4000)]
    parts = split_by_prompt(rows, SHARES, 0)
    assert len(parts["train"]) == pytest.approx(2800, abs=120)


def test_labelled_log_of_the_chat_api(tmp_path):
    path = tmp_path / "log.jsonl"
    request = {
        "model": "gpt-4o",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        ],
    }
    answered = {
        "choices": [{"message": {"role": "assistant", "content": "Because."}}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 3},
    }
    lines = [{**request, **answered}, {"request": request, "response": answered}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    labelled = read_labelled_prompts(path)
    assert len(labelled.rows) == 2
    for row in labelled.rows:
        assert (row.prompt, row.prompt_tokens, row.output_tokens) == ("Be brief.\nWhy?", 12, 3)
        assert (row.model, row.answer) == ("gpt-4o", "Because.")
    assert not labelled.named_by_file


def test_labelled_conversation_that_ends_with_its_answer(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "B" * 40}]
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    (row,) = read_labelled_prompts(path).rows
    assert (row.prompt, row.output_tokens) == ("Why?", 10)


AT = "(APIServer pid=7) {} 11-23 03:49:16 [entrypoints/.../utils/request_logger.py:74] "
DEBUG, INFO = AT.format("DEBUG"), AT.format("INFO")
# Printed by RequestLogger of vLLM 0.32.
WITH_BODY = [
    DEBUG + r"""Request a1 JSON body: {"messages":[{"role":"user","content":"Say \"hi\"\nit's"}],"""
    r""""model":"tiny","stream":false}""",
    DEBUG + r"""Request chatcmpl-a1 details: prompt: '<|user|>Say "hi"\nit\'s<|assistant|>', """
    "prompt_token_ids: [5, 6, 7], prompt_embeds shape: None.",
    INFO + "Received request chatcmpl-a1: params: SamplingParams(n=1), lora_request: None.",
    DEBUG + "Generated response chatcmpl-a1 details: output_token_ids: [1, 2, 3, 4]",
    INFO
    + r"""Generated response chatcmpl-a1: output: 'He said: "hi",\nRequest x details: prompt: """
    r"""\'y\' finish_reason: length \\ it\'s', finish_reason: stop""",
]
STREAMED = [
    DEBUG + """Request chatcmpl-b2 details: prompt: "<|user|>Tell it's<|assistant|>", """
    "prompt_token_ids: [5, 6], prompt_embeds shape: None.",
    DEBUG + "Generated response chatcmpl-b2 (streaming delta) details: output_token_ids: [1, 2]",
    INFO + "Generated response chatcmpl-b2 (streaming delta): output: 'On', finish_reason: None",
    DEBUG + "Generated response chatcmpl-b2 (streaming delta) details: output_token_ids: [3]",
    INFO + "Generated response chatcmpl-b2 (streaming delta): output: 'ce', finish_reason: stop",
    DEBUG + "Generated response chatcmpl-b2 (streaming complete) details: output_token_ids: None",
    INFO + "Generated response chatcmpl-b2 (streaming complete): output: 'Once', finish_reason: "
    "streaming_complete",
]
CUT_OFF = [
    DEBUG + "Request chatcmpl-c3 details: prompt: 'x', prompt_token_ids: [5], prompt_embeds shape: "
    "None.",
    DEBUG + "Generated response chatcmpl-c3 details: output_token_ids: (1, 2)",
    INFO + "Generated response chatcmpl-c3: output: 'cut', finish_reason: length",
]
# As 0.19 prints an answer.
OLDER = [
    DEBUG + "Request chatcmpl-d4 details: prompt: 'Why?', prompt_token_ids: [1, 2], prompt_embeds "
    "shape: None.",
    INFO + "Generated response chatcmpl-d4: output: 'So', output_token_ids: [8, 9], finish_reason: "
    "stop",
]


def log(path, *lines):
    path.write_text("".join(f"{line}\n" for line in (INFO + "Started", *lines)), encoding="utf-8")
    return path


def test_labelled_vllm_log(tmp_path):
    labelled = read_labelled_prompts(
        log(tmp_path / "server.log", *WITH_BODY, *STREAMED, *CUT_OFF, *OLDER)
    )
    rows = [(r.prompt, r.prompt_tokens, r.output_tokens, r.model) for r in labelled.rows]
    assert rows == [
        ('Say "hi"\nit\'s', 3, 4, "tiny"),
        ("<|user|>Tell it's<|assistant|>", 2, 3, "server"),
        ("Why?", 2, 2, "server"),
    ]
    assert labelled.rows[0].answer.endswith(r"finish_reason: length \ it's")
    assert labelled.rows[1].answer == "Once"
    assert labelled.labels == "output_tokens of the data"
    assert labelled.named_by_file
    assert labelled.notes[0] == "1 answers cut off by max_tokens left out"
    assert "after the chat template" in labelled.notes[1]


def test_labelled_vllm_log_without_ids_or_texts(tmp_path):
    counted = [line for line in STREAMED if "token_ids" not in line or "prompt" in line]
    (row,) = read_labelled_prompts(log(tmp_path / "a.log", *counted)).rows
    assert (row.output_tokens, row.answer) == (1, "Once")  # four characters a token
    log_lines = [counted[0], counted[-1].replace("'Once'", "'<streaming_complete: 12 tokens>'")]
    (row,) = read_labelled_prompts(log(tmp_path / "b.log", *log_lines)).rows
    assert (row.output_tokens, row.answer) == (12, None)


def test_labelled_vllm_log_without_prompts_or_answers_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match=r"1 requests, but no prompt; start .*DEBUG"):
        read_labelled_prompts(log(tmp_path / "a.log", WITH_BODY[2]))
    with pytest.raises(FileFormatError, match=r"no answer to a prompt; .*--enable-log-outputs"):
        read_labelled_prompts(log(tmp_path / "a.log", *WITH_BODY[:3]))
    labelled = read_labelled_prompts(log(tmp_path / "a.log", *STREAMED, WITH_BODY[2]))
    assert labelled.notes[0] == "1 requests without prompt or answer left out"
    cut = WITH_BODY[0][:-20]  # by --max-log-len
    (row,) = read_labelled_prompts(log(tmp_path / "a.log", cut, *WITH_BODY[1:])).rows
    assert row.prompt.startswith("<|user|>")
    damaged = OLDER[0].replace("Why", "\\x4")
    with pytest.raises(FileFormatError, match=r"a logged text is damaged: .* line 2"):
        read_labelled_prompts(log(tmp_path / "a.log", damaged))
    with pytest.raises(FileFormatError, match="not readable as JSON"):
        read_labelled_prompts(log(tmp_path / "a.log"))  # no request at all


def test_labelled_csv_and_nested_fields(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,output_tokens,model\nWhy?,7,m\n", encoding="utf-8")
    (row,) = read_labelled_prompts(path).rows
    assert (row.prompt, row.output_tokens, row.model) == ("Why?", 7, "m")
    nested = tmp_path / "b.jsonl"
    nested.write_text('{"in": {"text": "Why?"}, "stats": [{"n": 9}]}\n', encoding="utf-8")
    labelled = read_labelled_prompts(nested, columns=["in.text"], length="stats.0.n")
    assert labelled.rows[0].output_tokens == 9
    assert labelled.named_by_file
    with pytest.raises(FileFormatError, match=r"lacks 'in\.txt'"):
        read_labelled_prompts(nested, columns=["in.txt"], length="stats.0.n")
    with pytest.raises(SloBenchError, match="holds the answer"):
        read_labelled_prompts(nested, columns=["response.text"])
