"""Coordinates of the tokens of a batch.

A `Grid` creates its positions, so the module of `Grid` imports this one: grids are annotated as `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.grid.cached_values import cached_value
from vispe.grid.per_token import PerToken
from vispe.grid.position_fields import extent_of, joined_fields, spacing_of, unravelled
from vispe.grid.validation import as_spacing, check_coords, check_fields

T = TypeVar("T")


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
        grid: the `Grid` of the tokens, if any.
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
        grid: Any = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        if coords.ndim == 2:
            coords = coords[None]
        check_coords(coords)
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
    def joined(parts: Sequence[Any]) -> Positions:
        """Return the positions of the tokens of several grids in one sequence, in one coordinate system.

        Coordinates are those of the parts, so `spacing` and `offset` of each grid must have one unit. For grids of one
        field at several magnifications, use ``Grid(..., origin='centre', offset=centre)``: with origin='start', grids
        share the centre of their first patch, not their corner. ``attrs['level']`` is the number of the part of each
        token, ``attrs['spacing']`` its distance between neighbours; `cell` is the smallest one, `extent` the range of
        all cells. Encodings that need a grid raise; all that read coordinates accept it.

        Args:
            parts: `Positions` or `Grid` with equal numbers of axes, each with batch size b or 1. A `Grid` without
                `offset` is centred at 0, whatever its origin.

        Raises:
            ShapeError: there are no parts, or their axes, batch sizes or devices differ, or they have attributes.

        Example:
            >>> from vispe.grid import Grid
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
        return self.remember("cells", lambda: unravelled(self.numbers(), shape) * self.spatial[..., None])

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
