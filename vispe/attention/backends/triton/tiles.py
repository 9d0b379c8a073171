"""Tile sizes of the kernels, read from `tiles.json`; nothing is tuned at run time.

Each row of the file is for one compute capability (80: below 9.0, 90: from 9.0), maximum head_dim, dtype ('half',
'float32', or 'tf32x3': float32 with products split for the tensor cores), strip ('float16': distances or no bias;
'float32': tables, with an additional float16 copy in half precision), number of tokens ('short': up to `SHORT`) and
kernel. Its 'from' is 'compiled code' (selected by instructions per score and register spills, without a GPU) or the GPU
that `eval/bench/tune.py` measured it on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import torch


class Tiles(NamedTuple):
    """Queries and keys per tile, warps, pipeline stages and the register limit per thread of one kernel.

    0 registers means no limit; a limit lets more programs share a multiprocessor.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Launch options of Triton."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


Row = TypedDict(
    "Row",
    {
        "sm": int,
        "width": int,
        "dtype": str,
        "strip": str,
        "tokens": str,
        "kernel": str,
        "tiles": list[int],
        "from": str,
    },
)
Key = tuple[str, str, str]  # kernel, 'short' or 'long', 'float16' or 'float32'
Table = dict[Key, dict[int, Tiles]]  # by maximum head_dim
FILE = Path(__file__).with_name("tiles.json")
SHORT = 512  # tokens up to which small tiles are faster, since they have less padding


def read(sm: int, dtype: str) -> Table:
    """Return the rows of the file for a compute capability (80 or 90) and a dtype as `rows_of` names it."""
    table: Table = {}
    for row in cast("list[Row]", json.loads(FILE.read_text())):
        if (row["sm"], row["dtype"]) == (sm, dtype):
            table.setdefault((row["kernel"], row["tokens"], row["strip"]), {})[row["width"]] = Tiles(
                *row["tiles"]
            )
    return table


TABLES = {(sm, dtype): read(sm, dtype) for sm in (80, 90) for dtype in ("half", "float32", "tf32x3")}


def rows_of(dtype: torch.dtype, product: str = "ieee") -> str:
    """Return the dtype name used in the file; `product` is 'ieee' or 'tf32x3'."""
    if dtype != torch.float32:
        return "half"
    return "tf32x3" if product == "tf32x3" else "float32"


def table_for(rows: str, older: bool = False) -> Table:
    """Return the table for `rows` and `older`, see `tiles`."""
    return TABLES[80 if older else 90, rows]


def tiles(
    kernel: str,
    width: int,
    tokens: int,
    rows: str,
    older: bool = False,
    strip: torch.dtype = torch.float16,
) -> Tiles:
    """Return the tiles of a kernel.

    Args:
        kernel: 'forward', 'grad_q', 'grad_kv' or 'grad_bias'.
        width: head_dim, the larger of q and v.
        tokens: number of tokens.
        rows: dtype name in the file, from `rows_of`.
        older: whether the GPU has a compute capability below 9.0.
        strip: dtype of the strip if `rows` is 'half'; float32 for 'grad_bias'.
    """
    bucket = "short" if tokens <= SHORT else "long"
    wide = rows != "half" or strip == torch.float32 or kernel == "grad_bias"
    by_width = table_for(rows, older)[kernel, bucket, "float32" if wide else "float16"]
    size = by_width[min(widest for widest in by_width if width <= widest)]
    # counted: kernels of float32 that need more than 255 registers get 32 from ptxas, which spills most of the rest,
    # unless there is a limit
    return size if size.registers or rows == "half" else size._replace(registers=255)


def cdiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up; that of Triton takes several microseconds outside of kernels."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least `n`; like `triton.next_power_of_2`."""
    return 1 << max(n - 1, 0).bit_length()
