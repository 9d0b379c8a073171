"""How large the tiles of each kernel are: a table in `tiles.json`, nothing is tuned at run time.

Each row of the file says for which compute capability (80: below 9.0, 90: from there on), widest head, dtype ('half',
'float32', or 'tf32x3': float32 whose products are split for the tensor cores), strip ('float16': that of distances, or
none; 'float32': that of tables, beside which half precision has a copy), number of tokens ('short': up to `SHORT`) and
kernel it is, and where it comes from: 'compiled code' (chosen by instructions per score and spills, without a GPU) or
the GPU that `eval/bench/tune.py` measured it on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import torch


class Tiles(NamedTuple):
    """Queries and keys per tile, warps and pipeline stages of one kernel, and the most registers of a thread.

    With 0 registers the compiler takes what it likes; fewer let more programs share a multiprocessor.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What Triton gets besides the size of a tile."""
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
Table = dict[Key, dict[int, Tiles]]  # by the widest head
FILE = Path(__file__).with_name("tiles.json")
SHORT = 512  # tokens up to which tiles of 64 waste less than they lose


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
    """Return how the file calls a dtype whose matrix products are as `product` says: 'ieee' or 'tf32x3'."""
    if dtype != torch.float32:
        return "half"
    return "tf32x3" if product == "tf32x3" else "float32"


def table_for(rows: str, older: bool = False) -> Table:
    """Return the table that `tiles` reads; `rows` and `older` as there."""
    return TABLES[80 if older else 90, rows]


def tiles(
    kernel: str,
    width: int,
    tokens: int,
    rows: str,
    older: bool = False,
    strip: torch.dtype = torch.float16,
) -> Tiles:
    """Return the tiles of a kernel for heads of `width` columns and `tokens` tokens.

    Args:
        kernel: 'forward', 'grad_q', 'grad_kv' or 'grad_bias'.
        width: columns of the widest of q and v.
        tokens: how many there are.
        rows: of the file, as `rows_of` names them.
        older: the GPU has a compute capability below 9.0.
        strip: dtype of the strip where `rows` is 'half'; float32 for 'grad_bias'.
    """
    bucket = "short" if tokens <= SHORT else "long"
    wide = rows != "half" or strip == torch.float32 or kernel == "grad_bias"
    found = table_for(rows, older)[kernel, bucket, "float32" if wide else "float16"]
    return found[min(widest for widest in found if width <= widest)]
