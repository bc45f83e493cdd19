"""The profile format: what is written is read back, what is wrong is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slo_bench.predictors.profiles.importers import recognise
from slo_bench.predictors.profiles.profile_format import (
    Fitted,
    Profile,
    Source,
    read_profile,
    table_of,
    write_profile,
)
from slo_bench.workloads.errors import FileFormatError, SloBenchError

PROFILE = Profile(
    model="llama-3-8b",
    gpu="a100-80g",
    tp=2,
    multiprocessors=108,
    best="nine",
    sources=(Source("a project", 'a "path"', licence="MIT", note="a note"),),
    tables={
        "linear": table_of("linear", [("qkv", 1, 32, 10.5), ("qkv", 16, 32, 11.25)]),
        "attention": table_of("attention", [(0, 0, 1, 16, 32, 9.125), (16, 0, 0, 0, 32, 12.0)]),
    },
    fits={"nine": Fitted({"c0": 1.25, "c1": 0.1}, held_out_percent=3.5)},
)


def same(a: Profile, b: Profile) -> bool:
    plain = ("model", "gpu", "tp", "weight_dtype", "kv_dtype", "multiprocessors", "best", "sources")
    assert all(getattr(a, name) == getattr(b, name) for name in plain)
    assert list(a.tables) == list(b.tables)
    for kind, table in a.tables.items():
        for name, column in table.columns.items():
            np.testing.assert_array_equal(column, b.tables[kind].columns[name])
        for name, words in table.words.items():
            assert words.tolist() == b.tables[kind].words[name].tolist()
    for name, fitted in a.fits.items():
        assert dict(fitted.coefficients) == dict(b.fits[name].coefficients)
    return True


@pytest.mark.parametrize("target", ["profile.toml", "a folder", "name.with.dots.toml"])
@pytest.mark.parametrize("tables", ["csv", "parquet"])
def test_profile_survives_its_files(tmp_path, target, tables):
    if tables == "parquet":
        pytest.importorskip("pyarrow")
    header = write_profile(PROFILE, tmp_path / target, tables)
    assert header.is_file()
    read = read_profile(tmp_path / target)
    assert same(PROFILE, read)
    assert read.fits["nine"].held_out_percent == 3.5
    assert np.isnan(read.fits["nine"].extrapolated_percent)


def test_profiles_in_one_folder_do_not_share_tables(tmp_path):
    write_profile(PROFILE, tmp_path / "a.toml")
    write_profile(dataclasses.replace(PROFILE, tables={}), tmp_path / "b.toml")
    assert read_profile(tmp_path / "a.toml").tables
    assert not read_profile(tmp_path / "b.toml").tables


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("format = 1", "format = 2"), "must begin with format = 1"),
        (('model = "llama-3-8b"', ""), "model is missing"),
        (("tp = 2", 'tp = "2"'), "tp must be a whole number"),
        (("tp = 2", "tp = 0"), "tp must be at least 1"),
        (("tp = 2", "tpp = 2"), "unknown field 'tpp'; did you mean tp"),
        (("[table.linear]", "[table.lineer]"), "unknown table 'lineer'"),
        (("file = ", "fill = "), "needs file = NAME"),
        (("format = 1", "format = "), "no TOML"),
    ],
)
def test_profile_header_with_an_error_is_refused(tmp_path, change, problem):
    header = write_profile(PROFILE, tmp_path / "p.toml")
    header.write_text(header.read_text().replace(*change))
    with pytest.raises(FileFormatError, match=r"p\.toml") as error:
        read_profile(header)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("time_us", "time_ms"), "has no column 'time_us'"),
        (("10.5", "fast"), "could not convert"),
        (("10.5", "-1"), "time_us must be from 0 on but is -1.0 (%s, line 2)"),
        (("qkv,16,32,11.25", "qkv,16"), "has 2 fields, not 4 (%s, line 3)"),
        (("qkv,16,32,11.25", "qkv,\r16,32,1"), "not readable as CSV: new-line character"),
    ],
)
def test_profile_table_with_an_error_is_refused_with_its_line(tmp_path, change, problem):
    header = write_profile(PROFILE, tmp_path / "p.toml")
    table = tmp_path / "p.linear.csv"
    table.write_text(table.read_text().replace(*change))
    with pytest.raises(FileFormatError) as error:
        read_profile(header)
    assert problem.replace("%s", str(table)) in str(error.value)


@pytest.mark.parametrize("name", ["p.json", "p.yaml", "p.csv"])
def test_profile_is_not_written_as_another_format(tmp_path, name):
    with pytest.raises(SloBenchError, match=r"name .*p\.toml, or a folder"):
        write_profile(PROFILE, tmp_path / name)


def test_missing_profile_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="cannot be read as a profile"):
        read_profile(tmp_path / "nothing.toml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileFormatError, match=r"profile\.toml"):
        read_profile(tmp_path / "folder")


def test_joined_profiles_complete_each_other():
    linear = dataclasses.replace(
        PROFILE, tables={"linear": PROFILE.tables["linear"]}, fits={}, best=""
    )
    other = table_of("linear", [("qkv", 1, 32, 99.0)])
    both = linear.joined(
        dataclasses.replace(PROFILE, tables={**PROFILE.tables, "linear": other}, fits={})
    )
    assert set(both.tables) == {"linear", "attention"}
    assert both.tables["linear"]["time_us"].max() < 99  # its own is kept
    assert len(both.sources) == 2
    with pytest.raises(SloBenchError, match="already has all"):
        both.joined(linear)
    with pytest.raises(SloBenchError, match="tp is 2 here and 1 there"):
        linear.joined(dataclasses.replace(PROFILE, tp=1))


@pytest.mark.parametrize(
    ("section", "text", "name"),
    [
        ("models", "meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("models", "meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("models", "Qwen/Qwen3-32B", "qwen3-32b"),
        ("models", "llama2-70b", "llama-2-70b"),
        ("models", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("models", "codellama/CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("models", "facebook/opt-13b", "opt-13b"),
        ("gpus", "RTXPRO6000", "rtx-pro-6000"),
        ("gpus", "NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("gpus", "a100", "a100-80g"),
        ("gpus", "NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("gpus", "NVIDIA H100 80GB HBM3", "h100-80g"),
        ("gpus", "a100-80gb", "a100-80g"),
        ("gpus", "a40", "a40"),
    ],
)
def test_recognise_finds_names_of_other_projects(section, text, name):
    assert recognise(section, text) == name


def test_recognise_refuses_unknown_names():
    with pytest.raises(SloBenchError, match="no gpu of the catalogue looks like 'warp drive'"):
        recognise("gpus", "warp drive")
    with pytest.raises(SloBenchError, match="no model"):
        recognise("models", "")
