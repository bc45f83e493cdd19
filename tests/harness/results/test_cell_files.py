import csv
import gzip
import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.results import cell_files
from slo_bench.harness.results.cell_files import Choice, csv_blocks, gzip_csv


def rows_of(columns):
    text = b"".join(csv_blocks(columns)).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_small_table_is_written_as_plain_csv():
    columns = {
        "id": np.array([0, 1, 12]),
        "time_s": np.array([0.5, np.nan, 1234.0000015]),
        "bound_s": np.array([np.inf, 2.0, -0.25]),
        "class": Choice(np.array([1, 0, 1]), ("", "a,b")),
        "met": np.array([True, False, True]),
        "same": np.full(3, np.inf),
    }
    assert b"".join(csv_blocks(columns)).decode() == (
        "id,time_s,bound_s,class,met,same\n"
        '0,0.500000,inf,"a,b",1,inf\n'
        "1,,2.000000,,0,inf\n"
        '12,1234.000002,-0.250000,"a,b",1,inf\n'
    )


def test_table_without_rows_is_a_header():
    assert b"".join(csv_blocks({"a": np.array([], dtype=np.int64)})) == b"a\n"


def test_table_of_constant_columns_keeps_its_rows():
    assert rows_of({"a": np.full(2, np.nan), "b": np.zeros(2, dtype=np.int64)}) == [
        {"a": "", "b": "0"},
        {"a": "", "b": "0"},
    ]


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**50), 2**50),
            st.floats(-1e9, 1e9) | st.sampled_from([math.inf, -math.inf, math.nan]),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_numbers_survive_writing_and_reading(pairs):
    rows = rows_of(
        {"whole": np.array([p[0] for p in pairs]), "time": np.array([p[1] for p in pairs])}
    )
    assert [int(row["whole"]) for row in rows] == [p[0] for p in pairs]
    for row, (_, time) in zip(rows, pairs, strict=True):
        if math.isnan(time):
            assert row["time"] == ""
        elif math.isinf(time):
            assert float(row["time"]) == time
        else:
            assert abs(float(row["time"]) - time) <= 5.01e-7 + abs(time) * 2e-16


def test_table_written_in_blocks_equals_the_whole(monkeypatch):
    columns = {"a": np.arange(10), "b": np.linspace(0, 1, 10)}
    whole = b"".join(csv_blocks(columns))
    monkeypatch.setattr(cell_files, "ROWS_AT_ONCE", 3)
    assert b"".join(csv_blocks(columns)) == whole


def test_gzip_bytes_are_reproducible():
    columns = {"a": np.arange(1000)}
    packed = b"".join(gzip_csv(columns))
    assert packed == b"".join(gzip_csv(columns))
    assert gzip.decompress(packed) == b"".join(csv_blocks(columns))


@pytest.mark.parametrize("text", ['say "hi"', "two\nlines", "ü"])
def test_names_with_separators_are_quoted(text):
    rows = rows_of({"name": Choice(np.array([0, 1]), (text, "plain")), "n": np.array([1, 2])})
    assert [row["name"] for row in rows] == [text, "plain"]
