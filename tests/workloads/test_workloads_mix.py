import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source


def test_mix_has_shares_classes_and_slos():
    source = load_source("mix(chat=azure-conv:3, code=azure-code:1)")
    workload = source.make(rate_rps=5, requests=40_000, slo=parse_slo("ttft=1;code:ttft=3"), seed=1)
    assert workload.class_names == ("chat", "code")
    assert workload.class_index.mean() == pytest.approx(0.25, abs=0.01)
    assert set(workload.ttft_slo_s[workload.class_index == 1]) == {3.0}
    for k, mean in ((0, 1180), (1, 2031)):
        mine = workload.prompt_tokens[workload.class_index == k]
        assert mine.mean() == pytest.approx(mean, rel=0.05)
    assert (np.diff(workload.arrival_s) >= 0).all()


def test_mix_names_a_member_after_its_source(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "abcd", "output_tokens": 7}\n')
    workload = load_source(f"mix(alpaca:0.5, own={path}:0.5)").make(rate_rps=1, requests=200)
    assert workload.class_names == ("alpaca", "own")
    from_file = workload.class_index == 1
    assert set(workload.output_tokens[from_file]) == {7}
    assert {workload.texts[row] for row in np.flatnonzero(from_file)} == {"abcd"}
    assert {workload.texts[row] for row in np.flatnonzero(~from_file)} == {None}


def test_adding_a_class_to_a_mix_keeps_the_lengths_of_others():
    two = load_source("mix(a=alpaca:1, b=arxiv:1)").make(rate_rps=1, requests=300)
    three = load_source("mix(a=alpaca:1, b=arxiv:1, c=gsm8k:1)").make(rate_rps=1, requests=300)
    n = int((three.class_index == 0).sum())
    assert (
        two.prompt_tokens[two.class_index == 0][:n].tolist()
        == three.prompt_tokens[three.class_index == 0].tolist()
    )


def test_collocated_equals_a_mix_of_generation_and_embedding():
    generation = "synthetic(prompt=uniform(100,500),output=uniform(200,500)"
    long = (
        f"mix(chat={generation},priority=1):3,batch={generation}):3,"
        "embed=embed(texts=uniform(16,128),tokens=512):14)"
    )
    short, spelt = (
        load_source(t).make(rate_rps=5, requests=400) for t in ("collocated(3:7)", long)
    )
    for column in (
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "request_type",
        "num_inputs",
        "priority",
    ):
        assert getattr(short, column).tolist() == getattr(spelt, column).tolist()
    assert short.class_names == ("chat", "batch", "embed")
    source = load_source("collocated(1:1, output=7, texts=3, tokens=10)")
    other = source.make(rate_rps=1, requests=50)
    assert set(other.output_tokens[other.request_type == 0].tolist()) == {7}
    assert set(other.prompt_tokens[other.request_type == 1].tolist()) == {30}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("collocated(3)", r"write collocated\(1:9\)"),
        ("collocated(1:0)", "must be positive"),
        ("collocated(1:9, input=3)", r"write collocated\(1:9\)"),
        ("mix()", "one class at least"),
        ("mix(alpaca)", "lacks its share"),
        ("mix(alpaca:0)", "share of alpaca must be positive"),
        ("mix(alpaca:x)", "must be a number"),
        ("mix(alpcaa:1)", "did you mean alpaca"),
        ("mix(alpaca:1, alpaca:2)", "no class name twice"),
        ("mix(mooncake-conversation:1)", "cannot be mixed"),
        ("mix(m=mix(a=alpaca:1):1)", "another mix"),
        ("mix(a=alpaca:1", "cannot read|not closed"),
    ],
)
def test_malformed_mixes_are_refused(text, says):
    with pytest.raises(SloBenchError, match=says):
        load_source(text)
