"""Short labels: distinct, short, and of what differs."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.reports.figures.labels import LONGEST, SHORT, is_letter, labels
from slo_bench.reports.pages.answers_page import failed_text
from slo_bench.reports.pages.summary_page import cut_answers_text

MIX = (
    "mix(chat=synthetic(prompt=uniform(100,500),output={output},priority=1):{shares[0]},"
    "embed=embed(texts=uniform(16,128),tokens=512):{shares[1]})"
)


def mix(first, second, output="uniform(200,500)"):
    return MIX.format(output=output, shares=(first, second))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["sharegpt", "azure-conv"], ["sharegpt", "azure-conv"]),
        (["lognormal(mean=17.02,sigma=0.51)", "lognormal(mean=340.48,sigma=0.75,max=1900)"],
         ["mean 17.02", "mean 340.48"]),
        ([mix(1, 9), mix(5, 5)], ["chat:embed 1:9", "chat:embed 5:5"]),
        (["collocated(1:9)", "collocated(9:1)", "collocated(9:1,output=uniform(1000,2000))"],
         ["ratio 1:9", "ratio 9:1", "ratio 9:1, output uniform(1000,2000)"]),
        ([mix(1, 9), mix(5, 5), mix(5, 5, "uniform(1000,2000)")],
         ["chat:embed 1:9", "chat:embed 5:5", "chat:embed 5:5, chat output uniform(1000,2000)"]),
        (["mix(azure-conv:0.75,azure-code:0.25)", "mix(azure-conv:0.5,azure-code:0.5)"],
         ["azure-conv:azure-code 0.75:0.25", "azure-conv:azure-code 0.5:0.5"]),
        (["mix(name=light load,chat=sharegpt:1)", "mix(name=heavy,chat=sharegpt:9)"],
         ["light load", "heavy"]),
        (["chat:ttft=1,tpot=0.15; batch:ttft=10", "chat:ttft=2,tpot=0.15; batch:ttft=10"],
         ["chat ttft 1", "chat ttft 2"]),
        (["sharegpt", "mix(azure-conv:0.75,azure-code:0.25)"], ["sharegpt", "mix"]),
        ([mix(1, 9)], ["mix(…)"]),
        (["sharegpt", "x" * 99, "(" * 99], ["A", "B", "C"]),
    ],
)  # fmt: skip
def test_labels_shorten_texts_to_what_differs(texts, expected):
    assert list(labels(texts).values()) == expected


def test_letter_labels_continue_after_z():
    letters = list(labels([f"{n}{'x' * 99}" for n in range(30)]).values())
    assert letters[25:28] == ["Z", "AA", "AB"]
    assert all(map(is_letter, letters))


@given(st.lists(st.text(alphabet="ab1=,:;()", max_size=40), min_size=1, max_size=6, unique=True))
def test_labels_are_distinct_and_short_whatever_the_texts(texts):
    labelled = labels(texts)
    assert list(labelled) == texts
    assert len(set(labelled.values())) == len(texts)
    for text, label in labelled.items():
        assert len(label) <= (SHORT if label == text else LONGEST)


@pytest.mark.parametrize(
    ("columns", "summary"),
    [
        ({}, ""),
        ({"fault_status": [0.0, 0.0], "fault_detail": ["", ""]}, ""),
        ({"fault_status": [0.0, 4.0]}, "4 of 60 requests failed"),  # of an older version
        (
            {"fault_status": [0.0, 4.0], "fault_detail": ["", "status: 400: long"]},
            "4 of 60 requests failed (status: 400: long)",
        ),
        (
            {
                "fault_status": [3.0, 0.0],
                "fault_reset": [0.0, 4.0],
                "fault_detail": ["status: 400: long", ""],
            },
            "7 of 60 requests failed (most in one run: status: 400: long)",
        ),
    ],
)
def test_summary_counts_failed_requests_with_their_reason(columns, summary):
    assert failed_text(pd.DataFrame({"requests": [30, 30], **columns})) == summary


def test_systems_that_cut_answers_are_named_with_how_many():
    cells = pd.DataFrame(
        {
            "system": ["slo-odbs", "slo-odbs", "s3", "odbs"],
            "requests": [100, 100, 100, 50],
            "count_answers_cut": [24.0, 6.0, float("nan"), 0.0],
        }
    )
    assert cut_answers_text(cells) == "slo-odbs cut 30 of 200 answers"
    assert cut_answers_text(cells.drop(columns="count_answers_cut")) == ""
    variants = cells.assign(variant=["UA", "fair", "UA", "fair"])
    assert cut_answers_text(variants) == "UA cut 24 of 200 answers, fair cut 6 of 150 answers"
