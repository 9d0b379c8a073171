"""Untrusted specs: any text is parsed, or raises a short error, at little cost."""

import contextlib
import time

import pytest

from tests.cases import cases
from vispe.encodings.spec import MAX_SPEC_DEPTH, MAX_SPEC_LENGTH, parse_text
from vispe.errors import OptionError, VispeError

HOSTILE = {
    "spaces": "rope_axial(a=" + " " * 200_000 + ")",
    "inner spaces": "rope_axial(a=b" + " " * 20_000 + "c!)",
    "leading spaces": " " * 30_000 + "!",
    "nested specs": "a(b=" * 300 + "1" + ")" * 300,
    "nested lists": "a(b=" + "[" * 900 + "]" * 900 + ")",
    "nested dicts": "a(b=" + "{1:" * 150 + "1" + "}" * 150 + ")",
    "minus signs": "a(b=" + "-" * 30_000 + "1!)",
    "minus signs, long": "a(b=" + "-" * 100_000 + "1)",
    "not": "a(b=" + "not " * 8_000 + "1)",
    "powers": "a(b=" + "9**" * 1_000 + "9)",
    "open brackets": "a(" * 10_000,
    "quotes": "a(b='" * 5_000,
    "letters": "a(b=" + "é" * 30_000 + "!)",
    "NUL": "a(b=\x00)",
    "surrogate": "a(b=\udcff!)",
}


@cases("name", HOSTILE)
def test_a_hostile_spec_raises_a_short_error(name):
    start = time.process_time()
    with pytest.raises(OptionError) as error:
        parse_text(HOSTILE[name])
    assert time.process_time() - start < 5  # the quadratic ones took minutes
    assert "\n" not in str(error.value)


@cases("text", ["a(b=" + "-" * 2_000 + "1)", "+".join(["rope_axial"] * 2_000), "a(b=" + "9" * 4_300 + ")"])
def test_a_long_spec_is_parsed_or_raises(text):
    with contextlib.suppress(VispeError):
        assert parse_text(text)


def test_specs_within_the_limits_are_parsed():
    deep = "a(b=" * MAX_SPEC_DEPTH + "1" + ")" * MAX_SPEC_DEPTH
    assert parse_text(deep)[0][0] == "a"
    values = ",".join(["0.12345678901234"] * 1_500)
    assert len(values) < MAX_SPEC_LENGTH
    assert len(parse_text(f"longrope(factor=[{values}])")[0][1]["factor"]) == 1_500
    assert parse_text(" rope_axial ( a = b , c:[ 1, x ] ) + none ") == [
        ("rope_axial", {"a": "b", "c": [1, "x"]}),
        ("none", {}),
    ]
