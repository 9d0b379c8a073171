"""Networks that predict a shift of the index of each cell from the image."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, exact_product, fixed_size, same_grid
from vispe.encodings.parts.layers import PreciseConv, PreciseLinear
from vispe.utils.axes import last_axis_to


class ImageShift(nn.Module):
    """Convolutional network that predicts a shift in (-1, 1) for every cell of any grid from an image.

    Each cell is average-pooled to 4 x 4 pixels; the last layer is initialised with 0, so shifts start at 0.

    Args:
        in_chans: channels of the image.
    """

    SIDE = 4

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.convs = _conv_layers(in_chans, self.SIDE)
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
        self.convs = _conv_layers(in_chans, self.PATCH)
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


def _conv_layers(in_chans: int, patch: int) -> nn.ModuleList:
    """Return a patch embedding of an image and its coordinates, and four convolutions over the cells."""
    widths = (32, 16, 8, 4, 1)
    layers = nn.ModuleList([PreciseConv(2, in_chans + 2, widths[0], patch, patch)])
    layers.extend(PreciseConv(2, i, o, 5, padding=2) for i, o in pairwise(widths))
    return layers


def _convs(modules: nn.ModuleList) -> list[PreciseConv]:
    return [cast("PreciseConv", m) for m in modules.children()]
