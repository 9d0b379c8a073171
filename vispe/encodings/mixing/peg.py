"""Conditional positional encoding by a convolution between blocks (CPVT, arXiv 2102.10882)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Mixing
from vispe.encodings.parts.layers import PreciseConv
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, is_integer
from vispe.grid import Grid, Positions
from vispe.utils.autocast import no_autocast
from vispe.utils.interval import Interval
from vispe.utils.options import Integer, PositiveInt

Padding = Literal["zeros", "circular", "reflect"]
Init = Literal["reference", "zero"]


@register
class Peg(Mixing):
    """Adds a depthwise convolution of the patch tokens to them, after some of the blocks.

    y = x + conv(x), depthwise, kernel_size x kernel_size, with bias          arXiv 2102.10882

    Position information comes from the zero padding of the image and spreads inward with every layer; block 0 has none.
    Prefix tokens are unchanged. For CPVT-GAP build the ViT with
    ``class_token=False, global_pool='avg', fc_norm=False``.

    Bare ``peg`` has a single convolution; ``peg.cpvt`` has one after each of the first five blocks, as the
    published CPVT models. ``peg.retrofit`` is initially the identity, for pretrained models.

    Args:
        dim: width of the tokens, d.
        depth: blocks of the model, to check `after`.
        first: number of leading blocks followed by a convolution (at most all).
        after: indices of the blocks followed by a convolution, instead of `first`.
        kernel_size: kernel size, odd, 3 or more.
        init: 'reference' (normal, standard deviation sqrt(2) / kernel_size, bias 0) or 'zero' (weight and bias 0).
        padding: 'zeros', or 'circular' or 'reflect', which do not reveal the border and hence absolute positions.
        symmetric: the kernel is averaged over the 8 symmetries of the square.

    Shapes: x (b, n, d) -> (b, n, d), in the dtype of x.
    New resolution: nothing is resampled.   Cost: d (kernel_size^2 + 1) parameters and as many operations per token.
    Invariant to: nothing, but the convolution commutes with cyclic shifts (padding='circular'), and with rotation by 90
        degrees and flips (symmetric=True); with shifts of content away from the border in any case.
    Raises: ShapeError if the tokens do not come from a 2-axis grid; OptionError for incompatible options.
    Differs from the reference: the grid is explicit and never inferred from the number of tokens; sums are in float32
        for half precision; dropped tokens act as zeros for their neighbours, and their cells remain empty (the
        reference is undefined in this case).

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("peg", dim=16)
        >>> encoding.mix(torch.ones(1, 6, 16), Grid((2, 3)).positions(), layer=0).shape
        torch.Size([1, 6, 16])
    """

    name = "peg"
    paper = "Conditional Positional Encodings for Vision Transformers, https://arxiv.org/abs/2102.10882"
    year = 2021
    encodes = ("direction", "content")
    formula = r"y = x + \operatorname{conv}(x)"
    tested_options = (
        "after=[0,2]",
        "kernel_size=5",
        "padding=circular",
        "padding=reflect,kernel_size=5",
        "symmetric=true",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"cpvt": {"first": 5}, "retrofit": {"init": "zero"}}

    dim: PositiveInt
    depth: PositiveInt | None = None
    first: PositiveInt = 1
    after: tuple[Integer, ...] | None = None
    kernel_size: Annotated[int, Interval(least=3)] = 3
    init: Init = "reference"
    padding: Padding = "zeros"
    symmetric: bool = False

    def __post_init__(self) -> None:
        dim, size = self.dim, self.kernel_size
        if size % 2 == 0:
            raise OptionError(f"peg needs an odd kernel_size of 3 or more, got kernel_size={size}.")
        self.blocks = self._blocks()
        self.proj = nn.ModuleList(
            PreciseConv(2, dim, dim, size, padding=size // 2, groups=dim) for _ in self.blocks
        )
        self.reset_parameters()

    def _blocks(self) -> list[int]:
        """Return the checked indices of the blocks followed by a convolution."""
        after, depth = self.after, self.depth
        if after is None:
            return list(range(min(self.first, depth or self.first)))
        if self.first != 1:
            raise OptionError(f"first={self.first} has no effect with after={list(after)}. Omit one of them.")
        fits = after and min(after) >= 0 and len(set(after)) == len(after)
        if not fits or (depth is not None and max(after) >= depth):
            limit = "" if depth is None else f" below depth={depth}"
            raise OptionError(
                f"after needs different block indices of 0 or more{limit}, got after={list(after)}."
            )
        return list(after)

    def reset_parameters(self) -> None:
        """Initialise every kernel and bias, see `init`."""
        for conv in self.proj.children():
            conv = cast("PreciseConv", conv)
            nn.init.zeros_(cast("Tensor", conv.bias))
            if self.init == "zero":
                nn.init.zeros_(conv.weight)
            else:
                # variance 2 / fan-out, k * k for a depthwise kernel
                nn.init.normal_(conv.weight, std=math.sqrt(2) / self.kernel_size)

    def active(self, layer: int) -> bool:
        """Whether a convolution follows block `layer`."""
        return layer in self.blocks

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename ``pos_block.<i>.proj[.0].*`` (CPVT, Twins, timm) and ``peg.<i>.proj[.0].*``, i-th convolution."""
        for i in range(len(self.blocks)):
            for module in ("pos_block", "peg"):
                for last in ("weight", "bias"):
                    for inner in ("proj.0", "proj"):
                        released = f"{parent_prefix}{module}.{i}.{inner}.{last}"
                        if released in state_dict:
                            state_dict[f"{prefix}proj.{i}.{last}"] = state_dict.pop(released)

    def mix(self, x: Tensor, pos: Positions, layer: int) -> Tensor:
        """Return the tokens (b, n, d) after block `layer`; unchanged if no convolution follows it."""
        shape, prefix = self._grid(pos)
        if layer not in self.blocks:
            return x
        if pos.regular:
            patches = x[:, prefix:]
            return torch.cat([x[:, :prefix], patches + self._conv(patches, shape, layer)], 1)
        cells = shape[0] * shape[1]
        # one bin for all tokens without a position
        index = torch.where(pos.spatial, pos.numbers(), cells).expand(x.shape[0], -1)
        index = index[..., None].expand_as(x)
        # tokens without a position are written to the extra bin, which is not convolved
        canvas = x.new_zeros(x.shape[0], cells + 1, x.shape[2]).scatter(1, index, x)
        mixed = self._conv(canvas[:, :cells], shape, layer)
        # the extra bin reads 0, so these tokens are unchanged
        return x + F.pad(mixed, (0, 0, 0, 1)).gather(1, index)

    def shrink(self, x: Tensor, pos: Positions, layer: int, stride: int = 2) -> tuple[Tensor, Positions]:
        """Return tokens and positions of a coarser grid: strided convolution without the identity term.

        For hierarchical models; hosts with one grid call `mix`. Prefix tokens are unchanged.

        Args:
            x: tokens (b, n, d).
            pos: their positions, a full grid (h, w).
            layer: index of the preceding block; one of `after`.
            stride: the new grid is (ceil(h / stride), ceil(w / stride)).

        Raises:
            ShapeError: tokens have been dropped, or they do not come from a 2-axis grid.
            OptionError: no convolution follows this block, or the stride is not 2 or more.
        """
        shape, prefix = self._grid(pos)
        if pos.index is not None or pos.grid is None:
            raise ShapeError(f"peg.shrink needs every token of a grid, got {pos}. Drop tokens after it.")
        if layer not in self.blocks or not is_integer(stride) or stride < 2:
            raise OptionError(
                f"peg.shrink needs a stride of 2 or more after one of the blocks {self.blocks}, got stride={stride!r} "
                f"after block {layer}."
            )
        small = self._conv(x[:, prefix:], shape, layer, stride)
        # with padding k // 2, a stride s gives ceil(n / s) cells
        coarse = Grid(
            ((shape[0] + stride - 1) // stride, (shape[1] + stride - 1) // stride),
            prefix,
            tuple(s * stride for s in pos.grid.spacing or (1.0, 1.0)),
        )
        return torch.cat([x[:, :prefix], small], 1), coarse.positions(pos.coords.device)

    def kernel(self, layer: int) -> Tensor:
        """Return the kernel after block `layer`, (d, 1, k, k) in float32 or better, symmetrised if requested."""
        weight = at_least_float32(self._layer(layer).weight)
        if self.symmetric:
            # mean over the eight poses of D4: two flips, then the transpose
            weight = weight + weight.flip(-1)
            weight = weight + weight.flip(-2)
            weight = (weight + weight.transpose(-1, -2)) / 8
        return weight

    def _layer(self, layer: int) -> PreciseConv:
        return cast("PreciseConv", self.proj[self.blocks.index(layer)])

    def _grid(self, pos: Positions) -> tuple[tuple[int, ...], int]:
        grid = self._need_grid(pos, "It reads neighbouring cells.")
        return grid.shape, grid.prefix

    def _conv(self, patches: Tensor, shape: tuple[int, ...], layer: int, stride: int = 1) -> Tensor:
        """Return the convolution of patch tokens (b, h w, d), without the identity, in their dtype."""
        weight, bias, reach = (
            self.kernel(layer),
            cast("Tensor", self._layer(layer).bias),
            self.kernel_size // 2,
        )
        # the kernel is in float32 or better, also for half-precision tokens
        dtype = torch.promote_types(patches.dtype, weight.dtype)
        # (b, h w, d) -> (b, d, h, w)
        image = patches.to(dtype).reshape(-1, *shape, self.dim).permute(0, 3, 1, 2)
        if self.padding != "zeros":
            for axis in (2, 3):
                image = image.index_select(axis, _padded_indices(shape[axis - 2], reach, self.padding, image))
        with no_autocast(patches.device):
            mixed = F.conv2d(
                image,
                weight.to(dtype),
                bias.to(dtype),
                stride,
                reach if self.padding == "zeros" else 0,
                groups=self.dim,
            )
        # (b, d, h, w) -> (b, h w, d)
        return mixed.permute(0, 2, 3, 1).flatten(1, 2).to(patches.dtype)


def _padded_indices(n: int, reach: int, padding: str, like: Tensor) -> Tensor:
    """Return the indices of padded cells -reach .. n + reach - 1 among n cells."""
    cell = torch.arange(-reach, n + reach, device=like.device)
    if padding == "circular":
        return cell % n
    # reflection without repetition of the border cell
    period = max(2 * (n - 1), 1)
    cell = cell % period
    return torch.minimum(cell, period - cell) % n
