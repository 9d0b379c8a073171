"""Gilbert (generalised Hilbert) curve orders of grid cells, and networks that predict shifts of them from the image."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, exact_product, fixed_size, same_grid
from vispe.encodings.parts.layers import PreciseConv, PreciseLinear
from vispe.utils.axes import last_axis_to

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


class ImageShift(nn.Module):
    """Convolutional network that predicts a shift in (-1, 1) for every cell of any grid from an image.

    Each cell is average-pooled to 4 x 4 pixels; the last layer is initialised with 0, so shifts start at 0.

    Args:
        in_chans: channels of the image.
    """

    SIDE = 4

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        widths = (32, 16, 8, 4, 1)
        self.convs = nn.ModuleList([PreciseConv(2, in_chans + 2, widths[0], self.SIDE, self.SIDE)])
        self.convs.extend(PreciseConv(2, i, o, 5, padding=2) for i, o in pairwise(widths))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch does, the last layer with zeros."""
        for conv in _convs(self.convs):
            conv.reset_parameters()
        last = _convs(self.convs)[-1]
        nn.init.zeros_(last.weight)
        if last.bias is not None:
            nn.init.zeros_(last.bias)

    def forward(self, image: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the shift of every cell, (b, h, w), for an image (b, c, height, width)."""
        image = at_least_float32(image)
        side = self.SIDE
        x = with_coordinates(pooled(image, (shape[0] * side, shape[1] * side)))
        convs = _convs(self.convs)
        for conv in convs[:-1]:
            x = F.gelu(conv(x))
        return convs[-1](x)[:, 0].tanh()


class ReleasedShift(nn.Module):
    """Network of the released code: patches of 16 x 16 pixels of a fixed grid, batch norm, a matrix over all cells.

    Running statistics are parameters without gradient, so that they are saved.

    Args:
        in_chans: channels of the image.
        grid: shape of the fixed grid, (h, w).
    """

    PATCH = 16
    EPS, MOMENTUM = 1e-5, 0.1

    def __init__(self, in_chans: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        widths = (32, 16, 8, 4, 1)
        self.convs = nn.ModuleList([PreciseConv(2, in_chans + 2, widths[0], self.PATCH, self.PATCH)])
        self.convs.extend(PreciseConv(2, i, o, 5, padding=2) for i, o in pairwise(widths))
        self.norm = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(1), requires_grad=name in ("weight", "bias"))
                for name in ("weight", "bias", "running_mean", "running_var")
            }
        )
        cells = grid[0] * grid[1]
        self.linear = PreciseLinear(cells, cells, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch does."""
        for conv in _convs(self.convs):
            conv.reset_parameters()
        self.linear.reset_parameters()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            nn.init.constant_(self.norm[name], value)

    def forward(self, image: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the shift of every cell, (b, h, w), for an image (b, c, height, width); other sizes are resampled."""
        size = tuple(n * self.PATCH for n in self.grid)
        x = at_least_float32(image)
        if not same_grid(size, x.shape[-2:]):
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False)
        x = with_coordinates(x)
        for conv in _convs(self.convs):
            x = F.gelu(conv(x))
        x = self._normed(x)
        x = self.linear(x.flatten(1))
        # tanh(x / 2), in (-1, 1)
        shift = (2 * x.sigmoid() - 1).reshape(-1, *self.grid)
        if not same_grid(self.grid, shape):
            shift = F.interpolate(shift[:, None], size=shape, mode="bilinear", align_corners=False)[:, 0]
        return shift

    def _normed(self, x: Tensor) -> Tensor:
        norm = {name: p.to(x.dtype) for name, p in self.norm.items()}
        if not self.training:
            mean, var = norm["running_mean"], norm["running_var"]
        else:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            with torch.no_grad():
                count = x.numel()
                # the running variance is unbiased, as in torch.nn.BatchNorm2d
                spread = var.detach() * (count / max(count - 1, 1))
                for name, value in (("running_mean", mean.detach()), ("running_var", spread)):
                    self.norm[name].lerp_(value.to(self.norm[name].dtype), self.MOMENTUM)
        return (x - mean) * (var + self.EPS).rsqrt() * norm["weight"] + norm["bias"]


def pooled(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return `F.adaptive_avg_pool2d`; symbolic sizes use a product per axis, as exports fix its sizes."""
    if all(map(fixed_size, (*size, *image.shape[-2:]))):
        return F.adaptive_avg_pool2d(image, size)
    for axis, new in zip((image.ndim - 2, image.ndim - 1), size, strict=True):
        old = image.shape[axis]
        cell, pixel = torch.arange(new, device=image.device)[:, None], torch.arange(old, device=image.device)
        # from floor(i old / new) up to ceil((i + 1) old / new), the windows of adaptive pooling
        first, behind = cell * old // new, ((cell + 1) * old + new - 1) // new
        weights = ((pixel >= first) & (pixel < behind)).to(image.dtype)
        weights = weights / weights.sum(1, keepdim=True)
        image = last_axis_to(exact_product(image.movedim(axis, -1), weights.t()), axis)
    return image


def with_coordinates(image: Tensor) -> Tensor:
    """Return an image with two more channels: row and column from -1 to 1, first to last pixel."""
    lines = [_line(n, image) for n in image.shape[-2:]]
    coordinates = torch.stack(torch.meshgrid(*lines, indexing="ij"))
    return torch.cat([image, coordinates.expand(image.shape[0], -1, -1, -1)], 1)


def _line(n: int, like: Tensor) -> Tensor:
    if fixed_size(n):
        return torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device)
    # linspace would specialise a symbolic size
    number = torch.arange(n, dtype=like.dtype, device=like.device)
    return number / number[-1:].clamp(min=1) * 2 - 1


def _convs(modules: nn.ModuleList) -> list[PreciseConv]:
    return [cast("PreciseConv", m) for m in modules.children()]
