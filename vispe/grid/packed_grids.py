"""Positions and merging of the concatenated patches of images and videos, as in packed vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted, is_integer
from vispe.grid.positions import Positions


def packed_positions(
    grids: Tensor,
    merge: int | tuple[int, int] = 1,
    *,
    frames: bool = True,
    device: torch.device | None = None,
) -> Positions:
    """Return the positions of the concatenated patches of images and videos.

    Frame by frame; in each frame, merge windows are row-major, as are the patches inside a window. With ``merge=1``
    this is the row-major order of patches.

    Args:
        grids: (m, 3), frames, rows and columns of patches of each image or video (`grid_thw`).
        merge: rows and columns of a merge window (`spatial_merge_size`).
        frames: whether the frame, counted from 0 in each video, is the first of three coordinates.
        device: device of the coordinates; that of `grids` by default.

    Returns:
        Positions with coords (1, n, 3) or (1, n, 2), float32, without a grid.

    Raises:
        ShapeError: `grids` has another shape, or a window does not divide a grid.
        OptionError: a merge window is not one or two integers above 0.

    Example:
        >>> packed_positions(torch.tensor([[1, 2, 4]]), merge=2, frames=False).coords[0, :, 1].tolist()
        [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    """
    kernel = _kernel(merge)
    device = grids.device if device is None else device
    coords: list[Tensor] = []
    for t, h, w in _sizes(grids, kernel):
        axes = torch.meshgrid(*(torch.arange(n, device=device) for n in (t, h, w)), indexing="ij")
        cells = torch.stack(axes, -1) if frames else torch.stack(axes[1:], -1)
        # (t, windows, kh, kw, axes) -> (n, axes)
        coords.append(_windows(cells, kernel).flatten(0, 3))
    return Positions(torch.cat(coords).float()[None])


def pool_windows(x: Tensor, grids: Tensor, kernel: int | tuple[int, int]) -> Tensor:
    """Return the mean over the frames of each image or video, grouped by merge windows.

    Args:
        x: (n, c), row-major patches of all frames.
        grids: (m, 3), frames, rows and columns of each image or video.
        kernel: rows and columns of a window, kh and kw (`merge_kernel_size`).

    Returns:
        (windows, kh * kw, c), windows row-major in each image or video, patches row-major in each window.

    Raises:
        ShapeError: shapes do not match, or a window does not divide a grid.
        OptionError: a merge window is not one or two integers above 0.

    Example:
        >>> x = torch.arange(8.0)[:, None]
        >>> pool_windows(x, torch.tensor([[2, 2, 2]]), 2)[..., 0]
        tensor([[2., 3., 4., 5.]])
    """
    sides = _kernel(kernel)
    sizes = list(_sizes(grids, sides))
    lengths = [t * h * w for t, h, w in sizes]
    if x.ndim != 2 or len(x) != sum(lengths):
        raise ShapeError(
            f"pool_windows: x must have one row for each of the {counted(sum(lengths), 'patch')} of grids, got "
            f"{tuple(x.shape)}."
        )
    pooled: list[Tensor] = []
    start = 0
    for size, length in zip(sizes, lengths, strict=True):
        # (n, c) -> (1, h, w, c), the mean over frames
        mean = x[start : start + length].reshape(*size, -1).mean(0, keepdim=True)
        # (1, windows, kh, kw, c) -> (windows, kh * kw, c)
        pooled.append(_windows(mean, sides).flatten(0, 1).flatten(1, 2))
        start += length
    return torch.cat(pooled)


def _windows(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Return cells (t, h, w, ...) by windows, (t, windows, kh, kw, ...)."""
    kh, kw = kernel
    t, h, w = x.shape[:3]
    # (t, h / kh, kh, w / kw, kw, ...) -> (t, windows, kh, kw, ...)
    return x.reshape(t, h // kh, kh, w // kw, kw, *x.shape[3:]).transpose(2, 3).flatten(1, 2)


def _kernel(kernel: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a merge window."""
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    if len(sides) != 2 or not all(is_integer(n) and n > 0 for n in sides):
        raise OptionError(
            f"A merge window needs rows and columns above 0, got {kernel!r}. Pass one or two integers."
        )
    return sides


def _sizes(grids: Tensor, kernel: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield frames, rows and columns of each image or video, checked."""
    is_integer = not (grids.is_floating_point() or grids.is_complex() or grids.dtype == torch.bool)
    if grids.ndim != 2 or grids.shape[1] != 3 or not len(grids) or not is_integer:
        raise ShapeError(
            "Packed patches need grids of shape (m, 3), integers of frames, rows and columns, got "
            f"{tuple(grids.shape)} {grids.dtype}."
        )
    sizes = cast("list[tuple[int, int, int]]", grids.tolist())  # pyright: ignore[reportUnknownMemberType]
    for t, h, w in sizes:
        if min(t, h, w) < 1 or h % kernel[0] or w % kernel[1]:
            raise ShapeError(
                f"A grid needs at least one patch per axis, and rows and columns that the merge window {kernel} "
                f"divides, got {[t, h, w]}."
            )
        yield t, h, w
