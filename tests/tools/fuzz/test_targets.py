"""A few hundred broken versions of every kind of input; campaign.py tries as many as one likes."""

import contextlib
import importlib.util
import re
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings

from slo_bench.harness.load_generator.http.answers import unchunk
from slo_bench.harness.load_generator.http.connection import MOST_BODY_BYTES, Connection
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.parsing import parse_event, parse_json, parse_toml
from slo_bench.workloads.readers.formats import read


def _tool(name):
    """A module of `tools/fuzz`, which is no package, so it is loaded by its path."""
    path = Path(__file__).parents[3] / "tools" / "fuzz" / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


mutations, fuzz_targets = _tool("mutations"), _tool("targets")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return fuzz_targets.every_target(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
def test_fuzz_targets_accept_their_seeds(targets):
    for target in targets:
        for good in target.seeds:
            target.read(good)


@pytest.mark.slow
@settings(max_examples=15)
@given(mutations.draws)
def test_mutated_seeds_are_refused_without_a_traceback(targets, drawn):
    for target in targets:
        if not target.slow:
            with contextlib.suppress(SloBenchError):
                target.read(mutations.edited(target.seeds[drawn[0] % len(target.seeds)], drawn))


@pytest.mark.slow
def test_mutated_seeds_of_slow_targets_are_refused_without_a_traceback(targets):
    for target in targets:
        if target.slow:
            with contextlib.suppress(SloBenchError):
                target.read(mutations.edited(target.seeds[0], b"\x07\x40\x00\x08\x0a"))


@pytest.mark.parametrize("size", [b"-8", b"-4", b"+5", b"1_0", b"0x5", b" 5", b"", b"f" * 17])
def test_chunk_size_other_than_hexadecimal_digits_is_refused(size):
    body = b"3\r\nabc\r\n" + size + b"\r\nabcde\r\n0\r\n\r\n"
    unchunked = unchunk([body], array("d", [0.0]))
    assert unchunked.problem
    assert unchunked.pieces == [b"abc"]


def test_answer_beyond_the_body_limit_is_cut_off(monkeypatch):
    pool, wire = fuzz_targets.http._Pool(), fuzz_targets.http._Wire()
    connection = Connection(pool)
    connection.connection_made(wire)
    exchange = fuzz_targets.http.Exchange(0, 0, 0.0, False)
    connection.send(exchange)
    connection.data_received(fuzz_targets.http._HEAD)
    piece = b"x" * (8 << 20)
    while not wire.closed:
        connection.data_received(piece)
        exchange.pieces.clear()  # this test needs no memory
        assert exchange.body_bytes <= MOST_BODY_BYTES + len(piece)
    assert exchange.fault is RequestFault.MALFORMED
    assert "more than 256 MiB" in exchange.detail


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '"\ud800', r'"\ud800"', r'"\uDC00"'])
def test_text_that_overflows_the_parsers_is_no_json_and_no_toml(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
    with pytest.raises(ValueError, match=r"."):
        parse_toml(f"a = {text}")


def test_surrogate_pairs_are_read_and_a_half_is_allowed_in_a_stream():
    assert parse_json(rb'["\ud83d\ude00", "\\ud800"]') == ["\N{GRINNING FACE}", r"\ud800"]
    assert parse_event(r'"\ud83d"') == "\ud83d"


@pytest.mark.parametrize("target", ["device map", "topology", "profile.toml of a profile"])
def test_numbers_beyond_float_are_refused_without_a_traceback(targets, target):
    """In the place of each number in turn."""
    (fuzz_target,) = (candidate for candidate in targets if candidate.name == target)
    good = fuzz_target.seeds[0]
    places = [match.span() for match in re.finditer(rb"(?<=[:=] )\d[\d.]*(?=[,\n}])", good)]
    assert places
    for begin, end in places:
        with contextlib.suppress(SloBenchError):
            fuzz_target.read(good[:begin] + b"9" * 400 + good[end:])


def test_trace_with_more_prefix_blocks_than_the_prompt_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,prefix_blocks\n8,1,0-99999999999\n")
    with pytest.raises(SloBenchError, match="more blocks than its 8 prompt tokens"):
        read(path)
