"""Text tables, number formatting and conversion to JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Table = Sequence[Sequence[str]]


def number(value: float | None, decimals: int | None = None) -> str:
    """Return a number as text: three significant digits, or fixed decimals; '-' for NaN, '' for None.

    Args:
        value: the number; infinities count as NaN.
        decimals: digits after the point, 2 or more; numbers that would be rounded to 0 use scientific notation.

    >>> [number(v) for v in (0.12345, 1234.5, float("nan"), None)]
    ['0.123', '1.23e+03', '-', '']
    >>> number(-168.87234, 3), number(9.12e-7, 3)
    ('-168.872', '9.1e-07')
    """
    if value is None or not math.isfinite(value):
        return "" if value is None else "-"
    if decimals is None:
        return f"{value:.3g}"
    tiny = 0 < abs(value) < 0.5 * 10**-decimals
    return f"{value:.{decimals - 2}e}" if tiny else f"{value:.{decimals}f}"


def interval(ends: tuple[float, float] | None, decimals: int | None = None) -> str:
    """Return 'low to high' with both bounds formatted by `number`; '' for None.

    >>> interval((0.1234, 0.5)), interval(None)
    ('0.123 to 0.5', '')
    """
    return "" if ends is None else " to ".join(number(end, decimals) for end in ends)


def capitalize(sentence: str) -> str:
    """Return a sentence with its first letter capitalised.

    >>> capitalize("no linear position")
    'No linear position'
    """
    return sentence[0].upper() + sentence[1:]


def markdown_table(table: Table, left: Sequence[int] = (0,)) -> str:
    """Return a text table (header first) as Markdown with aligned columns, left-aligned for those in `left`.

    Example:
        >>> print(markdown_table([["name", "mean"], ["rot90", "0.4"]]))
        | name  | mean |
        |-------|-----:|
        | rot90 |  0.4 |
    """
    widths, lines = _padded(table, left)
    rule = "|".join("-" * (w + 1) + ("-" if i in left else ":") for i, w in enumerate(widths))
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{rule}|", *body])


def text_table(table: Table, left: Sequence[int] = (0,)) -> str:
    """Return a text table (header first) with columns separated by two spaces, left-aligned for those in `left`.

    >>> print(text_table([["name", "mean"], ["rot90", "0.4"]]))
    name   mean
    rot90   0.4
    """
    return "\n".join("  ".join(cells).rstrip() for cells in _padded(table, left)[1])


def json_value(value: Any) -> Any:
    """Return a value as JSON types: arrays and tuples as lists, non-finite numbers as None.

    Objects with a `to_dict` method are converted by it.

    >>> json_value({"a": np.array([1.5, np.nan]), "b": (1, "c")})
    {'a': [1.5, None], 'b': [1, 'c']}
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: json_value(v) for key, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_entries(owner: object, *names: str) -> dict[str, Any]:
    """Return attributes of a result by name, as JSON values.

    >>> json_entries(slice(1, 9), "start", "stop", "step")
    {'start': 1, 'stop': 9, 'step': None}
    """
    return {name: json_value(getattr(owner, name)) for name in names}


def json_list(values: np.ndarray | Sequence[float]) -> list[Any]:
    """Return an array as nested lists of floats; non-finite numbers become None.

    >>> json_list(np.array([[1, 2]]))
    [[1.0, 2.0]]
    """
    return json_value(np.asarray(values, dtype=np.float64))


def _padded(table: Table, left: Sequence[int]) -> tuple[list[int], list[list[str]]]:
    """Return the widths of the columns, and the cells padded to them."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return widths, [[side(c, w) for side, c, w in zip(sides, row, widths, strict=True)] for row in table]
