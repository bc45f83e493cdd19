"""Conditions of a comparison: all that the schema declares, and what counts as equal."""

import pandas as pd
import pytest

from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.config.setting import (
    ARRIVES,
    COMPARED,
    RUN,
    SERVES,
    Axis,
    declared,
    setting,
)
from slo_bench.reports.compare.conditions import Settings, condition_names, differences

SETTINGS = declared(ExperimentSchema)


def unequal(a, b, *, inputs_a=None, inputs_b=None, **options):
    pair = Settings.of(a, inputs_a), Settings.of(b, inputs_b)
    return differences(*pair, ("a", "b"), **options)


def table(path, value):
    name, dot, field = path.partition(".")
    return {name: {field: value}} if dot else {name: value}


@pytest.mark.parametrize("path", SETTINGS)
def test_each_setting_of_the_schema_is_told_by_its_role(path):
    conditions = unequal(table(path, "one"), table(path, "another")).settings
    is_told = SETTINGS[path].condition or SETTINGS[path].role == "deployment"
    assert conditions == ({path: ("one", "another")} if is_told else {})


def test_every_condition_of_a_workload_is_one_but_what_rows_are_matched_by():
    workload = {path for path, declaration in SETTINGS.items() if declaration.role == "workload"}
    by_row = {"rates", "refine", "load_factors", "replay_speeds", "seeds", "seed"}
    assert workload - set(condition_names()) == by_row - {"rates"}
    assert {"failures", "adapters", "slo", "backend", "client.api"} < set(condition_names())


def test_a_new_setting_is_found_by_its_panel():
    class More(ExperimentSchema):
        weather: Axis[str | None] = setting(ARRIVES, "Weather.")
        rack: Axis[str | None] = setting(SERVES, "Rack.")
        fan: Axis[str | None] = setting(SERVES, "Fan.", role="workload")
        note: str | None = setting(RUN, "Note.")
        choice: str | None = setting(COMPARED, "Choice.")

    assert {"weather", "fan"} == set(condition_names(More)) - set(condition_names())
    values = dict.fromkeys(("weather", "rack", "fan", "note", "choice"), "x")
    conditions = unequal(values, {}, schema=More)
    assert conditions.settings == dict.fromkeys(("weather", "rack", "fan"), ("x", "none"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"warmup_s": 1}, {"warmup_s": 1.0}),
        ({"requests": 100}, {"requests": [100.0]}),
        ({"slo": "ttft=1,tpot=0.15"}, {"slo": "tpot=.150, ttft=1.0"}),
        ({"slo": "chat:ttft=1"}, {"slo": {"chat": {"ttft": 1}}}),
        ({"adapters": "zipf(16, exponent=1)"}, {"adapters": "zipf(16,exponent=1)"}),
        ({"workload": "/a/trace.csv"}, {"workload": "/b/trace.csv"}),
        ({"client": {"token_ids": [1000, 30000]}}, {}),
        ({"overlong_requests": "reject"}, {}),
        ({"name": "a", "records": "csv", "seeds": 2, "rates": [1]}, {"name": "b", "rates": [2]}),
        ({"server": {"validated": True}}, {}),
    ],
)
def test_values_that_mean_the_same_are_equal(a, b):
    conditions = unequal(a, b)
    assert not conditions.settings
    assert not any("does not know" in note for note in conditions.notes)


def test_files_are_told_by_their_content():
    a, b = {"workload": "/a/t.csv"}, {"workload": "/b/t.csv"}
    of_a = {"/a/t.csv": "1f"}
    conditions = unequal(a, b, inputs_a=of_a, inputs_b={"/b/t.csv": "2e"})
    assert conditions.settings == {"workload": ("/a/t.csv", "/b/t.csv")}
    changed = unequal(a, a, inputs_a=of_a, inputs_b={"/a/t.csv": "2e"})
    assert changed.settings == {"workload": ("/a/t.csv", "/a/t.csv (another content)")}
    renamed = unequal(a, {"workload": "/b/u.csv"}, inputs_a=of_a, inputs_b={"/b/u.csv": "1f"})
    assert not renamed.settings


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"workload": "mix(t.csv:0.5, sharegpt:0.5)"}, "/a/t.csv"),
        ({"workload": "mix(../data/t.csv:0.5, sharegpt:0.5)"}, "/a/data/t.csv"),
        ({"model": "/a/llama"}, "/a/llama/config.json"),
        ({"client": {"tokenizer": "/a/data"}}, "/a/data/tokenizer.json"),
        ({"workload": ["sharegpt", "/a/t.csv"]}, "/a/t.csv"),
    ],
)
def test_files_in_a_mix_in_a_folder_and_among_several_values_are_told_by_content(table, path):
    before = {path: "1f", "/b/llama": "00"}
    assert not unequal(table, table, inputs_a=before, inputs_b=before).settings
    assert not unequal(table, table, inputs_a=before, inputs_b={}).settings
    (texts,) = unequal(table, table, inputs_a=before, inputs_b={path: "2e"}).settings.values()
    assert texts[1] == f"{texts[0]} (another content)"


def test_files_of_other_settings_do_not_count():
    table = {"workload": "sharegpt", "model": "llama-3.1-8b"}
    before = {"/a/sharegpt/p.toml": "1f", "/a/llama-3.1-8b/p.toml": "1f"}
    after = dict.fromkeys(before, "2e")
    assert not unequal(table, table, inputs_a=before, inputs_b=after).settings


@pytest.mark.parametrize(
    ("path", "a", "b"),
    [
        ("client.token_ids", [1000, 30000], [5, 50]),
        ("server.args", ["--one=1", "--two=2"], ["--one=1"]),
    ],
)
def test_lists_of_the_tables_are_no_axes_and_are_told(path, a, b):
    assert set(unequal(table(path, a), table(path, b)).settings) == {path}


def test_values_that_no_schema_allows_are_unequal():
    odd = {"slo": 3, "parameters": {"vllm": 3}, "client": {"body": {"n": 1}}}
    differences = unequal(odd, {})
    assert differences.settings == {
        "slo": ("3", "ttft=1,tpot=0.15"),
        "client.body": ("n=1", "none"),
    }
    assert not differences.parameters


def test_what_an_older_or_newer_file_lacks_is_named():
    conditions = unequal({"overlong_requests": "truncate", "colour": "red"}, {})
    assert conditions.settings == {"overlong_requests": ("truncate", "reject")}
    assert conditions.notes == (
        "b does not name overlong_requests: taken as the default.",
        "a has settings that this version does not know, and that are not compared: colour.",
    )


def test_api_that_a_probe_chose_is_a_condition():
    chosen = Settings.of({}, {}).with_api(pd.DataFrame({"api": ["chat", "chat"]}))
    default = Settings.of({}, {}).with_api(pd.DataFrame({"rate_rps": [1]}))
    assert differences(chosen, default, ("A", "B")).settings == {
        "client.api": ("chat", "completions")
    }
