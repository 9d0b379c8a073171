"""The positions of the grids that a converted model has seen last, with the masks that were made from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.grid import Grid, Positions


class PositionCache:
    """Keeps the `Positions` of the last few grids, with what was computed from them.

    Everything in it is free of parameters and keyed by grid and device. It is left out of copies, pickles
    and state dicts, and is not used while a model is compiled, exported, traced or captured.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._kept: dict[tuple[Grid, torch.device], Positions] = {}

    def __call__(self, grid: Grid, like: Tensor) -> Positions:
        """Return `grid.positions()` on the device of `like`, kept when that is safe."""
        if not _cacheable(like):
            return grid.positions(like.device)
        key = (grid, like.device)
        pos = self._kept.pop(key, None)
        if pos is None:
            with torch.inference_mode(False):
                pos = grid.positions(like.device)
        self._kept[key] = pos  # the newest is last
        for old in list(self._kept)[: -self.size]:  # a copy: replicas may share this cache between threads
            self._kept.pop(old, None)
        return pos

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionCache:
        return PositionCache(self.size)

    def __reduce__(self) -> tuple[type[PositionCache], tuple[int]]:
        return PositionCache, (self.size,)


def _cacheable(like: Tensor) -> bool:
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or type(like) not in (Tensor, torch.nn.Parameter)
    ):
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())
