"""Which names count as vague, and what the budget demands."""

import subprocess

import pytest

SOURCE = """
found: int = 1

class Row:
    told: str

    def of(self, known, *, rows):
        for at, cell in enumerate(rows):
            lambda one: one
        try:
            profile = [asked for asked in known]
        except OSError as seen:
            raise seen
        return profile, found
"""
VAGUE = ["found", "told", "known", "at", "one", "asked", "seen"]


def test_bindings_are_assignments_parameters_and_targets(local_names):
    bindings = list(local_names.bindings(SOURCE, "a.py"))
    assert sorted(b.name for b in bindings if b.name in local_names.VAGUE) == sorted(VAGUE)
    others = {b.name for b in bindings} - local_names.VAGUE
    assert sorted(others) == ["cell", "profile", "rows"]
    assert [b.line for b in bindings if b.name == "asked"] == [11]


@pytest.mark.parametrize(
    ("budget", "status", "mend"),
    [(6, 1, "name what the values are"), (7, 0, ""), (8, 0, "can be lowered")],
)
def test_more_vague_names_than_the_budget_fail(
    local_names, tmp_path, capsys, monkeypatch, budget, status, mend
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "package.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_package.py").write_text("rows = 1\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    monkeypatch.setattr(local_names, "BUDGET", {"package": budget, "tests": 0})
    assert local_names.main(["--root", str(tmp_path), "--list"]) == status
    printed = capsys.readouterr().out
    assert "package.py:11 asked" in printed
    assert "package: 7 of 10 names are vague (70.00%)" in printed
    assert "tests: 0 of 1 names are vague" in printed
    assert mend in printed
