"""Typed wrappers for untyped torch functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def listed(x: Tensor) -> list[Any]:
    """Return a tensor of one dimension or more as nested lists of numbers."""
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def unfolded(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Return a view with one dimension split into `sizes`."""
    return x.unflatten(dim, sizes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def distinct(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the unique values, or slices along `dim`, sorted."""
    return x.unique(dim=dim)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
