"""Positions of crops of one field at several magnifications, as in MuViT (arXiv 2602.24222)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted
from vispe.grid.positions import Positions

Edges = Literal["centres", "box"]


def crop_positions(
    size: Sequence[int],
    patch_size: Sequence[int],
    *,
    levels: Sequence[float] = (1,),
    boxes: Tensor | None = None,
    edges: Edges = "centres",
    device: torch.device | str | None = None,
) -> Positions:
    """Return the positions of the patches of several crops of equal size, in one coordinate system.

    The unit is a pixel of level 1. Tokens are ordered by crop, then row-major. ``attrs['level']`` has the number of the
    crop of each token (`vispe.grid.per_token.PerToken`, from 0), ``attrs['spacing']`` the distance of its neighbours.

    Args:
        size: pixels of every crop per axis, slow to fast, 1 to 3 axes.
        patch_size: pixels of a patch per axis.
        levels: magnification divisor of each crop: a pixel of level 4 covers 4 x 4 pixels of level 1.
        boxes: (b or 1, crops, 2, axes), float32 or float64: centres of the first and last pixel of each crop. By
            default, all crops are centred at 0.
        edges: 'centres' uses the true centres of patches; 'box' puts the first and last patch of each axis on the
            first and last pixel of the box, as the released code does (a single patch on the first pixel). The distance
            of patches is then level * (size - 1) / (patches - 1), not level * patch_size. Pixels beyond the last whole
            patch are then ignored, as there.
        device: of the result; that of `boxes` by default.

    Raises:
        ShapeError: sizes, levels and boxes disagree, or a size is not a multiple of its patch size (with 'box', is
            smaller).
        OptionError: a level is not positive, or `edges` is unknown.

    Example:
        >>> crop_positions((8,), (4,), levels=(1, 4)).coords.flatten().tolist()
        [-2.0, 2.0, -8.0, 8.0]
        >>> crop_positions((8,), (4,), levels=(1, 4), edges="box").coords.flatten().tolist()
        [-3.5, 3.5, -14.0, 14.0]
    """
    size, patch_size, levels = tuple(size), tuple(patch_size), tuple(levels)
    if edges not in get_args(Edges):
        raise OptionError(f"edges must be one of {', '.join(get_args(Edges))}, got {edges!r}.")
    _check_sizes(size, patch_size, edges)
    if not levels or any(not 0 < level < float("inf") for level in levels):
        raise OptionError(f"levels must be one positive number per crop, got levels={levels}.")
    if boxes is None:
        # centres of the border pixels, relative to the centre of the field
        half = torch.tensor([n / 2 - 0.5 for n in size], device=device)
        corner = torch.tensor(levels, dtype=torch.float32, device=device)[:, None] * half
        boxes = torch.stack([-corner, corner], 1)[None]
    if boxes.ndim != 4 or boxes.shape[1:] != (len(levels), 2, len(size)) or not boxes.is_floating_point():
        raise ShapeError(
            f"crop_positions needs boxes (b, {len(levels)}, 2, {len(size)}) of floating-point numbers for "
            f"{counted(len(levels), 'level')} and {counted(len(size), 'axis')}, got {tuple(boxes.shape)} {boxes.dtype}."
        )
    boxes = boxes.to(device)
    crops = [_crop(boxes[:, i], size, patch_size, level, edges) for i, level in enumerate(levels)]
    return Positions.joined(crops)


def _crop(
    box: Tensor, size: tuple[int, ...], patch_size: tuple[int, ...], level: float, edges: Edges
) -> Positions:
    """Return the positions of one crop from its box (b or 1, 2, axes)."""
    lines: list[Tensor] = []
    steps: list[Tensor] = []
    for axis, (pixels, patch) in enumerate(zip(size, patch_size, strict=True)):
        first, last = box[:, 0, axis], box[:, 1, axis]
        patches = pixels // patch
        # a crop of one pixel has no extent that gives the size of a pixel
        pixel = (last - first) / (pixels - 1) if pixels > 1 else torch.full_like(first, level)
        step = pixel * patch
        if edges == "centres":
            # from the centre of the first pixel to that of the first patch
            first = first + pixel * (patch - 1) / 2
        elif patches > 1:
            # 'box': the first and last patch are at the corners of the box
            step = (last - first) / (patches - 1)
        lines.append(first[:, None] + step[:, None] * torch.arange(patches, device=box.device))
        steps.append(step)
    # (b, n_1, ..., axes) -> (b, n, axes)
    shape = [len(box), *(line.shape[1] for line in lines)]
    views = [
        line.reshape(len(box), *(-1 if i == axis else 1 for i in range(len(lines))))
        for axis, line in enumerate(lines)
    ]
    coords = torch.stack([view.expand(shape) for view in views], -1).flatten(1, -2)
    return Positions(coords, cell=torch.stack(steps, -1))


def _check_sizes(size: tuple[int, ...], patch_size: tuple[int, ...], edges: Edges) -> None:
    if not 1 <= len(size) <= 3 or len(size) != len(patch_size):
        raise ShapeError(
            f"crop_positions needs size and patch_size of 1 to 3 axes, got size={size}, patch_size={patch_size}."
        )
    if any(p < 1 or n < p or (edges == "centres" and n % p) for n, p in zip(size, patch_size, strict=True)):
        raise ShapeError(
            "crop_positions needs a size that is a multiple of patch_size on every axis, got "
            f"size={size}, patch_size={patch_size}."
        )


def level_mask(pos: Positions, mode: Literal["causal", "same"]) -> Tensor:
    """Return which keys each query attends to, (b or 1, 1, n, n) bool, for ``vispe.Attention(...)(attn_mask=...)``.

    Args:
        pos: positions from `crop_positions` or `Positions.joined`, in which grids are numbered from 0.
        mode: 'causal' for keys of grids with a number up to that of the query, 'same' for keys of the same grid. Tokens
            without a position attend to all tokens, and all attend to them.

    Raises:
        OptionError: `mode` is unknown.
        ShapeError: the positions are not joined from several grids.
    """
    if mode not in ("causal", "same"):
        raise OptionError(f"mode must be one of causal, same, got {mode!r}.")
    if "level" not in pos.attrs:
        raise ShapeError(f"level_mask needs positions of several grids, got {pos}. Use Positions.joined.")
    level = pos.attrs["level"].values
    # (b or 1, n) -> (b or 1, 1, queries, 1) and (b or 1, 1, 1, keys)
    query, key = level[:, None, :, None], level[:, None, None, :]
    mask = query >= key if mode == "causal" else query == key
    anywhere = ~pos.spatial[:, None]
    # tokens without a position attend to all tokens, and all tokens attend to them
    return mask | anywhere[..., None] | anywhere[:, :, None]
