import dataclasses

import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import catalogue, find, load_source
from slo_bench.workloads.workload import Workload

NAMES = [
    "sharegpt",
    "longbench",
    "alpaca",
    "azure-conv",
    "azure-code",
    "mooncake-conversation",
    "arxiv",
    "arena",
    "hot-prefixes",
]


def same_bytes(a: Workload, b: Workload) -> bool:
    for f in dataclasses.fields(Workload):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            if x.tobytes() != y.tobytes():
                return False
        elif f.name == "prefix_blocks":
            if (x is None) != (y is None) or (x is not None and list(x) != list(y)):
                return False
        elif x != y:
            return False
    return True


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"{10 + 2 * k},{k + 1},{2 * k + 1}" for k in range(11)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_catalogue_sources_keep_their_means(name):
    entry = find(name)
    workload = load_source(name).make(rate_rps=5, requests=60_000, seed=2)
    # A mean over 60,000 draws is itself uncertain by cv / 245, and Mooncake's turns go together.
    slack = 0.04 if entry.prefix else 0.025
    if entry.mean_prompt_tokens is not None:
        assert workload.prompt_tokens.mean() == pytest.approx(entry.mean_prompt_tokens, rel=slack)
        assert workload.output_tokens.mean() == pytest.approx(entry.mean_output_tokens, rel=slack)


def test_azure_conv_means_are_within_one_percent():
    entry = find("azure-conv")
    workload = load_source("azure-conv").make(rate_rps=5, requests=400_000, seed=0)
    assert workload.prompt_tokens.mean() == pytest.approx(entry.mean_prompt_tokens, rel=0.01)
    assert workload.output_tokens.mean() == pytest.approx(entry.mean_output_tokens, rel=0.01)


def test_catalogue_entries_name_their_origin():
    for entry in catalogue().values():
        assert entry.origin
        assert entry.licence
        assert entry.title


def test_longbench_source_has_the_output_limits_of_its_tasks():
    workload = load_source("longbench").make(rate_rps=1, requests=3000)
    assert set(workload.max_output_tokens.tolist()) == {32, 64, 128, 512}
    assert (workload.output_tokens <= workload.max_output_tokens).all()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"arrivals": "gamma(cv=3)"},
        {"sessions": "sessions(turns=uniform(1,4))"},
        {"models": "zipf(3, idle_s=30)"},
    ],
)
@pytest.mark.parametrize("name", ["azure-conv", "mooncake-conversation"])
def test_source_with_the_same_seed_repeats(name, settings):
    def make(seed):
        source = load_source(name, **settings)
        slo = parse_slo("e2e=uniform(1,350)")
        return source.make(rate_rps=4, requests=400, seed=seed, slo=slo)

    assert same_bytes(make(7), make(7))
    assert not same_bytes(make(7), make(8))


def test_source_lengths_and_slos_do_not_depend_on_rate_or_process():
    slo = parse_slo("ttft=uniform(1,2)")
    slow = load_source("sharegpt").make(rate_rps=1, requests=500, slo=slo)
    fast = load_source("sharegpt", arrivals="gamma(cv=2)").make(rate_rps=9, requests=500, slo=slo)
    for name in ("prompt_tokens", "output_tokens", "ttft_slo_s"):
        assert (getattr(slow, name) == getattr(fast, name)).all()
    assert (slow.arrival_s != fast.arrival_s).any()


def test_source_rate_scales_drawn_arrivals():
    slow = load_source("alpaca").make(rate_rps=1, requests=50)
    fast = load_source("alpaca").make(rate_rps=10, requests=50)
    np.testing.assert_allclose(slow.arrival_s, fast.arrival_s * 10)


def test_million_requests_are_kept_as_columns():
    workload = load_source("azure-conv").make(rate_rps=10, requests=1_000_000)
    assert len(workload) == 1_000_000
    assert workload.prefix_blocks is None
    assert workload.texts is None


def test_source_of_a_closed_loop_has_its_concurrency():
    source = load_source("alpaca", arrivals="concurrency(16)")
    assert source.closed_loop
    workload = source.make(requests=100)
    assert workload.concurrency == 16
    assert workload.closed
    assert not workload.arrival_s.any()
    with pytest.raises(SloBenchError, match="no rate"):
        source.make(rate_rps=3, requests=100)
    with pytest.raises(SloBenchError, match="needs requests"):
        source.make(duration_s=3)


def test_synthetic_and_overridden_lengths():
    workload = load_source("synthetic", prompt_tokens="512", output_tokens="uniform(5,6)").make(
        rate_rps=1, requests=50
    )
    assert (workload.prompt_tokens == 512).all()
    assert set(workload.output_tokens.tolist()) == {5, 6}
    changed = load_source("sharegpt", output_tokens="fixed(10)").make(rate_rps=1, requests=50)
    plain = load_source("sharegpt").make(rate_rps=1, requests=50)
    assert (changed.output_tokens == 10).all()
    assert (changed.prompt_tokens == plain.prompt_tokens).all()


def test_trace_source_keeps_its_arrivals(trace):
    source = load_source(trace)
    assert source.has_arrivals
    assert source.natural_rate_rps == 0.5
    assert source.make().arrival_s.tolist() == [2.0 * k for k in range(11)]
    assert source.make(replay_speed=4).arrival_s.tolist() == [0.5 * k for k in range(11)]
    assert source.make(rate_rps=2).arrival_s.tolist() == [0.5 * k for k in range(11)]
    assert source.make(requests=3).prompt_tokens.tolist() == [1, 2, 3]
    assert source.make(replay_speed=2, duration_s=3).prompt_tokens.tolist() == [1, 2, 3]
    assert len(source.make(requests=1000)) == 11
    assert source.name == "trace.csv"


def test_trace_source_arrivals_can_be_redrawn(trace):
    source = load_source(trace, arrivals="constant", redraw_arrivals=True)
    assert not source.has_arrivals
    workload = source.make(rate_rps=10, requests=5)
    assert workload.arrival_s.tolist() == [0, 0.1, 0.2, 0.3, 0.4]
    assert workload.prompt_tokens.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(SloBenchError, match="has 11 requests, 12"):
        source.make(rate_rps=10, requests=12)
    with pytest.raises(SloBenchError, match="redraw_arrivals"):
        load_source(trace, arrivals="constant")


def test_data_set_without_arrivals_is_shuffled_and_repeats(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{k},1\n" for k in range(1, 6)))
    source = load_source(path)
    assert not source.has_arrivals
    prompts = source.make(rate_rps=1, requests=10, seed=3).prompt_tokens.tolist()
    assert sorted(prompts[:5]) == sorted(prompts[5:]) == [1, 2, 3, 4, 5]
    assert prompts[:4] == source.make(rate_rps=1, requests=4, seed=3).prompt_tokens.tolist()


def test_slos_of_a_trace_survive_unless_overridden(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,ttft_slo_s\n0,1,1,3\n")
    assert load_source(path).make().ttft_slo_s.tolist() == [3]
    assert load_source(path).make(slo=parse_slo("tpot=1")).ttft_slo_s.tolist() == [3]
    assert load_source(path).make(slo=parse_slo("ttft=1")).ttft_slo_s.tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"requests": 5}, "give it a rate_rps"),
        ({"rate_rps": 0, "requests": 5}, "rate_rps must be positive but is 0"),
        ({"rate_rps": -2.0, "requests": 5}, "rate_rps must be positive but is -2"),
        ({"rate_rps": float("nan"), "requests": 5}, "rate_rps"),
        ({"rate_rps": 1}, "requests or duration_s"),
        ({"rate_rps": 1, "requests": 0}, "requests must be at least 1"),
        ({"rate_rps": 1, "duration_s": -1}, "duration_s"),
        ({"replay_speed": 2, "requests": 5}, "replay_speed is for traces"),
        ({"rate_rps": 1, "requests": 5, "seed": -1}, "seed must not be negative"),
    ],
)
def test_source_refuses_impossible_arguments(arguments, says):
    with pytest.raises(SloBenchError, match=says):
        load_source("sharegpt").make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rate_rps": 1, "replay_speed": 1}, "either rate_rps or replay_speed"),
        ({"replay_speed": 0}, "replay_speed must be positive"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"duration_s": 0}, "duration_s must be positive"),
    ],
)
def test_trace_source_refuses_impossible_arguments(trace, arguments, says):
    with pytest.raises(SloBenchError, match=says):
        load_source(trace).make(**arguments)


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("sharegtp", {}, "did you mean sharegpt.*path of a trace file works too"),
        ("traces/none.csv", {}, "no file traces/none.csv"),
        ("synthetic", {"prompt_tokens": "5"}, "needs prompt_tokens and output_tokens"),
        ("sharegpt", {"arrivals": "poison"}, "did you mean poisson"),
        ("mix(a=sharegpt:1)", {"prompt_tokens": "5"}, "sources of a mix"),
    ],
)
def test_malformed_sources_are_refused(text, settings, says):
    with pytest.raises(SloBenchError, match=says):
        load_source(text, **settings)


def test_trace_source_refuses_other_lengths(trace):
    with pytest.raises(SloBenchError, match="has its own lengths"):
        load_source(trace, prompt_tokens="5")


def test_trace_of_simultaneous_rows_has_no_rate(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n4,1,1\n4,1,1\n")
    assert load_source(path).natural_rate_rps is None
    assert len(load_source(path).make(replay_speed=2)) == 2
    with pytest.raises(SloBenchError, match="no rate to change"):
        load_source(path).make(rate_rps=2)


def test_unknown_source_is_an_unknown_name_error():
    with pytest.raises(UnknownNameError, match="path of a trace file works too"):
        load_source("nothing-like-it")


def test_file_that_a_catalogue_name_hides_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sharegpt").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    assert load_source("sharegpt").notes[0] == "the file sharegpt is not read; ./sharegpt is"
    assert len(load_source("./sharegpt").make()) == 1
    (tmp_path / "sharegpt").unlink()
    assert "is not read" not in load_source("sharegpt").notes[0]
