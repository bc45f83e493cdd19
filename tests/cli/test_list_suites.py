"""`slo-bench list suites` shows whole sentences."""

from __future__ import annotations

import pytest

from slo_bench.cli.options.names import KINDS, _first_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("# One? Two.\n#\n# More.\nname = 1", "One? Two."),
        ("# Who pays, as in Eq. 4 of\n# it? More.\nname = 1", "Who pays, as in Eq. 4 of it?"),
        ("# Who pays\nname = 1", "Who pays"),
        ("# Two lines that\n# name Fig. 3.\n", "Two lines that name Fig. 3."),
    ],
)
def test_first_sentences_are_whole(text, sentences):
    assert _first_sentences(text) == sentences


def test_every_suite_has_a_whole_question():
    for suite in KINDS["suites"]():
        assert str(suite["question"]).endswith((".", "?", "!")), suite
