"""Names in docstrings that are no parameters of their function."""

import pytest

MODULE = '''"""Names such as `gone` in a module's docstring are not read."""

import math

LIMIT_S = 1.0


def serve(requests, until_s):
    """DOCSTRING"""
    kept = [r for r in requests if r.due_s < until_s]

    def inner(total):
        """Uses `kept` and `total`."""

    return kept


class Queue:
    size: int

    def __init__(self, tokens):
        self.tokens = tokens

    def push(self, gone):
        """Adds to `tokens`, within `size`."""
'''


@pytest.fixture
def checked(docstring_names, tmp_path, capsys):
    def check(docstring):
        (tmp_path / "cli").mkdir()
        (tmp_path / "cli" / "a.py").write_text(MODULE.replace("DOCSTRING", docstring))
        code = docstring_names.main(["--root", str(tmp_path)])
        return code, capsys.readouterr().out

    return check


@pytest.mark.parametrize(
    "docstring",
    [
        "Serve `requests` until `until_s`.",
        "`kept` is a name of the body, `math` of the module, `other` of nothing that is called so.",
        "What `Queue.tokens`, `gone()` and ``gone`` are is told elsewhere.",
        "Serve.\n\n    Args:\n        requests: those.\n        until_s: the end.\n    ",
    ],
)
def test_names_in_reach_pass(checked, docstring):
    code, out = checked(docstring)
    assert code == 0, out


@pytest.mark.parametrize(
    ("docstring", "name"),
    [
        ("Serve until `gone` requests have ended.", "gone"),
        ("Serve within `tokens`.", "tokens"),
        ("Serve.\n\n    Args:\n        requests: those.\n        end_s: gone.\n    ", "end_s"),
    ],
)
def test_parameters_of_other_functions_are_reported(checked, docstring, name):
    code, out = checked(docstring)
    assert code == 1
    expected = f"cli/a.py:8: the docstring of serve names {name!r}, which is no parameter of it"
    assert out == expected + "\n"
