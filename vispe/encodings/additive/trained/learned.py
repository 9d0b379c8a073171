"""Learned table with one vector per grid cell, as in the original ViT (arXiv 2010.11929, section 3.1)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, exact_product, exporting
from vispe.encodings.base import Additive
from vispe.encodings.parts.resample import trained_grid
from vispe.encodings.registry import register
from vispe.errors import OptionError, is_integer
from vispe.grid import Grid, Positions
from vispe.utils.options import NonNegativeFloat, PositiveInt

Longer = Literal["tile", "nearest", "linear"]


@register
class Learned(Additive):
    """Adds a learned vector per grid cell to the tokens.

    table[y, x] is a parameter; for other grids it is resampled, by default bicubic, antialiased when shrinking, to the
    exact target size (not by a scale factor, which would shift the grid), with cell centres aligned.

    Args:
        dim: width of the tokens, d.
        grid: shape of the table, (h, w): the grid of the training resolution.
        std: standard deviation of the truncated normal initialisation.
        resample: how the table is resampled for another grid, per axis: 'bicubic'; without training, as LongEmbed for
            text, 'tile' (repeated: recurrent), 'nearest' (neighbours share an entry: grouped) or 'linear'
            (stretched, with aligned ends). With 'tile' and 'nearest', smaller grids use its first rows
            and columns.

    Shapes: pos of a grid with n tokens -> (1, n, d) float32; prefix tokens get 0.
    New resolution: resampled as above.   Cost: h * w * d parameters, one resampling per new grid.
    Invariant to: nothing.
    Raises: ShapeError if `pos` does not come from a 2-axis grid.
    Differs from the reference: prefix tokens have no entry; timm's `pos_embed='learn'` may have one.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("learned", dim=16, grid=(4, 4))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "learned"
    paper = "An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929"
    year = 2020
    encodes = ("position",)
    tested_options = ("std=0.5", "resample=tile", "resample=nearest", "resample=linear")
    extrapolates = False
    antialias: ClassVar[bool] = True  # whether bicubic resampling is antialiased when shrinking

    dim: PositiveInt
    grid: tuple[PositiveInt, PositiveInt]
    std: NonNegativeFloat = 0.02
    resample: Literal["bicubic", "tile", "nearest", "linear"] = "bicubic"

    def __post_init__(self) -> None:
        self.weight = nn.Parameter(torch.empty(1, math.prod(self._cells), self.dim))
        self.reset_parameters()

    @property
    def _cells(self) -> tuple[int, ...]:
        """Rows and columns of the table."""
        return self.grid

    def reset_parameters(self) -> None:
        """Draw the table from a truncated normal of standard deviation `std`."""
        from timm.layers.weight_init import trunc_normal_  # local import: `import vispe` must not import timm

        trunc_normal_(self.weight, std=self.std)

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample a table of another grid, as `table` does; an unknown grid is assumed to be square."""
        table = state_dict.get(f"{prefix}weight")
        if table is None or table.ndim != 3:
            return
        cells = self._cells
        grid = None if grid is None else tuple(grid[-len(cells) :])
        old = trained_grid(f"{prefix}weight", grid, table.shape[1], cells, math.prod)
        if old != cells:
            state_dict[f"{prefix}weight"] = resample(table, old, cells, self.resample, self.antialias)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table for the grid of `pos`, (1 or b, n, d), 0 for prefix tokens."""
        grid = self._need_grid(pos, "Use sincos2d for free coordinates.")
        table = self._patches(grid)
        prefix = table.new_zeros(1, grid.prefix, self.dim)
        table = torch.cat([prefix, table], 1)
        if pos.regular:
            return table
        token = (pos.numbers() + grid.prefix).clamp(min=0)  # tokens without a position are masked below
        gathered = table[0].index_select(0, token.flatten()).unflatten(0, token.shape)
        return gathered * pos.spatial[..., None]

    def _patches(self, grid: Grid) -> Tensor:
        """Return the table for the patches of a grid, (1, patches, d), in float32 or better."""
        cells = resample(self.weight, self._cells, grid.shape[-2:], self.resample, self.antialias)
        return at_least_float32(cells)


def resample(
    table: Tensor,
    old: tuple[int, ...],
    new: tuple[int, ...],
    rule: Longer | Literal["bicubic"] = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Return a table (1, h * w, d) resampled from grid `old` to grid `new` (1, h' * w', d), in its dtype.

    Bicubic, by default with antialiasing towards the target size, computed in float32 or better; or by a rule of
    `Longer`.
    """
    if not exporting() and tuple(old) == tuple(new):  # the size must remain symbolic in an export
        return table
    if rule != "bicubic":
        return extend_table(table, old, new, rule)
    exact = at_least_float32(table)
    # the backward pass of interpolate fails for symbolic sizes (torch 2.15)
    if torch.compiler.is_compiling():
        rows, columns = (_weights(o, n, exact, antialias) for o, n in zip(old, new, strict=True))
        exact = exact_product(rows, exact.reshape(old[0], -1)).reshape(new[0], old[1], -1)
        return exact_product(columns, exact).flatten(0, 1)[None].to(table.dtype)
    image = _interpolate(exact.reshape(1, *old, -1).permute(0, 3, 1, 2), new, antialias)
    return image.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)


def _interpolate(image: Tensor, size: tuple[int, ...], antialias: bool) -> Tensor:
    return F.interpolate(image, size=tuple(size), mode="bicubic", antialias=antialias, align_corners=False)


def _weights(old: int, new: int, like: Tensor, antialias: bool) -> Tensor:
    """Return the matrix (new, old) that resamples one axis: the images of the unit vectors."""
    units = torch.eye(old, dtype=like.dtype, device=like.device)
    return _interpolate(units[:, None, None], (1, new), antialias)[
        :, 0, 0
    ].t()  # along width: torch 2.15 has an error along height


def table_indices(tokens: int, entries: int, rule: Longer, device: torch.device | None = None) -> Tensor:
    """Return the indices into a table of one axis that its tokens read, (tokens,) float64.

    'tile' repeats the table (recurrent positions): ``i mod entries``. 'nearest' shares an entry among neighbours
    (grouped positions): ``floor(i / ceil(tokens / entries))``. Both leave the indices of shorter sequences unchanged.
    'linear' interpolates for any number of tokens, with aligned corners: ``i (entries - 1) / (tokens - 1)``.

    Raises:
        OptionError: the rule does not exist.

    Example:
        >>> [table_indices(7, 3, rule).long().tolist() for rule in ("tile", "nearest")]
        [[0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 1, 1, 1, 2]]
    """
    if rule not in get_args(Longer):
        raise OptionError(f"rule must be one of {', '.join(get_args(Longer))}, got {rule!r}.")
    number = torch.arange(tokens, dtype=torch.float64, device=device)
    if rule == "tile":
        return number.remainder(entries)
    if rule == "nearest":
        # not -(-tokens // entries): ONNX rounds the quotient of a negative symbolic size towards zero
        return (number / ((tokens + entries - 1) // entries)).floor()
    return number * ((entries - 1) / max(tokens - 1, 1))


def extended_indices(tokens: int, trained: int, longest: int) -> Tensor:
    """Return the indices that the authors use with a table of `longest` entries made from `trained`, (tokens,) int64.

    Up to the trained length, indices are ``i * (longest // trained)``, beyond it i: they jump at the next token.
    `table_indices` with 'linear' has no such jump.

    Args:
        tokens: number of tokens.
        trained: sequence length in training.
        longest: entries of the table.

    Raises:
        OptionError: a count is not an integer above 0.
    """
    for name, count in (("tokens", tokens), ("trained", trained), ("longest", longest)):
        if not is_integer(count) or count < 1:
            raise OptionError(f"extended_indices needs an integer above 0 for {name}, got {name}={count!r}.")
    number = torch.arange(tokens)
    return number * max(longest // trained, 1) if tokens <= trained else number


def extend_table(table: Tensor, old: tuple[int, ...], new: tuple[int, ...], rule: Longer) -> Tensor:
    """Return a table (1, prod(old), d) extended axis by axis to the tokens of grid `new` (1, prod(new), d)."""
    values = table.reshape(*old, -1)
    for axis, (entries, tokens) in enumerate(zip(old, new, strict=True)):
        index = table_indices(tokens, entries, rule, table.device)
        if rule != "linear":
            values = values.index_select(axis, index.long())
            continue
        # linear interpolation between the two adjacent entries
        weights = (1 - (index[:, None] - torch.arange(entries, device=index.device)).abs()).clamp(min=0)
        exact = at_least_float32(values).movedim(axis, 0)
        mixed = exact_product(weights.to(exact), exact.flatten(1)).unflatten(1, exact.shape[1:])
        values = mixed.movedim(0, axis)
    return values.flatten(0, -2)[None].to(table.dtype)
