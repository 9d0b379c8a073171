"""Cache of the positions of recent grids, with the masks computed from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.grid import Grid, Positions
from vispe.grid.per_token import PerToken


class PositionCache:
    """Least-recently-used cache of `Positions` and values computed from them, keyed by grid and device.

    Cached values do not depend on parameters. The cache is excluded from copies, pickles and state dicts, and is not
    used while a model is compiled, exported or traced. While a CUDA graph is captured, cached positions are read and
    never dropped afterwards, since replays of the graph read them.

    Args:
        size: number of grids.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._cached: dict[tuple[Grid, torch.device], Positions] = {}
        self._captured: dict[tuple[Grid, torch.device], Positions] = {}

    def __call__(self, grid: Grid, like: Tensor) -> Positions:
        """Return `grid.positions()` on the device of `like`, cached when that is safe."""
        if not _cacheable(like):
            return grid.positions(like.device)
        key = (grid, like.device)
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            pos = self._captured.get(key) or self._cached.get(key)
            if pos is None:
                return grid.positions(like.device)
            self._captured[key] = pos
            return pos
        pos = self._cached.pop(key, None)
        if pos is None:
            # inference tensors could not be used in later training
            with torch.inference_mode(False):
                pos = grid.positions(like.device)
        self._cached[key] = pos  # the most recent entry is last
        for old in list(self._cached)[: -self.size]:  # a copy: replicas may share this cache between threads
            self._cached.pop(old, None)
        return pos

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionCache:
        return PositionCache(self.size)

    def __reduce__(self) -> tuple[type[PositionCache], tuple[int]]:
        return PositionCache, (self.size,)


def positions_on(pos: Positions, device: torch.device) -> Positions:
    """Return positions on another device, for blocks on several devices; values without random draws are cached."""
    if pos.coords.device == device:
        return pos
    attrs = {name: _on(value, device) for name, value in pos.attrs.items()}
    # the cache is shared by positions with other attributes
    return pos.remember(("on", device), lambda: _without_attributes(pos, device)).replace(attrs=attrs)


def _without_attributes(pos: Positions, device: torch.device) -> Positions:
    index = None if pos.index is None else pos.index.to(device)
    fields = (value.to(device) for value in (pos.coords, pos.spatial, pos.extent))
    moved = Positions(*fields, cell=pos.cell.to(device), index=index, grid=pos.grid)
    moved.on_grid = pos.on_grid
    return moved


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, PerToken):
        return PerToken(value.values.to(device), value.axes)
    return value.to(device) if isinstance(value, Tensor) else value


def _cacheable(like: Tensor) -> bool:
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not tracing and type(like) in (Tensor, torch.nn.Parameter)
