"""Gilbert (generalised Hilbert) curve: index of each cell of a grid, in numpy and as operators of graphs."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import fixed_size

Cells = NDArray[np.int64]
ROUNDS = 20  # number of halvings for grids of up to 1024 x 1024 cells


def curve_order(shape: tuple[int, int], start: str = "width") -> Cells:
    """Return the index, from 1, of each cell of a grid (h, w) along the Gilbert curve from its first cell.

    Args:
        shape: (h, w).
        start: side along which the curve starts: 'width', 'longer' (the height if that is larger), or 'even'
            (the height if only it is even: then every step leads to a neighbour).
    """
    h, w = int(shape[0]), int(shape[1])
    down = (start == "longer" and h > w) or (start == "even" and h % 2 == 0 and w % 2 == 1)
    cells = _curve((0, h), (w, 0)) if down else _curve((w, 0), (0, h))
    order = np.empty((h, w), dtype=np.int64)
    # cells are (x, y)
    order[cells[:, 1], cells[:, 0]] = np.arange(1, h * w + 1)
    return order


@torch.library.custom_op("vispe::curve_order", mutates_args=())
def curve_indices(h: int, w: int, start: str, device: torch.device) -> Tensor:
    """Return `curve_order` as (h w,) float64, as one operator, so that compiled graphs support any grid size."""
    return torch.tensor(curve_order((h, w), start).ravel(), dtype=torch.float64, device=device)


@curve_indices.register_fake  # pyright: ignore[reportUnknownMemberType]  torch does not type it
def _fake_curve_indices(h: int, w: int, start: str, device: torch.device) -> Tensor:
    del start
    return torch.empty(h * w, dtype=torch.float64, device=device)


@cache
def _curve(a: tuple[int, int], b: tuple[int, int]) -> Cells:
    """Return the cells (x, y) of the block that `a` (major) and `b` span, in order, from (0, 0).

    Blocks of equal size and direction are cached.
    """
    w, h = abs(sum(a)), abs(sum(b))
    da, db = np.sign(a), np.sign(b)
    if h == 1:
        return np.arange(w)[:, None] * da
    if w == 1:
        return np.arange(h)[:, None] * db
    major, minor = np.array(a), np.array(b)
    half_a, half_b = major // 2, minor // 2
    # a long block is cut in two along its major side
    if 2 * w > 3 * h:
        if abs(half_a.sum()) % 2 and w > 2:
            half_a = half_a + da
        return np.concatenate([_block(half_a, minor), half_a + _block(major - half_a, minor)])
    if abs(half_b.sum()) % 2 and h > 2:
        half_b = half_b + db
    return np.concatenate(
        [
            _block(half_b, half_a),
            half_b + _block(major, minor - half_b),
            (major - da) + (half_b - db) + _block(-half_b, -(major - half_a)),
        ]
    )


def _block(a: Cells, b: Cells) -> Cells:
    return _curve((int(a[0]), int(a[1])), (int(b[0]), int(b[1])))


def traced_indices(h: int, w: int, start: str, device: torch.device) -> Tensor:
    """Return `curve_indices` by operators available in ONNX; NaN for grids that `ROUNDS` halvings do not resolve.

    Each cell follows the blocks of `_curve` that contain it: (u, v) is its offset along the major and minor side of
    its block of (a, b) cells, and back_u, back_v flag sides that run backwards, since halves are rounded down.
    """
    rows, columns = (torch.full((), n, dtype=torch.int64, device=device) for n in (h, w))
    down = torch.zeros((), dtype=torch.bool, device=device)
    if start != "width":
        down = rows > columns if start == "longer" else (rows % 2 == 0) & (columns % 2 == 1)
    cell = torch.arange(h * w, device=device)
    y = cell.div(w, rounding_mode="floor")
    x = cell - y * w
    # per cell: u, v, a, b, back_u, back_v (1 where a side runs backwards)
    state = torch.stack([*torch.where(down, torch.stack([y, x]), torch.stack([x, y])), *([cell * 0] * 4)])
    sides = torch.stack([torch.where(down, rows, columns), torch.where(down, columns, rows)])
    state = state + F.pad(sides, (2, 2))[:, None]
    number = torch.ones_like(cell)
    for _ in range(ROUNDS):
        u, v, a, b, back_u, back_v = state
        half_a, half_b = (a + back_u) // 2, (b + back_v) // 2
        long = 2 * a > 3 * b
        half_a = half_a + half_a % 2 * (long & (a > 2))
        half_b = half_b + half_b % 2 * (b > 2)
        # a long block has two parts, any other block three: up, across and down
        parts = torch.stack(
            [
                torch.stack([u, v, half_a, b, back_u, back_v]),
                torch.stack([u - half_a, v, a - half_a, b, back_u, back_v]),
                torch.stack([v, u, half_b, half_a, back_v, back_u]),
                torch.stack([u, v - half_b, a, b - half_b, back_u, back_v]),
                torch.stack([half_b - 1 - v, a - 1 - u, half_b, a - half_a, 1 - back_v, 1 - back_u]),
            ]
        )
        # number of cells on the curve before each part
        before = torch.stack([a * 0, half_a * b, a * 0, half_a * half_b, half_a * half_b + a * (b - half_b)])
        right, above = u >= half_a, v >= half_b
        # parts 0 and 1 are those of a long block, 2 to 4 those of any other
        part = torch.where(long, right.long(), torch.where(above, 3, 2 + 2 * right))
        done = (a == 1) | (b == 1)
        number = number + torch.where(done, 0, before.gather(0, part[None])[0])
        state = torch.where(done, state, parts.gather(0, part.expand(1, 6, -1))[0])
    u, v, a, b, *_ = state
    # index within the remaining line of cells
    number = (number + torch.where(b == 1, u, v)).double()
    return number.masked_fill(~((a == 1) | (b == 1)).all(), torch.nan)


def ordered_indices(h: int, w: int, start: str, device: torch.device) -> Tensor:
    """Return `curve_order` as (h w,) float64, by operators that the current execution or export supports."""
    # ONNX and TorchScript do not support the custom operator of vispe
    onnx = torch.onnx.is_in_onnx_export()
    # symbolic sizes need operators of the graph instead of numpy
    if onnx and not (fixed_size(h) and fixed_size(w)):
        return traced_indices(h, w, start, device)
    if onnx or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return torch.from_numpy(curve_order((h, w), start).ravel()).to(device, torch.float64)
    return curve_indices(h, w, start, device)
