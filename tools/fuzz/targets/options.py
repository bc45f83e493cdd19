"""What options say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slo_bench.harness.experiments.config.setting import number_list
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.reports.compare.comparing import parse_regression
from slo_bench.workloads.arrivals import parse_arrivals
from slo_bench.workloads.lengths import parse_lengths
from slo_bench.workloads.models import parse_models
from slo_bench.workloads.sessions import parse_pauses, parse_sessions
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source

from .target import Read, Target

_TEXTS: dict[str, tuple[Callable[[str], object], Sequence[str]]] = {
    "slo": (parse_slo, ["ttft=1,tpot=0.15", "e2e=uniform(1,350)", "a:ttft=0.5; b:deadline=60"]),
    "arrivals": (parse_arrivals, ["poisson", "gamma(cv=2)", "concurrency(16)", "ramp(1,3)"]),
    "lengths": (parse_lengths, ["12", "uniform(1,350)", "lognormal(median=100,sigma=1)"]),
    "mix": (load_source, ["mix(chat=synthetic(prompt=10,output=uniform(1,5)):7, code=alpaca:3)"]),
    "models": (parse_models, ["fleet(llama-3.1-8b*4, qwen2.5-3b*4)", "zipf(1.1, a, b)"]),
    "sessions": (
        parse_sessions,
        ["sessions", "sessions(turns=4,think_s=0,closed=true)"],
    ),
    "pauses": (parse_pauses, ["geometric(10)", "5", "0"]),
    "rates": (number_list, ["2,4,8", "2:16:2"]),
    "regression": (parse_regression, ["5%", "0.1"]),
    "address": (Endpoint.parse, ["http://127.0.0.1:8000/v1", "https://[::1]:80/x", "a:1"]),
}


def targets() -> list[Target]:
    """Every little language."""

    def reader(parse: Callable[[str], object]) -> Read:
        return lambda data: parse(data.decode("utf-8", "surrogateescape"))

    return [
        Target(f"option {name}", [text.encode() for text in seeds], reader(parse))
        for name, (parse, seeds) in _TEXTS.items()
    ]
