"""Typed wrappers for untyped torch functions, and the check of the dtype of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError


def listed(x: Tensor) -> list[Any]:
    """Return a tensor of one dimension or more as nested lists of numbers."""
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def unfolded(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Return a view with one dimension split into `sizes`."""
    return x.unflatten(dim, sizes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def distinct(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the unique values, or slices along `dim`, sorted."""
    return x.unique(dim=dim)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def check_exact(name: str, values: object) -> None:
    """Raise `InputError` unless positions are a tensor of integers, float32 or float64, which half precision rounds."""
    if not isinstance(values, Tensor):
        raise InputError(
            f"{name} needs a tensor, got {type(values).__name__}. Convert it with torch.as_tensor."
        )
    real = values.dtype in (torch.float32, torch.float64)
    if real or not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool):
        return
    raise InputError(
        f"{name} needs integers, float32 or float64, got {values.dtype}. Half precision rounds positions above 256 "
        "(bfloat16) or 2048 (float16)."
    )
