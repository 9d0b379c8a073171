"""How large the tiles of each kernel are: a table in `tiles.json`, nothing is tuned at run time.

Each row of the file says for which compute capability (80: below 9.0, 90: from there on), widest head, dtype ('half'
or 'float32'), strip ('float16': that of distances, or none; 'float32': that of tables, beside which half precision has
a copy), number of tokens ('short': up to `SHORT`) and kernel it is, and where it comes from: 'compiled code' (chosen
by instructions per score and spills, without a GPU) or the GPU that `eval/bench/tune.py` measured it on.
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
    """Return the rows of the file for a compute capability (80 or 90) and 'half' or 'float32'."""
    table: Table = {}
    for row in cast("list[Row]", json.loads(FILE.read_text())):
        if (row["sm"], row["dtype"]) == (sm, dtype):
            table.setdefault((row["kernel"], row["tokens"], row["strip"]), {})[row["width"]] = Tiles(
                *row["tiles"]
            )
    return table


_HALF, _HALF_OLDER = read(90, "half"), read(80, "half")
_FULL, _FULL_OLDER = read(90, "float32"), read(80, "float32")


def table_for(dtype: torch.dtype, older: bool = False) -> Table:
    """Return the table that `tiles` reads for a dtype; `older` as there."""
    if dtype == torch.float32:
        return _FULL_OLDER if older else _FULL
    return _HALF_OLDER if older else _HALF


def tiles(
    kernel: str,
    width: int,
    tokens: int,
    dtype: torch.dtype,
    older: bool = False,
    strip: torch.dtype = torch.float16,
) -> Tiles:
    """Return the tiles of a kernel for heads of `width` columns and `tokens` tokens.

    Args:
        kernel: 'forward', 'grad_q', 'grad_kv' or 'grad_bias'.
        width: columns of the widest of q and v.
        tokens: how many there are.
        dtype: of q.
        older: the GPU has a compute capability below 9.0.
        strip: dtype of the strip; that of q where q is float32, and float32 for 'grad_bias'.
    """
    bucket = "short" if tokens <= SHORT else "long"
    wide = torch.float32 in (dtype, strip) or kernel == "grad_bias"
    return table_for(dtype, older)[kernel, bucket, "float32" if wide else "float16"][
        64 if width <= 64 else 128
    ]
