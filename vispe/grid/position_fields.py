"""Extents, spacings and cells of positions, and fields of several grids joined into one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.grid.per_token import PerToken


def joined_fields(parts: Sequence[Any], spacings: Sequence[Tensor]) -> dict[str, Any]:
    """Return the fields of the joined positions of several grids, from their positions and spacings of tokens."""
    if not parts:
        raise ShapeError("Positions.joined needs at least one grid, got none.")
    batch = max(len(p.coords) for p in parts)
    first = parts[0]
    for part in parts:
        if (
            part.axes != first.axes
            or len(part.coords) not in (1, batch)
            or part.attrs.keys() - {"spacing", "level", "corner"}
        ):
            raise ShapeError(
                f"Positions.joined needs parts of equal axes, of batch size 1 or {batch} and without attributes, got "
                f"{first} and {part} with attributes {sorted(part.attrs)}. Join grids before `prepare`."
            )
        if part.coords.device != first.coords.device:
            raise ShapeError(
                f"Positions.joined needs parts on one device, got {first.coords.device} and {part.coords.device}."
            )
    b = max(batch, *(len(t) for p in parts for t in (p.spatial, p.cell)))
    coords = torch.cat([p.coords.expand(b, -1, -1) for p in parts], 1)
    spatial = torch.cat([p.spatial.expand(b, -1) for p in parts], 1)
    spacing = torch.cat([s.expand(b, p.tokens, -1) for s, p in zip(spacings, parts, strict=True)], 1)
    level = torch.cat([torch.full((p.tokens,), i, device=coords.device) for i, p in enumerate(parts)])
    # the smallest cell of all parts
    cell = torch.stack([p.cell.expand(b, -1) for p in parts]).amin(0)
    no_position = ~spatial[..., None]
    # borders of the common field; tokens without a position are ignored
    low = (coords - spacing / 2).masked_fill(no_position, float("inf")).amin(1)
    high = (coords + spacing / 2).masked_fill(no_position, float("-inf")).amax(1)
    attrs = {"spacing": PerToken(spacing, (1,)), "level": PerToken(level[None], (1,)), "corner": low}
    return {"coords": coords, "spatial": spatial, "extent": high - low, "cell": cell, "attrs": attrs}


def extent_of(coords: Tensor, spatial: Tensor, cell: Tensor) -> Tensor:
    """Return the range of the coordinates plus one cell along each axis, (b or 1, a), of tokens with a position."""
    no_position = ~spatial[..., None]
    low = coords.masked_fill(no_position, float("inf")).amin(1)
    high = coords.masked_fill(no_position, float("-inf")).amax(1)
    # without any position, high - low is -infinity
    return (high - low).clamp(min=0) + cell


def spacing_of(pos: Any) -> Tensor:
    """Return the distance between neighbouring cells at every token, (b or 1, n or 1, a)."""
    spacing = pos.attrs.get("spacing")
    # (b or 1, a) -> (b or 1, 1, a) for a common spacing
    return pos.cell[:, None] if spacing is None else spacing.values


def unravelled(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the integer cell coordinates (..., a) of the cells `index` (...) of a grid of this shape."""
    rest = index
    cells: list[Tensor] = []
    # fastest axis first
    for n in reversed(shape):
        rows = rest.div(n, rounding_mode="floor")
        # not torch.remainder, which ONNX export does not support for dynamic sizes
        cells.insert(0, rest - n * rows)
        rest = rows
    return torch.stack(cells, -1)
