import pytest

from slo_bench.workloads.shown_paths import short_paths, without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('workload = "/home/me/my traces/t.csv"', 'workload = "…/t.csv"'),
        ('{"/home/me/m/config.json": "ab/cd"}', '{"…/config.json": "ab/cd"}'),
        ("slo-bench run -m /home/me/m --out=/tmp/x/y", "slo-bench run -m …/m --out=…/y"),
        ("learned(/home/me/lengths, online=2)", "learned(…/lengths, online=2)"),
        ("--model ~/m/tiny", "--model …/tiny"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("1 req/s and a/b/c", "1 req/s and a/b/c"),
    ],
)
def test_without_folders_keeps_the_names_of_absolute_paths(text, shown):
    assert without_folders(text) == shown


def test_short_paths_are_as_long_as_tells_them_apart():
    assert short_paths(["/home/me/a/map.json", "/home/me/b/map.json", "roofline"]) == {
        "/home/me/a/map.json": "a/map.json",
        "/home/me/b/map.json": "b/map.json",
        "roofline": "roofline",
    }
    assert short_paths(["/home/me/a.json"]) == {"/home/me/a.json": "a.json"}
    assert short_paths(["/home/a.json", "a.json"]) == {
        "/home/a.json": "home/a.json",
        "a.json": "a.json",
    }
    assert short_paths([]) == {}
