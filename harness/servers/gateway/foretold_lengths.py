"""Output lengths that the gateway predicts on arrival and sends to the servers' policies.

Requests that arrive while a prediction runs are predicted together in the next batch, in a thread.
A request is forwarded when its length is known; the time of the prediction is part of its TTFT.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ....predictors.lengths.length_samples import Prompt
from ....predictors.output_length import ConstantLength, LearnedLength, length_predictor
from ....workloads.errors import SloBenchError
from ...core.wire import PredictedLength, predicted_length_from_wire
from ...load_generator.http.answers import Raw
from ...load_generator.http.length_prediction import BatchedPredictions, LengthPrediction, Predicted
from ..http.http_server import HttpRequest, Reply
from ..http.prometheus import Sample
from .health_checks import Say
from .replies import CountedReply
from .routes import Serving
from .running_gateway import GatewayTarget
from .states import last_said, prompt_tokens

_GENERATES = ("/v1/completions", "/v1/chat/completions")
_NAME = "slo_bench_gateway_lengths"
_TIMES = 1_000  # requests, of which is said how long they waited for their prediction
_SHOWN = (0.5, 0.99)


def foretells(text: str, say: Say) -> LengthPrediction[Prompt]:
    """A length predictor by name, for requests whose output length is unknown.

    Raises:
        SloBenchError: there is no such predictor, or it needs to know the answer.
    """
    predictor = length_predictor(text)
    if isinstance(predictor, ConstantLength):
        predicted = PredictedLength(predictor.tokens, predictor.tokens)
        return LengthPrediction(lambda requests: [(predicted, None)] * len(requests))
    if isinstance(predictor, LearnedLength):
        return _read_off(predictor, say)
    raise SloBenchError(
        f"{text} cannot predict before real answers; --length-predictor of serve takes a folder "
        "of slo-bench predict-train, learned(DIR, …) or constant(N)"
    )


def _read_off(learned: LearnedLength, say: Say) -> LengthPrediction[Prompt]:
    follower = learned.follower(say)

    def read(prompts: Sequence[Prompt]) -> list[Predicted]:
        if learned.model:
            prompts = [replace(prompt, model=learned.model) for prompt in prompts]
        return [
            (PredictedLength(prediction.median, prediction.p90), prediction)
            for prediction in follower.read(prompts)
        ]

    return LengthPrediction(read, follower)


class LengthPredictingServing:
    """Servers behind a gateway that adds predicted lengths to their requests. It is a server group
    itself, because it has metrics.

    `field` is the request field from which the servers read a policy's inputs.
    """

    role = "lengths"
    any_up = True

    def __init__(
        self, inner: Serving, field: str, predictor: LengthPrediction[Prompt], say: Say
    ) -> None:
        self.groups = (*inner.groups, self)
        self._inner = inner
        self._field = field
        self._predictor = predictor
        self._say = say
        self._together: BatchedPredictions[Prompt] = BatchedPredictions(predictor.read)
        self._counts: Counter[str] = Counter()
        self._sum_s = 0.0
        self._last_s: deque[float] = deque(maxlen=_TIMES)

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Add a predicted length and forward the request; one without text, or with a predicted
        length, is forwarded unchanged.
        """
        body = request.json() if request.path.endswith(_GENERATES) else None
        if body is None:
            await self._inner.work(request, reply)
            return
        values = body.get(self._field)
        values = values if isinstance(values, Mapping) else {}
        prompt = _prompt(body)
        if predicted_length_from_wire(values) is not None:
            self._counts["told_already"] += 1
        elif prompt is None:
            self._counts["without_text"] += 1
        else:
            predicted = await self._read(prompt)
            if predicted is not None:
                length, prediction = predicted
                body = {**body, self._field: {**values, **length.to_wire()}}
                await self._follow(request.with_json(body), reply, prediction, body)
                return
        await self._inner.work(request, reply)

    async def _read(self, prompt: Prompt) -> Predicted | None:
        begin_s = perf_counter()
        try:
            predicted = await self._together.of(prompt)
        except Exception as error:  # whatever it is: requests are served without
            if not self._counts["failed"]:
                self._say(f"lengths cannot be predicted: {error}")
            self._counts["failed"] += 1
            return None
        took_s = perf_counter() - begin_s
        self._counts["predicted"] += 1
        self._sum_s += took_s
        self._last_s.append(took_s)
        return predicted

    async def _follow(
        self, request: HttpRequest, reply: Reply, prediction: Any, body: Mapping[str, Any]
    ) -> None:
        """Forward a request and report the length of its answer to the predictor."""
        if not self._predictor.learns:
            await self._inner.work(request, reply)
            return

        def whole(raw: Raw) -> None:
            self._predictor.heard(prediction, raw, exact=bool(body.get("ignore_eos")))

        await self._inner.work(request, CountedReply(reply, whole))

    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing, at the first group of the servers."""
        await self._inner.groups[0].forward(request, reply)

    def metrics(self) -> Iterator[Sample]:
        """Counts and times of predictions, as Prometheus samples."""
        self._counts["cut_off"] = self._predictor.cut_off
        for outcome in ("predicted", "told_already", "without_text", "cut_off", "failed"):
            yield f"{_NAME}_requests_total", f'{{outcome="{outcome}"}}', self._counts[outcome]
        yield f"{_NAME}_batches_total", "", self._together.times
        yield f"{_NAME}_seconds_total", "", round(self._sum_s, 6)
        last_s = sorted(self._last_s)
        for share in _SHOWN if last_s else ():
            rank = min(len(last_s) - 1, int(share * len(last_s)))
            yield f"{_NAME}_seconds", f'{{quantile="{share:g}"}}', round(last_s[rank], 6)
        for name, labels, value in self._predictor.samples():
            yield f"{_NAME}_{name}", labels, value

    def close(self) -> None:
        """Do nothing: the owner of the predictor closes it."""


@dataclass(frozen=True)
class LengthPredictionPlan:
    """A plan whose requests get predicted lengths."""

    plan: GatewayTarget
    field: str
    predictor: LengthPrediction[Prompt]

    def check(self) -> None:
        """Check the plan of the servers."""
        self.plan.check()

    def build(self, say: Say) -> Serving:
        """The servers of the plan, with length prediction before them."""
        return LengthPredictingServing(self.plan.build(say), self.field, self.predictor, say)


def _prompt(body: Mapping[str, Any]) -> Prompt | None:
    """Text, length and model of a request as the predictor's input; None for a request without
    text.
    """
    text = last_said(body)
    if not text:
        return None
    model = body.get("model")
    return Prompt(text, prompt_tokens({"prompt": text}), model if isinstance(model, str) else "")
