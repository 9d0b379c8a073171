"""Where the tokens are: `Grid` (shapes only, no tensors) and `Positions` (coordinates of every token)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError

T = TypeVar("T")
Origin = Literal["start", "end", "centre"]


@dataclass(frozen=True)
class Grid:
    """The shape of a regular token grid, row-major, with prefix tokens in front.

    Args:
        shape: tokens per axis, slow to fast: (n,), (h, w) or (t, h, w).
        prefix: tokens without a place (class, registers), in front of the patches.
        spacing: distance between neighbours along each axis, in any length unit; 1 per axis by default.
        reference: shape of the grid that the model was trained with, for encodings that rescale.
        origin: where coordinates are counted from: 'start', the first token of each axis; 'end', the last, backwards,
            so that the newest frame of a video is always 0; 'centre', the middle of the grid, so that turning and
            mirroring only exchange coordinates and signs. Encodings of coordinates follow; those that look up cells,
            or fractions of the field, have no use for it and raise.

    Raises:
        ShapeError: an axis is empty, there are more than 3 axes, or the lengths of the arguments differ.
        OptionError: spacing is not one positive number per axis, or origin is not one of the three.

    Example:
        >>> Grid((4,), origin="centre").positions().coords.flatten().tolist()
        [-1.5, -0.5, 0.5, 1.5]
    """

    shape: tuple[int, ...]
    prefix: int = 0
    spacing: tuple[float, ...] | None = None
    reference: tuple[int, ...] | None = None
    origin: Origin = "start"

    def __post_init__(self) -> None:
        shape = _as_shape(self.shape, "shape")
        object.__setattr__(self, "shape", shape)
        if not _is_whole(self.prefix) or self.prefix < 0:
            raise ShapeError(f"Grid needs a prefix of 0 or more tokens, got prefix={self.prefix!r}.")
        if self.spacing is not None:
            object.__setattr__(self, "spacing", as_spacing(self.spacing, len(shape)))
        if self.reference is not None:
            reference = _as_shape(self.reference, "reference")
            if len(reference) != len(shape):
                raise ShapeError(
                    f"Grid has shape={shape} but reference={reference}; give one number per axis."
                )
            object.__setattr__(self, "reference", reference)
        if self.origin not in get_args(Origin):
            raise OptionError(f"origin must be one of {', '.join(get_args(Origin))}, got {self.origin!r}.")

    @property
    def axes(self) -> int:
        """Number of axes, 1 to 3."""
        return len(self.shape)

    @property
    def patches(self) -> int:
        """Number of tokens that have a place."""
        count = 1
        for n in self.shape:
            count = count * n
        return count

    @property
    def tokens(self) -> int:
        """Number of all tokens, prefix included."""
        return self.prefix + self.patches

    def positions(self, device: torch.device | str | None = None) -> Positions:
        """Return the `Positions` of every token of this grid (float32 coordinates)."""
        spacing = self.spacing or (1.0,) * self.axes
        lines = [
            self._line(torch.arange(n, dtype=torch.float32, device=device), n) * s
            for n, s in zip(self.shape, spacing, strict=True)
        ]
        coords = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)
        cell = torch.tensor(spacing, dtype=torch.float32, device=device)
        extent = (coords[-1] - coords[0]).abs() + cell  # the first and last token are opposite corners
        spatial = coords.new_ones(coords.shape[0], dtype=torch.bool)
        if self.prefix:
            coords = torch.cat([coords.new_zeros(self.prefix, self.axes), coords])
            spatial = torch.cat([spatial.new_zeros(self.prefix), spatial])
        pos = Positions(coords[None], spatial[None], extent[None], cell=cell[None], grid=self)
        pos.in_place = self.origin == "start"
        return pos

    def _line(self, cells: Tensor, n: int) -> Tensor:
        """Return the coordinates of the cells 0 .. n - 1 of an axis, in cells."""
        if self.origin == "start":
            return cells
        return n - 1 - cells if self.origin == "end" else cells - (n - 1) / 2


class Positions:
    """Coordinates of the tokens of a batch, prefix tokens included.

    A plain object on purpose: sharded training casts tensors that it finds in tuples and dataclasses. Fields are not
    assigned to: `replace`, `spaced` and `gather` make new positions. `in_place` says whether every token is known to be
    where `grid` has its cell, counted from the start: True of what `Grid.positions` returns for such a grid and of
    what is gathered from it, until anything but `attrs` is replaced.

    Args:
        coords: (b or 1, n, a) floating point, axes slow to fast; 0 for tokens without a place. May require grad.
        spatial: (b or 1, n) bool, False for tokens without a place.
        extent: (b or 1, a), the length of the whole field of view along each axis. It, not the kept tokens,
            defines the period of wrapped encodings and the divisor of normalised ones.
        cell: (b or 1, a), distance between neighbouring cells; ones by default.
        index: (b or 1, n) int64, which cell of `grid` each token is (anything for prefix tokens); None when
            the tokens are the full grid in order.
        grid: the grid that the tokens come from, if any.
        attrs: what particular encodings need beside coordinates, such as camera poses or random draws.
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "cell",
        "coords",
        "extent",
        "grid",
        "in_place",
        "index",
        "memo",
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
        self.memo: dict[Any, Any] | None = {}  # None: nothing is kept, see `remember`
        # whether each token is known to be where `grid` has its cell: no tensor is asked, so compiled programs agree
        self.in_place = False
        self._check(extent)
        self.extent = _extent(coords, self.spatial, self.cell) if extent is None else extent

    def _check(self, extent: Tensor | None) -> None:
        b, n, a = self.coords.shape
        fields = (
            ("spatial", self.spatial, n),
            ("index", self.index, n),
            ("extent", extent, a),
            ("cell", self.cell, a),
        )
        for name, field, wanted in fields:
            if field is not None and (
                field.ndim != 2 or field.shape[1] != wanted or field.shape[0] not in (1, b)
            ):
                raise ShapeError(
                    f"Positions needs {name} of shape ({b} or 1, {wanted}) beside coords {(b, n, a)}, got "
                    f"{tuple(field.shape)}."
                )
        if self.spatial.dtype != torch.bool:
            raise ShapeError(f"Positions needs a bool spatial, got {self.spatial.dtype}.")
        if self.grid is None:
            return
        if self.grid.axes != a or (self.index is None and self.grid.tokens != n):
            raise ShapeError(
                f"Positions has coords {(b, n, a)} but {self.grid} has {self.grid.tokens} tokens on "
                f"{self.grid.axes} axes; say by `index` which of its cells the tokens are."
            )

    def __repr__(self) -> str:
        kept = "" if self.index is None else ", tokens dropped"
        return f"Positions(coords={tuple(self.coords.shape)}, grid={self.grid}{kept})"

    @property
    def axes(self) -> int:
        """Number of axes, 1 to 3."""
        return self.coords.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens, prefix included."""
        return self.coords.shape[1]

    @property
    def regular(self) -> bool:
        """Whether the tokens are a full grid, in order and in place: what translation-invariant tables need."""
        return self.in_place and self.index is None

    @property
    def static(self) -> bool:
        """Whether what is computed from these positions alone may be kept (no gradient flows to them)."""
        return not (self.coords.requires_grad or self.extent.requires_grad or self.cell.requires_grad)

    def numbers(self) -> Tensor:
        """Return which cell of the grid each token is, (b or 1, n) int64; below 0 for prefix tokens of a full grid."""
        if self.index is not None:
            return self.index
        prefix = self.grid.prefix if self.grid else 0
        return torch.arange(self.tokens, device=self.coords.device)[None] - prefix

    def cells(self) -> Tensor:
        """Return the integer cell of every token, (b or 1, n, a) int64; 0 for prefix tokens.

        Raises:
            ShapeError: the tokens do not come from a grid.
        """
        if self.grid is None:
            raise ShapeError(
                "A table bias needs tokens of a Grid, got free coordinates; use grid.positions()."
            )
        shape = self.grid.shape

        def make() -> Tensor:
            rest = self.numbers()
            cells: list[Tensor] = []
            for n in reversed(shape):
                rows = rest.div(n, rounding_mode="floor")
                cells.insert(0, rest - n * rows)  # no remainder: ONNX has none of a size that is free
                rest = rows
            return torch.stack(cells, -1) * self.spatial[..., None]

        return self.remember("cells", make)

    def gather(self, keep: Tensor) -> Positions:
        """Return the positions of the kept tokens.

        Args:
            keep: (b, m) int64, which tokens of this object remain (prefix tokens included, as token numbers).
                Attributes that are `PerToken` follow.
        """
        if keep.ndim != 2:
            raise ShapeError(f"gather needs token numbers of shape (b, kept), got {tuple(keep.shape)}.")
        b = keep.shape[0]
        coords = self.coords.expand(b, -1, -1).gather(1, keep[..., None].expand(-1, -1, self.axes))
        spatial = self.spatial.expand(b, -1).gather(1, keep)
        index = self.numbers().expand(b, -1).gather(1, keep)
        attrs = {k: v.gather(keep) if isinstance(v, PerToken) else v for k, v in self.attrs.items()}
        kept = Positions(
            coords, spatial, self.extent, cell=self.cell, index=index, grid=self.grid, attrs=attrs
        )
        kept.in_place = self.in_place
        return kept

    def replace(self, **changes: Any) -> Positions:
        """Return a copy with some fields exchanged; what is known of the tokens goes along when only `attrs` change."""
        own = ("__weakref__", "in_place", "memo")
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in own}
        copy = Positions(**{**fields, **changes})
        if set(changes) <= {"attrs"}:
            copy.memo, copy.in_place = self.memo, self.in_place
        return copy

    def spaced(self, spacing: Sequence[float]) -> Positions:
        """Return these positions with another distance between neighbouring cells along each axis."""
        spacing = as_spacing(spacing, self.axes)

        def make() -> Positions:
            step = self.cell.new_tensor(spacing)[None]
            # cells that a sampler has moved keep what they were multiplied by
            scale = step / self.attrs.get("unit", self.cell)
            attrs = {**self.attrs, "unit": step} if "unit" in self.attrs else self.attrs
            cell, extent = (step if attrs is self.attrs else self.cell * scale), self.extent * scale
            return self.replace(coords=self.coords * scale[:, None], extent=extent, cell=cell, attrs=attrs)

        return self.remember(("spaced", spacing), make)

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, computed once for these positions. Only for values without gradients.

        Nothing is kept when `memo` is None: compiled checkpointed blocks may not change what they share.
        """
        if self.memo is None or not self.static:
            return make()
        if key not in self.memo:
            if torch.compiler.is_compiling():
                self.memo[key] = make()
            else:
                with torch.inference_mode(False):  # what is made while predicting must serve training too
                    self.memo[key] = make()
        return self.memo[key]


class PerToken:
    """An attribute of `Positions` with values per token, or per pair of tokens, that follows dropped tokens.

    Args:
        values: (b or 1, ...).
        axes: which dimensions of `values` run over the tokens.
    """

    __slots__ = ("axes", "values")

    def __init__(self, values: Tensor, axes: tuple[int, ...]) -> None:
        self.values, self.axes = values, axes

    def gather(self, keep: Tensor) -> PerToken:
        """Return the values of the kept tokens (b, m); see `Positions.gather`."""
        b, m = keep.shape
        values = self.values.expand(b, *self.values.shape[1:])
        for axis in self.axes:
            index = keep.reshape(b, *(m if i == axis else 1 for i in range(1, values.ndim)))
            values = values.gather(axis, index.expand(*values.shape[:axis], m, *values.shape[axis + 1 :]))
        return PerToken(values, self.axes)


def _extent(coords: Tensor, spatial: Tensor, cell: Tensor) -> Tensor:
    """Return the length along each axis of the smallest field that holds all tokens with a place."""
    away = ~spatial[..., None]
    low = coords.masked_fill(away, float("inf")).amin(1)
    high = coords.masked_fill(away, float("-inf")).amax(1)
    return (high - low).clamp(min=0) + cell


def _as_shape(shape: Iterable[Any], name: str) -> tuple[int, ...]:
    given = tuple(shape)
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # sizes are tensors there; torch warns that the trace keeps those it saw
        given = tuple(int(n) if isinstance(n, Tensor) else n for n in given)
    if not 1 <= len(given) <= 3 or not all(_is_whole(n) for n in given):
        raise ShapeError(f"Grid needs 1 to 3 whole numbers as {name}, got {name}={given}.")
    if any(n < 1 for n in given):
        raise ShapeError(f"Grid needs at least one token per axis, got {name}={given}.")
    whole: list[Any] = [n if isinstance(n, torch.SymInt) else int(n) for n in given]
    return tuple(whole)


def _is_whole(n: Any) -> bool:
    return not isinstance(n, bool) and isinstance(n, Integral | torch.SymInt)


def as_spacing(spacing: object, axes: int) -> tuple[float, ...]:
    """Return `spacing` as floats, checked: one positive number per axis."""
    given = tuple(cast("Iterable[object]", spacing)) if isinstance(spacing, Iterable) else (spacing,)
    numbers = [float(s) for s in given if not isinstance(s, bool) and isinstance(s, Real)]
    if len(given) != axes or len(numbers) != axes or any(not 0 < s < float("inf") for s in numbers):
        raise OptionError(
            f"spacing needs one positive number for each of {axes} axes, got spacing={spacing!r}."
        )
    return tuple(numbers)


def as_positions(where: Positions | Grid | Sequence[int], like: Tensor) -> Positions:
    """Return positions for `like` (b, n, d), from Positions, a Grid or a bare grid shape.

    A bare shape means that there are no prefix tokens; say ``Grid(shape, prefix=...)`` otherwise.

    Raises:
        ShapeError: the number of tokens differs from the one that `where` describes, or the device does.
    """
    if like.ndim != 3:
        raise ShapeError(f"The input must be tokens (b, n, d), got {tuple(like.shape)}.")
    if isinstance(where, Positions):
        pos = where
    else:
        grid = where if isinstance(where, Grid) else Grid(tuple(where))
        pos = grid.positions(like.device)
    if pos.tokens != like.shape[1]:
        raise ShapeError(
            f"The input has {like.shape[1]} tokens but {pos.grid or pos} describes {pos.tokens}; "
            "give the grid of this input, with prefix=number of class and register tokens."
        )
    if pos.coords.device != like.device:
        raise ShapeError(
            f"The input is on {like.device} but its positions are on {pos.coords.device}; "
            "make them with grid.positions(x.device)."
        )
    return pos
