"""How large the tiles of each kernel are: a table, nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Queries and keys per tile, warps and pipeline stages of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


# kernel -> widest head -> tiles, chosen by instructions per score and spills of compiled code, not yet on a GPU
_HALF: dict[str, dict[int, Tiles]] = {
    "forward": {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 2)},
    "grad_q": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 4, 2)},
    "grad_kv": {64: Tiles(64, 128, 8, 2), 128: Tiles(64, 128, 8, 1)},
    "grad_bias": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 1)},
}
_HALF_OLDER: dict[str, dict[int, Tiles]] = {  # without the matrix instructions of compute capability 9
    "forward": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 2)},
    "grad_q": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 2)},
    "grad_kv": {64: Tiles(32, 128, 8, 2), 128: Tiles(64, 64, 8, 1)},
    "grad_bias": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 32, 8, 1)},
}
_FULL: dict[str, dict[int, Tiles]] = {
    "forward": {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 32, 8, 1)},
    "grad_q": {64: Tiles(32, 32, 8, 1), 128: Tiles(16, 32, 8, 1)},
    "grad_kv": {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 32, 8, 1)},
    "grad_bias": {64: Tiles(32, 32, 8, 1), 128: Tiles(32, 32, 8, 1)},
}
SHORT = 512  # tokens up to which tiles of 64 waste less than they lose


def tiles(kernel: str, width: int, tokens: int, dtype: torch.dtype, older: bool = False) -> Tiles:
    """Return the tiles of a kernel for heads of `width` columns and `tokens` tokens.

    Args:
        kernel: 'forward', 'grad_q', 'grad_kv' or 'grad_bias'.
        width: columns of the widest of q and v.
        tokens: how many there are.
        dtype: of q.
        older: the GPU has a compute capability below 9.0.
    """
    table = _FULL if dtype == torch.float32 else _HALF_OLDER if older else _HALF
    chosen = table[kernel][64 if width <= 64 else 128]
    if tokens > SHORT:
        return chosen
    return chosen._replace(
        queries=min(chosen.queries, 64), keys=min(chosen.keys, 64), warps=min(chosen.warps, 4)
    )
