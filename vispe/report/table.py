"""Tables of plain text and of Markdown, and lists for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def aligned(table: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a table of text, heads first, as Markdown with aligned columns; those of `left` are flush left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        + " |"
        for cells in table
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i in left else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def json_list(values: np.ndarray) -> list[Any]:
    """Return an array as nested lists of JSON values; what is not finite becomes None."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [json_list(row) for row in array]
    return [float(v) if np.isfinite(v) else None for v in array]
