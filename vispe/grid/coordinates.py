"""Token grids and positions: `Grid` (shapes only, no tensors) and `Positions` (coordinates of every token)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.grid.cached_values import cached_value
from vispe.grid.per_token import PerToken
from vispe.grid.position_fields import extent_of, joined_fields, spacing_of
from vispe.grid.validation import as_offset, as_shape, as_spacing, check_fields, is_size

T = TypeVar("T")
Origin = Literal["start", "end", "centre"]


@dataclass(frozen=True)
class Grid:
    """The shape of a regular token grid, row-major, with leading prefix tokens.

    Args:
        shape: tokens per axis, slow to fast: (n,), (h, w) or (t, h, w).
        prefix: number of tokens without a position (class, registers), before the patches.
        spacing: distance between neighbours along each axis, in any length unit; 1 per axis by default.
        reference: shape of the grid that the model was trained with, for encodings that rescale.
        origin: token with coordinate 0: 'start', the first of each axis; 'end', the last, counting backwards, so that
            the newest frame of a video is always 0; 'centre', the middle of the grid, so that rotations by 90 degrees
            and flips only permute coordinates and change signs. Encodings of coordinates use it; encodings that look up
            cells, or fractions of the extent, do not support it and raise.
        offset: physical coordinates of `origin`, added to all coordinates, for grids in one coordinate system
            (`Positions.joined`); 0 by default. Encodings that do not support other origins do not support it.

    Raises:
        ShapeError: an axis is empty, there are more than 3 axes, or the lengths of the arguments differ.
        OptionError: `spacing` is not one positive number per axis, `offset` is not one number per axis, or `origin` is
            unknown.

    Example:
        >>> Grid((4,), origin="centre").positions().coords.flatten().tolist()
        [-1.5, -0.5, 0.5, 1.5]
    """

    shape: tuple[int, ...]
    prefix: int = 0
    spacing: tuple[float, ...] | None = None
    reference: tuple[int, ...] | None = None
    origin: Origin = "start"
    offset: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        shape = as_shape(self.shape, "shape")
        object.__setattr__(self, "shape", shape)
        if not is_size(self.prefix) or self.prefix < 0:
            raise ShapeError(f"Grid needs a prefix of 0 or more tokens, got prefix={self.prefix!r}.")
        if self.spacing is not None:
            object.__setattr__(self, "spacing", as_spacing(self.spacing, len(shape)))
        if self.reference is not None:
            reference = as_shape(self.reference, "reference")
            if len(reference) != len(shape):
                raise ShapeError(
                    f"Grid needs a reference with one number per axis of shape={shape}, got reference={reference}."
                )
            object.__setattr__(self, "reference", reference)
        if self.offset is not None:
            object.__setattr__(self, "offset", as_offset(self.offset, len(shape)))
        if self.origin not in get_args(Origin):
            raise OptionError(f"origin must be one of {', '.join(get_args(Origin))}, got {self.origin!r}.")

    @property
    def axes(self) -> int:
        """Number of axes, 1 to 3."""
        return len(self.shape)

    @property
    def patches(self) -> int:
        """Number of tokens with a position."""
        count = 1
        for n in self.shape:
            count = count * n
        return count

    @property
    def tokens(self) -> int:
        """Number of all tokens, including the prefix."""
        return self.prefix + self.patches

    def positions(self, device: torch.device | str | None = None) -> Positions:
        """Return the `Positions` of all tokens of this grid, with float32 coordinates (1, n, a)."""
        spacing = self.spacing or (1.0,) * self.axes
        lines = [
            self._line(torch.arange(n, dtype=torch.float32, device=device), n) * s
            for n, s in zip(self.shape, spacing, strict=True)
        ]
        # (n_1, ..., a) -> (n, a) in raster order
        coords = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)
        cell = torch.tensor(spacing, dtype=torch.float32, device=device)
        # the first and last token are opposite corners
        extent = (coords[-1] - coords[0]).abs() + cell
        if self.offset is not None:
            coords = coords + coords.new_tensor(self.offset)
        spatial = coords.new_ones(coords.shape[0], dtype=torch.bool)
        # prefix tokens come first, at coordinate 0 and without a position
        if self.prefix:
            coords = torch.cat([coords.new_zeros(self.prefix, self.axes), coords])
            spatial = torch.cat([spatial.new_zeros(self.prefix), spatial])
        pos = Positions(coords[None], spatial[None], extent[None], cell=cell[None], grid=self)
        # other origins have coordinates that differ from cells
        pos.on_grid = self.origin == "start" and self.offset is None
        return pos

    def _line(self, cells: Tensor, n: int) -> Tensor:
        """Return the coordinates of the cells 0 .. n - 1 of an axis, in units of cells."""
        if self.origin == "start":
            return cells
        return n - 1 - cells if self.origin == "end" else cells - (n - 1) / 2


class Positions:
    """Coordinates of the tokens of a batch, including prefix tokens.

    Not a tuple or dataclass, since sharded training casts tensors in these. Treat instances as immutable: `replace`,
    `with_spacing` and `gather` return new ones. `on_grid` is True if every token is known to be at the position of its
    cell in `grid`, counted from the start: for the result of `Grid.positions` of such a grid and for tokens gathered
    from it, until anything but `attrs` is replaced.

    Args:
        coords: (b or 1, n, a) float32 or float64, axes slow to fast; 0 for tokens without a position. May require grad.
        spatial: (b or 1, n) bool, False for tokens without a position; all True by default.
        extent: (b or 1, a), length of the complete field of view along each axis. It defines the period of wrapped
            encodings and the divisor of normalised ones, independent of dropped tokens. The range of the coordinates
            plus one cell by default.
        cell: (b or 1, a), distance between neighbouring cells; ones by default.
        index: (b or 1, n) int64, cell index of each token in `grid` (arbitrary for prefix tokens); None if the tokens
            are the full grid in raster order.
        grid: the grid of the tokens, if any.
        attrs: further attributes of particular encodings, such as camera poses or random draws.

    Raises:
        ShapeError: shapes or dtypes disagree.

    Example:
        >>> Positions(torch.tensor([[0.0, 0.0], [0.0, 2.5]])).extent
        tensor([[1.0000, 3.5000]])
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "cell",
        "coords",
        "extent",
        "grid",
        "index",
        "memo",
        "on_grid",
        "spatial",
    )

    def __init__(
        self,
        coords: Tensor,
        spatial: Tensor | None = None,
        extent: Tensor | None = None,
        *,
        cell: Tensor | None = None,
        index: Tensor | None = None,
        grid: Grid | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        if coords.ndim == 2:
            coords = coords[None]
        exact = coords.dtype in (torch.float32, torch.float64)
        if coords.ndim != 3 or not 1 <= coords.shape[-1] <= 3 or not exact:
            raise ShapeError(
                "Positions needs float32 or float64 coords of shape (b, n, axes) with 1 to 3 axes, "
                f"got {tuple(coords.shape)} {coords.dtype}."
            )
        self.coords = coords
        self.spatial = coords.new_ones(coords.shape[:2], dtype=torch.bool) if spatial is None else spatial
        self.cell = coords.new_ones(1, coords.shape[-1]) if cell is None else cell
        self.index = index
        self.grid = grid
        self.attrs = attrs or {}
        self.memo: dict[Any, Any] | None = {}  # None disables caching, see `remember`
        # a Python bool instead of a comparison of tensors, so that compiled programs do not depend on values
        self.on_grid = False
        check_fields(self, extent)
        self.extent = extent_of(coords, self.spatial, self.cell) if extent is None else extent

    def __repr__(self) -> str:
        suffix = "" if self.index is None else ", tokens dropped"
        if "spacing" in self.attrs:
            return f"Positions(coords={tuple(self.coords.shape)}, joined from several grids{suffix})"
        return f"Positions(coords={tuple(self.coords.shape)}, grid={self.grid}{suffix})"

    @staticmethod
    def joined(parts: Sequence[Positions | Grid]) -> Positions:
        """Return the positions of the tokens of several grids in one sequence, in one coordinate system.

        Coordinates are those of the parts, so `spacing` and `offset` of each grid must have one unit. For grids of one
        field at several magnifications, use ``Grid(..., origin='centre', offset=centre)``: with origin='start', grids
        share the centre of their first patch, not their corner. ``attrs['level']`` is the number of the part of each
        token, ``attrs['spacing']`` its distance between neighbours; `cell` is the smallest one, `extent` the range of
        all cells. Encodings that need a grid raise; all that read coordinates accept it.

        Args:
            parts: positions or grids with equal numbers of axes, each with batch size b or 1. A `Grid` without
                `offset` is centred at 0, whatever its origin.

        Raises:
            ShapeError: there are no parts, or their axes, batch sizes or devices differ, or they have attributes.

        Example:
            >>> fine, coarse = Grid((2,), spacing=(1,)), Grid((2,), spacing=(4,))
            >>> Positions.joined([fine, coarse]).coords.flatten().tolist()
            [-0.5, 0.5, -2.0, 2.0]
        """
        positions = [
            part
            if isinstance(part, Positions)
            else (replace(part, origin="centre") if part.offset is None else part).positions()
            for part in parts
        ]
        return Positions(**joined_fields(positions, [spacing_of(part) for part in positions]))

    @property
    def axes(self) -> int:
        """Number of axes, 1 to 3."""
        return self.coords.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens, including the prefix."""
        return self.coords.shape[1]

    @property
    def regular(self) -> bool:
        """Whether the tokens are a full regular grid in raster order, as translation-invariant tables need."""
        return self.on_grid and self.index is None

    @property
    def static(self) -> bool:
        """Whether results that depend only on these positions may be cached (they need no gradient)."""
        return not (self.coords.requires_grad or self.extent.requires_grad or self.cell.requires_grad)

    def numbers(self) -> Tensor:
        """Return the cell index of each token, (b or 1, n) int64; negative for prefix tokens of a full grid."""
        if self.index is not None:
            return self.index
        # patch indices start at 0 after the prefix
        prefix = self.grid.prefix if self.grid else 0
        return torch.arange(self.tokens, device=self.coords.device)[None] - prefix

    def cells(self) -> Tensor:
        """Return the integer cell coordinates of every token, (b or 1, n, a) int64; 0 for prefix tokens.

        Raises:
            ShapeError: the positions are not from a grid.
        """
        if self.grid is None:
            what = "positions of several grids" if "spacing" in self.attrs else "free coordinates"
            raise ShapeError(f"A bias table needs positions of a Grid, got {what}. Use grid.positions().")
        shape = self.grid.shape

        def make() -> Tensor:
            # unravel the cell index, fastest axis first
            rest = self.numbers()
            cells: list[Tensor] = []
            for n in reversed(shape):
                rows = rest.div(n, rounding_mode="floor")
                # not torch.remainder, which ONNX export does not support for dynamic sizes
                cells.insert(0, rest - n * rows)
                rest = rows
            return torch.stack(cells, -1) * self.spatial[..., None]

        return self.remember("cells", make)

    def gather(self, keep: Tensor) -> Positions:
        """Return the positions of a subset of the tokens, in the given order.

        Args:
            keep: (b, m) int64, indices of the tokens to keep, counted with the prefix. `PerToken` attributes are
                gathered as well.

        Raises:
            ShapeError: `keep` is not 2-dimensional.
        """
        if keep.ndim != 2:
            raise ShapeError(f"gather needs token indices of shape (b, tokens), got {tuple(keep.shape)}.")
        b = keep.shape[0]
        # fields shared by the batch are expanded, as indices differ between samples
        coords = self.coords.expand(b, -1, -1).gather(1, keep[..., None].expand(-1, -1, self.axes))
        spatial = self.spatial.expand(b, -1).gather(1, keep)
        index = self.numbers().expand(b, -1).gather(1, keep)
        attrs = {k: v.gather(keep) if isinstance(v, PerToken) else v for k, v in self.attrs.items()}
        gathered = Positions(
            coords, spatial, self.extent, cell=self.cell, index=index, grid=self.grid, attrs=attrs
        )
        gathered.on_grid = self.on_grid
        return gathered

    def replace(self, **changes: Any) -> Positions:
        """Return a copy with some fields replaced; the cache and `on_grid` are reused if only `attrs` changes."""
        excluded = ("__weakref__", "on_grid", "memo")
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in excluded}
        copy = Positions(**{**fields, **changes})
        # cached values do not depend on attributes
        if set(changes) <= {"attrs"}:
            copy.memo, copy.on_grid = self.memo, self.on_grid
        return copy

    def with_spacing(self, spacing: Sequence[float]) -> Positions:
        """Return these positions with another distance between neighbouring cells along each axis.

        Raises:
            OptionError: `spacing` is not one positive number per axis.
            ShapeError: the positions are joined from several grids.
        """
        spacing = as_spacing(spacing, self.axes)
        if "spacing" in self.attrs:
            raise ShapeError(
                f"Positions joined from several grids have several spacings, got spacing={spacing}. Set the spacing "
                "of each Grid instead."
            )

        def make() -> Positions:
            step = self.cell.new_tensor(spacing)[None]
            # coordinates changed by a sampler are in units of attrs["unit"] instead of `cell`
            # new over old cell size, (b or 1, a)
            scale = step / self.attrs.get("unit", self.cell)
            attrs = {**self.attrs, "unit": step} if "unit" in self.attrs else self.attrs
            cell, extent = (step if attrs is self.attrs else self.cell * scale), self.extent * scale
            return self.replace(coords=self.coords * scale[:, None], extent=extent, cell=cell, attrs=attrs)

        return self.remember(("spaced", spacing), make)

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, cached under `key` for these positions. Only for values without gradients.

        Caching is disabled if `memo` is None, since compiled checkpointed blocks must not modify shared state.
        """
        if self.memo is None or not self.static:
            return make()
        return cached_value(self.memo, key, make, self.coords.device)
