"""Servers that refuse what is requests by default: what is chosen, and which option is named."""

import json

import pytest

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.load_generator.http import Api, Endpoint, HttpOptions, PromptFormat
from slo_bench.harness.load_generator.probe import reach
from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.pages.answers_page import sentences
from slo_bench.workloads.errors import SloBenchError

ANSWER = {
    "choices": [{"text": "a", "message": {"content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 16, "completion_tokens": 1},
}


def no_such_page(path, body):
    return 404, {"error": {"message": f"nothing at {path}"}}


def serves(*paths, refuses=lambda body: ""):
    """What a server with these paths answers; `refuses` gives the message of a refusal."""

    def answer(path, body):
        if path not in paths:
            return no_such_page(path, body)
        problem = refuses(body)
        return (400, {"error": {"message": problem}}) if problem else (200, ANSWER)

    return answer


def test_server_that_answers_is_reached_as_it_is(json_server):
    url, requests = json_server(serves("/v1/completions"))
    reached = reach([Endpoint.parse(url)], HttpOptions(model="m"))
    assert (reached.changes, reached.notes, reached.failed_as) == ({}, [], "")
    path, body = requests[0]
    assert path == "/v1/completions"
    assert body["prompt"][:2] == [1000, 29999]  # the ends of the vocabulary
    assert (len(requests), len(body["prompt"]), body["max_tokens"], body["model"]) == (
        1,
        16,
        16,
        "m",
    )


def test_server_without_completions_is_asked_for_chat(json_server):
    url, _ = json_server(serves("/v1/chat/completions"))
    reached = reach([Endpoint.parse(url)], HttpOptions())
    assert reached.changes == {"api": Api.CHAT}
    assert reached.notes == [f"{url}: no completions there; chat is used"]


def test_path_without_a_version_is_tried_without_v1(json_server):
    url, _ = json_server(serves("/serving/chat/completions"))
    reached = reach([Endpoint.parse(f"{url}/serving")], HttpOptions(api=Api.CHAT))
    assert reached.endpoints[0].target("/x") == "/serving/x"
    assert reached.notes == [f"{url}/serving: the API is without /v1 in its path"]


def test_path_with_another_version_is_tried_with_v1(json_server):
    url, _ = json_server(serves("/v2/api/v1/chat/completions"))
    reached = reach([Endpoint.parse(f"{url}/v2/api")], HttpOptions(api=Api.CHAT))
    assert reached.endpoints[0].target("/x") == "/v2/api/v1/x"


def test_doubled_version_in_a_path_is_tried_once(json_server):
    url, _ = json_server(serves("/v1/chat/completions"))
    reached = reach([Endpoint.parse(f"{url}/v1/v1")], HttpOptions(api=Api.CHAT))
    assert reached.notes == [f"{url}/v1/v1: the API is with /v1 once in its path"]


def out_of_vocabulary(body):
    prompt = body["prompt"]
    is_bad = isinstance(prompt, list) and max(prompt) >= 500
    return "Token id is out of vocabulary" if is_bad else ""


def test_small_vocabulary_is_taken_from_tokenize(json_server):
    completions = serves("/v1/completions", refuses=out_of_vocabulary)

    def answer(path, body):
        if path == "/tokenize":
            return 200, {"tokens": list(range(100, 150))}
        return completions(path, body)

    url, _ = json_server(answer)
    reached = reach([Endpoint.parse(url)], HttpOptions())
    assert reached.changes == {"vocabulary": tuple(range(100, 150))}
    assert reached.failed_as == ""


def test_server_that_refuses_token_ids_gets_text(json_server):
    url, _ = json_server(serves("/v1/completions", refuses=out_of_vocabulary))
    reached = reach([Endpoint.parse(url)], HttpOptions())
    assert reached.changes == {"prompt_format": PromptFormat.TEXT}
    assert "prompts are text" in reached.notes[0]


def test_token_ids_that_were_asked_for_are_not_replaced(json_server):
    url, _ = json_server(serves("/v1/completions", refuses=out_of_vocabulary))
    options = HttpOptions(prompt_format=PromptFormat.TOKEN_IDS)
    with pytest.raises(SloBenchError, match=r"vocabulary.*with --prompt-format text it answers"):
        reach([Endpoint.parse(url)], options)


def test_refusal_that_nothing_mends_is_noted_and_known_to_the_first_level(json_server):
    url, _ = json_server(serves("/v1/completions", refuses=lambda body: "no"))
    reached = reach([Endpoint.parse(url)], HttpOptions())
    assert (reached.changes, reached.failed_as) == ({}, "status 400")
    assert reached.notes == [f"{url}: a first request failed (400: no)"]


def test_server_that_redirects_is_not_measured(json_server):
    url, requests = json_server(lambda path, body: (308, {}))
    with pytest.raises(SloBenchError, match="status 308"):
        reach([Endpoint.parse(url)], HttpOptions())
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("refused_fields", "option"),
    [
        ({"ignore_eos"}, "--no-exact-output"),
        ({"temperature"}, "--body temperature="),
        ({"max_tokens"}, "--rename-field max_tokens=max_completion_tokens"),
        (
            {"ignore_eos", "max_tokens"},
            "--no-exact-output --rename-field max_tokens=max_completion_tokens",
        ),
        (
            {"ignore_eos", "max_tokens", "temperature"},
            "--no-exact-output --rename-field max_tokens=max_completion_tokens "
            "--body temperature= --body stream_options=",
        ),
    ],
)
def test_option_that_mends_a_refusal_is_named(json_server, refused_fields, option):
    def refuses(body):
        return "unknown field" if refused_fields & set(body) else ""

    url, _ = json_server(serves("/v1/chat/completions", refuses=refuses))
    with pytest.raises(SloBenchError, match="unknown field") as raised:
        reach([Endpoint.parse(url)], HttpOptions(api=Api.CHAT))
    assert str(raised.value).endswith(f"with {option} it answers")


def test_model_that_the_server_lists_is_named(json_server):
    def answer(path, body):
        is_right = body.get("model") == "org/model"
        return (200, ANSWER) if is_right else (404, {"message": "no such model"})

    url, _ = json_server(answer)
    with pytest.raises(SloBenchError, match="with --model org/model it answers"):
        reach([Endpoint.parse(url)], HttpOptions(model="other"), ["org/model"])


def test_refused_access_names_the_options_for_keys(json_server):
    url, _ = json_server(lambda path, body: (401, {"error": "no key"}))
    with pytest.raises(SloBenchError, match="401: no key: --api-key-env"):
        reach([Endpoint.parse(url)], HttpOptions())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_or_broken_server_is_noted_and_measured_all_the_same(json_server, status):
    url, requests = json_server(lambda path, body: (status, {"error": "busy"}))
    reached = reach([Endpoint.parse(url)], HttpOptions())
    assert reached.notes == [f"{url}: a first request failed ({status}: busy)"]
    assert reached.changes == {}
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("api", "path", "field"),
    [
        (Api.RESPONSES, "/v1/responses", "max_output_tokens"),
        (Api.MESSAGES, "/v1/messages", "max_tokens"),
    ],
)
def test_request_of_another_api_has_its_fields_alone(json_server, api, path, field):
    url, requests = json_server(serves(path))
    assert reach([Endpoint.parse(url)], HttpOptions(api=api, model="m")).notes == []
    body = requests[0][1]
    prompt = body["input" if api is Api.RESPONSES else "messages"]
    assert prompt[0]["role"] == "user"
    assert len(prompt[0]["content"].split()) == 16
    assert body[field] == 16
    assert not {"ignore_eos", "min_tokens", "stream_options"} & set(body)
    assert json.dumps(body)


def test_cells_say_which_api_was_used_and_which_usages_were_not(json_server, tmp_path):
    end = {"message": {"content": "a"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 16, "completion_tokens": 0}

    def answer(path, body):
        is_chat = path == "/v1/chat/completions"
        return (200, {"choices": [end], "usage": usage}) if is_chat else no_such_page(path, body)

    url, _ = json_server(answer)
    client = {"base_urls": [url], "send_delay_limit_s": 60.0}
    settings = {"workload": "sharegpt", "requests": 4, "rates": 100.0, "seeds": 1}
    short = {"prompt_tokens": "fixed(8)", "output_tokens": "fixed(5)", "model": "m"}
    result = Experiment(**settings, **short, backend="openai", client=client).run(tmp_path / "run")
    (row,) = result.rows()
    assert (row["api"], row["refuted_usages"], row["silent_openings"]) == ("chat", 4, 0)
    (run,) = read_runs([tmp_path / "run"])
    assert run.cells["api"].tolist() == ["chat"]
    assert "4 of 4 answers have a usage that is no number" in sentences(run.cells)[0]


def test_cells_say_how_many_usages_count_fewer_tokens_than_events(json_server, tmp_path):
    texts = [{"choices": [{"text": text}]} for text in ("one", "two", "three", "four", "five")]
    end = {"choices": [{"text": "", "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 3}}
    events = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in (*texts, end, usage))
    url, _ = json_server(lambda path, body: (200, events + b"data: [DONE]\n\n"))
    client = {"base_urls": [url], "send_delay_limit_s": 60.0}
    settings = {"workload": "sharegpt", "requests": 4, "rates": 100.0, "seeds": 1}
    short = {"prompt_tokens": "fixed(8)", "output_tokens": "fixed(3)", "model": "m"}
    Experiment(**settings, **short, backend="openai", client=client).run(tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"])
    assert run.cells["split_token_answers"].tolist() == [4]
    assert any(
        text.startswith("4 of 4 answers have fewer tokens by their usage than events with text")
        for text in sentences(run.cells)
    )


def test_answer_in_the_name_of_another_model_is_said(json_server):
    url, _ = json_server(lambda path, body: (200, ANSWER | {"model": "org/small-2026"}))
    for model in ("", "small", "openai/Small"):
        assert reach([Endpoint.parse(url)], HttpOptions(model=model)).notes == []
    assert reach([Endpoint.parse(url)], HttpOptions(model="org/large")).notes == [
        f"{url}: asked for org/large, it answers as org/small-2026, which is what is measured"
    ]


def test_cells_say_how_many_answers_without_a_usage_may_hold_several_tokens_an_event(
    json_server, tmp_path
):
    texts = [{"choices": [{"text": " a b c d"}]} for _ in range(2)]
    end = {"choices": [{"text": "", "finish_reason": "length"}]}
    events = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in (*texts, end))
    url, _ = json_server(lambda path, body: (200, events + b"data: [DONE]\n\n"))
    client = {"base_urls": [url], "send_delay_limit_s": 60.0}
    settings = {"workload": "sharegpt", "requests": 4, "rates": 100.0, "seeds": 1}
    short = {"prompt_tokens": "fixed(8)", "output_tokens": "fixed(8)", "model": "m"}
    Experiment(**settings, **short, backend="openai", client=client).run(tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"])
    assert run.cells["unreported_outputs"].tolist() == [4]
    assert any(text.startswith("4 of 4 answers have no usage") for text in sentences(run.cells))
