"""Checks of grid shapes, offsets, spacings and the fields of positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted


def as_offset(offset: Iterable[Any], axes: int) -> tuple[float, ...]:
    """Return `offset` as finite floats, one per axis; `OptionError` otherwise."""
    values = tuple(offset)
    numbers = [float(v) for v in values if not isinstance(v, bool) and isinstance(v, Real)]
    if len(values) != axes or len(numbers) != axes or not all(map(math.isfinite, numbers)):
        raise OptionError(
            f"offset must be one finite number for each of {counted(axes, 'axis')}, got offset={offset!r}."
        )
    return tuple(numbers)


def as_shape(shape: Iterable[Any], name: str) -> tuple[int, ...]:
    """Return `shape` as 1 to 3 positive integers; `ShapeError` otherwise."""
    sizes = tuple(shape)
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # sizes are tensors while tracing; torch warns that the trace fixes their values
        sizes = tuple(int(n) if isinstance(n, Tensor) else n for n in sizes)
    if not 1 <= len(sizes) <= 3 or not all(is_size(n) for n in sizes):
        raise ShapeError(f"Grid needs 1 to 3 integers as {name}, got {name}={sizes}.")
    if any(n < 1 for n in sizes):
        raise ShapeError(f"Grid needs at least one token per axis, got {name}={sizes}.")
    integers: list[Any] = [n if isinstance(n, torch.SymInt) else int(n) for n in sizes]
    return tuple(integers)


def is_size(n: Any) -> bool:
    """Return whether `n` is an integer, also a symbolic one of a compiled model."""
    return not isinstance(n, bool) and isinstance(n, Integral | torch.SymInt)


def as_spacing(spacing: object, axes: int) -> tuple[float, ...]:
    """Return `spacing` as a tuple of floats, one per axis.

    Raises:
        OptionError: `spacing` is not one positive number per axis.

    Example:
        >>> as_spacing([1, 0.5], axes=2)
        (1.0, 0.5)
    """
    values = tuple(cast("Iterable[object]", spacing)) if isinstance(spacing, Iterable) else (spacing,)
    numbers = [float(s) for s in values if not isinstance(s, bool) and isinstance(s, Real)]
    if len(values) != axes or len(numbers) != axes or any(not 0 < s < float("inf") for s in numbers):
        raise OptionError(
            f"spacing must be one positive number for each of {counted(axes, 'axis')}, got spacing={spacing!r}."
        )
    return tuple(numbers)


def check_coords(coords: Tensor) -> None:
    """Raise `ShapeError` unless `coords` is (b, n, axes) in float32 or float64, with 1 to 3 axes."""
    exact = coords.dtype in (torch.float32, torch.float64)
    if coords.ndim != 3 or not 1 <= coords.shape[-1] <= 3 or not exact:
        raise ShapeError(
            "Positions needs float32 or float64 coords of shape (b, n, axes) with 1 to 3 axes, "
            f"got {tuple(coords.shape)} {coords.dtype}."
        )


def check_fields(pos: Any, extent: Tensor | None) -> None:
    """Raise `ShapeError` unless the fields of `Positions` and an `extent` have the shapes that its docstring names."""
    b, n, a = pos.coords.shape
    fields = (
        ("spatial", pos.spatial, n),
        ("index", pos.index, n),
        ("extent", extent, a),
        ("cell", pos.cell, a),
    )
    for name, field, expected in fields:
        if field is not None and (
            field.ndim != 2 or field.shape[1] != expected or field.shape[0] not in (1, b)
        ):
            raise ShapeError(
                f"Positions needs {name} of shape ({b} or 1, {expected}) for coords {(b, n, a)}, got "
                f"{tuple(field.shape)}."
            )
    if pos.spatial.dtype != torch.bool:
        raise ShapeError(f"Positions needs spatial of dtype bool, got {pos.spatial.dtype}.")
    if pos.grid is None:
        return
    if pos.grid.axes != a or (pos.index is None and pos.grid.tokens != n):
        raise ShapeError(
            f"Positions needs coords of {counted(pos.grid.tokens, 'token')} on "
            f"{counted(pos.grid.axes, 'axis')} for {pos.grid}, got {(b, n, a)}. Pass `index`, the cell of each token."
        )
