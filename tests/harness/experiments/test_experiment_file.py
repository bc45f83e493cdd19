import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.experiments.config.experiment_file import line_of, read_toml, to_toml
from slo_bench.workloads.errors import FileFormatError

SCALARS = (
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.integers(-(2**60), 2**60)
    | st.booleans()
    | st.floats(allow_nan=False)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
INLINE = SCALARS | st.lists(SCALARS | st.dictionaries(TEXT, SCALARS, max_size=2), max_size=3)
TABLES = st.dictionaries(TEXT, INLINE | st.dictionaries(TEXT, INLINE, min_size=1), max_size=4)


@given(TABLES)
def test_experiment_toml_reads_back_as_written(table):
    assert tomllib.loads(to_toml(table)) == table


def test_experiment_toml_is_laid_out_for_reading():
    table = {
        "parameters": {"vllm": {"max_num_seqs": 128}},
        "name": "night",
        "tp": None,
        "rates": [1.0, 2.5],
        "slo": [{"ttft": 1, "chat": {"ttft": 0.5}}],
    }
    assert to_toml(table) == (
        'name = "night"\n'
        "rates = [\n    1.0,\n    2.5,\n]\n"
        "slo = [\n    { ttft = 1, chat = { ttft = 0.5 } },\n]\n"
        "\n"
        "[parameters.vllm]\n"
        "max_num_seqs = 128\n"
    )


TEXTS = """\
name = "x"  # tp = 3
tp = 2

[parameters.vllm]
max_num_seqs = 1
[parameters."my system"]
depth = 2
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("tp", 0), 2),
        (("parameters", "vllm", "max_num_seqs", 0), 5),
        (("parameters", "vllm", "other"), 4),
        (("parameters", "my system", "depth"), 7),
        (("nowhere",), None),
    ],
)
def test_line_of_a_setting_is_found(location, line):
    assert line_of(TEXTS, location) == line


def test_toml_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\nrates = 1\n', "utf-8-sig")
    assert read_toml(path)[0] == {"name": "x", "rates": 1}


def test_invalid_toml_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("a = 1\nb = = 2\n")
    with pytest.raises(FileFormatError, match=r"is not TOML: .*a\.toml, line 2"):
        read_toml(path)
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")
    path.write_bytes(b"\xff")
    with pytest.raises(FileFormatError, match="is not UTF-8"):
        read_toml(path)
