"""Numbers, intervals and tables as text, and values as JSON."""

import json

import numpy as np
import pytest

from vispe.utils.report.figure_style import short_number
from vispe.utils.report.table import interval, json_list, json_value, markdown_table, number, text_table

TABLE = [["what", "mean"], ["rot90", "0.4"], ["x", "12.25"]]


@pytest.mark.parametrize(
    ("value", "plain", "three", "in_figures"),
    [
        (0.0, "0", "0.000", "0.00"),
        (0.12345, "0.123", "0.123", "0.12"),
        (-168.8721, "-169", "-168.872", "-168.87"),
        (9.12e-7, "9.12e-07", "9.1e-07", "9e-7"),
        (4.9e-4, "0.00049", "4.9e-04", "5e-4"),
        (-3e-12, "-3e-12", "-3.0e-12", "-3e-12"),
        (5e-4, "0.0005", "0.001", "5e-4"),
        (float("nan"), "-", "-", "-"),
        (float("inf"), "-", "-", "-"),
    ],
)
def test_numbers_are_formatted(value, plain, three, in_figures):
    assert (number(value), number(value, 3), short_number(value)) == (plain, three, in_figures)


def test_intervals_are_formatted():
    assert interval((0.12345, 9.12e-7), 3) == "0.123 to 9.1e-07"
    assert interval(None) == ""


def test_tables_are_aligned():
    assert markdown_table(TABLE).split("\n") == [
        "| what  |  mean |", "|-------|------:|", "| rot90 |   0.4 |", "| x     | 12.25 |",
    ]  # fmt: skip
    assert markdown_table(TABLE, left=(0, 1)).split("\n")[1:3] == ["|-------|-------|", "| rot90 | 0.4   |"]
    assert text_table(TABLE).split("\n") == ["what    mean", "rot90    0.4", "x      12.25"]
    assert text_table(TABLE, left=(0, 1)).split("\n")[1] == "rot90  0.4"


def test_json_values_replace_nan_by_null():
    value = {"a": np.array([[1.0, np.nan]]), "b": (np.float32(2), np.inf, 3), "c": None, "d": "x", "e": True}
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == {
        "a": [[1.0, None]], "b": [2.0, None, 3], "c": None, "d": "x", "e": True,
    }  # fmt: skip
    assert json_list([1, np.nan]) == [1.0, None]
