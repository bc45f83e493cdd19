"""One small request to each server before the first level, which finds what would fail for all.

What the experiment left open is chosen so that the server answers: the API (chat where there are no
completions), the path (with or without `/v1`), the tokens of prompts that are made. What it did not
leave open is tried, and the option that mends it is named.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_json
from ...workloads.workload import Workload
from ..core.records.request_records import Outcome
from .http.answers import CompletionResult, read_answer
from .http.connection import Exchange
from .http.drive import run_coroutine
from .http.endpoint import Endpoint
from .http.faults import OVERLOAD, RequestFault
from .http.http_options import Api, HttpOptions, PromptFormat
from .http.prompts import FREQUENT_WORDS
from .http.request_columns import Spool
from .http.single_request import NoAnswerError, exchanged, post
from .http.unserved import fault_code
from .http.wire_requests import Bodies, WireRequests

_LIMIT_S = 15.0
_MOST_BYTES = 1 << 20
_TOKENS = 16  # the fewest that OpenAI's `responses` takes
_NOT_THERE = (404, 405, 501)
_MOST_MODELS = 3  # that are tried
_LEAST_IDS = 8  # that a vocabulary is made of
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]+)"')  # texts have their quotes escaped


@dataclass(frozen=True)
class Answered:
    """How a server answered a probe. `code` is the fault without its words, empty without one;
    `model` is the name of the model in the answer, empty without one.
    """

    served: bool
    status: int = 0
    detail: str = ""
    code: str = ""
    model: str = ""

    @property
    def refused(self) -> bool:
        """Return True if the server would refuse the request at any time."""
        return self.status // 100 == 4 and self.status not in OVERLOAD


@dataclass(frozen=True)
class Reached:
    """How servers are reached: their addresses, and the options that the probes have changed.

    `notes` says what was changed, and what is not as it should be. `failed_as`: how the probe of
    all servers failed, as in `HttpOptions.failed_before`; empty: one was served.
    """

    endpoints: Sequence[Endpoint]
    changes: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failed_as: str = ""


@dataclass(frozen=True)
class _Way:
    """A way to ask a server, and what is said of it: a note if it is taken, or an option."""

    endpoint: Endpoint
    options: HttpOptions
    says: str = ""
    option: str = ""


def reach(
    endpoints: Sequence[Endpoint], options: HttpOptions, models: Sequence[str] = ()
) -> Reached:
    """Probe each server, and return how it is reached.

    Args:
        endpoints: addresses as given.
        options: with the model's name; what is open in them may be changed.
        models: names of the models that the servers list.

    Raises:
        SloBenchError: a server refuses what all requests would have, and an option mends it.
    """
    reached: list[Endpoint] = []
    notes: list[str] = []
    failures: list[str] = []
    changes: dict[str, Any] = {}
    for endpoint in endpoints:
        way, answer = _way_to(endpoint, replace(options, **changes), models)
        reached.append(way.endpoint)
        changes |= _changed(options, way.options)
        failures.append(answer.code)
        if way.says:
            notes.append(f"{endpoint.url}: {way.says}")
        model = way.options.model.rpartition("/")[2]
        if answer.model and model.lower() not in answer.model.lower():
            notes.append(
                f"{endpoint.url}: asked for {way.options.model}, it answers as {answer.model}, "
                "which is what is measured"
            )
        if not answer.served:
            notes.append(f"{endpoint.url}: a first request failed ({answer.detail})")
    return Reached(reached, changes, notes, "" if "" in failures else failures[0])


def _changed(before: HttpOptions, after: HttpOptions) -> dict[str, Any]:
    names = ("api", "prompt_format", "vocabulary")
    return {
        name: getattr(after, name)
        for name in names
        if getattr(after, name) != getattr(before, name)
    }


def _way_to(
    endpoint: Endpoint, options: HttpOptions, models: Sequence[str]
) -> tuple[_Way, Answered]:
    """Return the first way in which a server answers, or the one that was given if there is none.

    Raises:
        SloBenchError: it refuses access, or an option mends what it refuses.
    """
    if options.api is Api.EMBEDDINGS:
        return _Way(endpoint, options), Answered(served=True)
    chosen = _Way(endpoint, options)
    answer = ask(chosen.endpoint, chosen.options)
    if answer.served or not (answer.refused or answer.status // 100 == 3):
        return chosen, answer
    if answer.status in (401, 403):
        raise SloBenchError(
            f"{endpoint.url} answers with status {answer.detail}: --api-key-env names the "
            "environment variable that holds an API key, --header sends others"
        )
    if answer.status // 100 == 3:
        raise SloBenchError(f"{endpoint.url} answers with status {answer.detail}")
    if answer.status in _NOT_THERE:
        for way in _other_places(endpoint, options):
            elsewhere = ask(way.endpoint, way.options)
            if elsewhere.served or not (elsewhere.refused and elsewhere.status in _NOT_THERE):
                answer = elsewhere
                chosen = way
                break
    if answer.refused:
        for way in _other_prompts(chosen):
            if (elsewhere := ask(way.endpoint, way.options)).served:
                return way, elsewhere
    if answer.refused:
        for way in _mends(chosen, models):
            if ask(way.endpoint, way.options).served:
                raise SloBenchError(
                    f"{endpoint.url} refuses requests ({answer.detail}); with {way.option} it "
                    "answers"
                )
    return chosen, answer


def _other_places(endpoint: Endpoint, options: HttpOptions) -> Iterator[_Way]:
    """Where a server that has no such page may be asked: other APIs, other paths."""
    bases = [(endpoint, "")]
    if endpoint.version == "/v1" and endpoint.prefix:
        bases.append((replace(endpoint, version=""), "without /v1"))
    elif endpoint.version.endswith("/v1/v1"):
        bases.append((replace(endpoint, version="/v1"), "with /v1 once"))
    elif endpoint.version != "/v1":
        bases.append((replace(endpoint, version=f"{endpoint.version}/v1"), "with /v1"))
    apis = [options.api]
    if options.api is Api.COMPLETIONS and options.prompt_format is not PromptFormat.TOKEN_IDS:
        apis.append(Api.CHAT)
    for base, path in bases:
        for api in apis:
            if (base, api) == (endpoint, options.api):
                continue
            api_note = "" if api is options.api else f"no {options.api} there; {api} is used"
            says = "; ".join(filter(None, (api_note, path and f"the API is {path} in its path")))
            yield _Way(base, replace(options, api=api), says)


def _other_prompts(way: _Way) -> Iterator[_Way]:
    """Prompts of tokens that the server surely has, and of text."""
    options = way.options
    if options.api is not Api.COMPLETIONS or options.prompt_format is not PromptFormat.AUTO:
        return
    if ids := _known_ids(way):
        says = f"prompts are made of {len(ids)} tokens that its /tokenize names"
        yield replace(way, options=replace(options, vocabulary=ids), says=_and(way.says, says))
    says = "prompts are text, since it refuses token ids; --tokenizer FOLDER makes them exact"
    text = replace(options, prompt_format=PromptFormat.TEXT)
    yield replace(way, options=text, says=_and(way.says, says))


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def _known_ids(way: _Way) -> tuple[int, ...]:
    """Ids of the tokens of frequent words, as the server's `/tokenize` gives them."""
    fields = {"prompt": " ".join(FREQUENT_WORDS), "add_special_tokens": False}
    if way.options.model:
        fields["model"] = way.options.model
    try:
        status, body = post(
            way.endpoint,
            way.endpoint.page("/tokenize"),
            fields,
            way.options.header_fields(),
            limit_s=_LIMIT_S,
            most_bytes=_MOST_BYTES,
        )
        reply = parse_json(body) if status == 200 else None
    except (NoAnswerError, ValueError):
        return ()
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return ()
    ids = tuple(sorted(set(tokens)))
    return ids if len(ids) >= _LEAST_IDS else ()


def _mends(way: _Way, models: Sequence[str]) -> Iterator[_Way]:
    """Options that mend what servers refuse, one alone and several."""
    options = way.options
    for model in models[:_MOST_MODELS]:
        if model != options.model:
            other = replace(options, model=model)
            yield replace(way, options=other, option=f"--model {shlex.quote(model)}")
    inexact = replace(options, exact_output=False)
    name = "max_completion_tokens"
    renamed = {**options.rename_fields, "max_tokens": name}
    rename = f"--rename-field max_tokens={name}"
    yield replace(way, options=inexact, option="--no-exact-output")
    for field_name in ("temperature", "stream_options"):
        without = replace(options, body={**options.body, field_name: ""})
        yield replace(way, options=without, option=f"--body {field_name}=")
    if options.api in (Api.COMPLETIONS, Api.CHAT):
        yield replace(way, options=replace(options, rename_fields=renamed), option=rename)
        both = replace(inexact, rename_fields=renamed)
        yield replace(way, options=both, option=f"--no-exact-output {rename}")
        plain = replace(both, body={**both.body, "temperature": "", "stream_options": ""})
        option = f"--no-exact-output {rename} --body temperature= --body stream_options="
        yield replace(way, options=plain, option=option)
    if options.api is Api.COMPLETIONS:
        text = replace(options, prompt_format=PromptFormat.TEXT)
        yield replace(way, options=text, option="--prompt-format text")
        yield replace(way, options=replace(text, api=Api.CHAT), option="--api chat")


def ask(endpoint: Endpoint, options: HttpOptions) -> Answered:
    """Send a small request as those of a level are, and return how it was answered."""
    workload = Workload(np.zeros(1), np.full(1, _TOKENS), np.full(1, _TOKENS))
    salted = replace(options, salt=f"{options.salt} probe", length_predictor="")
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as folder:
        bodies = Bodies.write(workload, salted, Path(folder) / "bodies", ends_of_vocabulary=True)
        try:
            requests = WireRequests(workload, [endpoint], salted, bodies)
            request = b"".join(requests.of(0, 0))
        finally:
            bodies.close()
    limit_s = min(_LIMIT_S, options.stall_limit_s or _LIMIT_S)
    try:
        exchange = run_coroutine(exchanged(endpoint, request, limit_s, _MOST_BYTES))
    except NoAnswerError as error:
        return Answered(served=False, detail=str(error))
    answer = _read(exchange)
    served = answer.outcome is Outcome.FINISHED or answer.fault is RequestFault.ABORTED
    if served:
        named = _MODEL.search(b"".join(exchange.pieces))
        model = named[1].decode(errors="replace") if named else ""
        return Answered(served=True, status=exchange.status, model=model)
    code = fault_code(answer.fault, exchange.status)
    return Answered(served=False, status=exchange.status, detail=answer.detail, code=code)


def _read(exchange: Exchange) -> CompletionResult:
    spool = Spool()
    try:
        return read_answer(spool.raw(exchange))
    finally:
        spool.close()
