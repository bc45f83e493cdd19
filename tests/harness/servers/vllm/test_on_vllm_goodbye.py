"""What a client is told of a request that a policy let go; vLLM's engine is a stand-in."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from slo_bench.harness.servers.vllm.plugin import vllm_plugin


class GenerationError(Exception):
    status_code = 500


def made():
    """An engine that answers with these stop reasons, and says when it was closed."""

    class Engine:
        def __init__(self, *stop_reasons):
            self._stop_reasons = stop_reasons
            self.closed = 0

        async def generate(self, prompt, sampling_params, request_id):
            try:
                for reason in self._stop_reasons:
                    yield SimpleNamespace(outputs=[SimpleNamespace(stop_reason=reason)])
            finally:
                self.closed += 1

    return Engine


@pytest.fixture
def error(monkeypatch):
    monkeypatch.setattr(
        vllm_plugin, "_ERRORS", ("no_such_module:Error", f"{__name__}:GenerationError")
    )


def outputs_of(engine):
    stop_reasons = []

    async def run():
        async for output in engine.generate("prompt", None, "id"):
            stop_reasons.append(output.outputs[0].stop_reason)

    return stop_reasons, run


def test_generate_passes_answers_and_closes_the_engine():
    engine_class = made()
    vllm_plugin.answer_releases(engine_class)
    engine = engine_class(None, 17, "a stop string")
    stop_reasons, run = outputs_of(engine)
    asyncio.run(run())
    assert stop_reasons == [None, 17, "a stop string"]
    assert engine.closed == 1


def test_generate_of_a_dropped_request_raises(error):
    engine_class = made()
    vllm_plugin.answer_releases(engine_class)
    engine = engine_class(None, "slo_bench: dropped", None)
    stop_reasons, run = outputs_of(engine)
    with pytest.raises(GenerationError, match="slo_bench: dropped by the policy") as raised:
        asyncio.run(run())
    assert raised.value.status_code == 503
    assert stop_reasons == [None]
    assert engine.closed == 1


def test_generate_is_wrapped_once_and_keeps_its_signature():
    engine_class = made()
    vllm_plugin.answer_releases(engine_class)
    once = engine_class.generate
    vllm_plugin.answer_releases(engine_class)
    assert engine_class.generate is once
    assert list(inspect.signature(once).parameters)[:2] == ["self", "prompt"]


def test_generate_closes_the_engine_of_a_leaving_client():
    engine_class = made()
    vllm_plugin.answer_releases(engine_class)
    engine = engine_class(None, None)

    async def leave():
        outputs = engine.generate("prompt", None, "id")
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(leave())
    assert engine.closed == 1
