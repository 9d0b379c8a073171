"""Tables of relative offsets: names in released checkpoints, and resampling to other grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import all_equal, exact_product, fixed_size, same_grid
from vispe.encodings.parts.coords import exact_device
from vispe.utils.axes import last_axis_to

Resample = Literal["geometric", "bicubic"]


def take(state_dict: dict[str, Any], parent_prefix: str, prefix: str, names: dict[str, str]) -> None:
    """Rename entries of released checkpoints from the attention layer (or the root, if shared by layers).

    Args:
        state_dict: state dict that is being loaded.
        parent_prefix: prefix of the module that contains the encoding.
        prefix: prefix of the encoding.
        names: released names, after `parent_prefix`, to names of vispe.
    """
    for released, name in names.items():
        if parent_prefix + released in state_dict:
            state_dict[prefix + name] = state_dict.pop(parent_prefix + released)


def drop_index(state_dict: dict[str, Any], parent_prefix: str, holders: Sequence[str]) -> None:
    """Remove the index and coordinate buffers of older checkpoints, which are recomputed."""
    for holder in holders:
        for name in ("relative_position_index", "relative_coords_table"):
            state_dict.pop(f"{parent_prefix}{holder}{name}", None)


def resample_table(values: Tensor, old: tuple[int, ...], new: tuple[int, ...], method: Resample) -> Tensor:
    """Return a table of offsets (h, 2 n_1 - 1, ...) of grid `old` for grid `new`, axis by axis.

    'geometric' leaves near offsets unchanged and spreads far ones, by linear interpolation between points
    whose distances grow by a constant factor (BEiT); 'bicubic' stretches all offsets equally.
    """
    if same_grid(old, new):
        return values
    # for symbolic sizes, equality of the grids is decided at run time
    is_unchanged = None if all(map(fixed_size, new)) else all_equal(old, new, values.device)
    for axis, (o, n) in enumerate(zip(old, new, strict=True), 1):
        weights = (_geometric if method == "geometric" else _bicubic)(o, n, values)
        if is_unchanged is not None:
            rows = torch.arange(2 * n - 1, device=values.device)[:, None]
            unit = rows == torch.arange(2 * o - 1, device=values.device)
            weights = torch.where(is_unchanged, unit.to(weights.dtype), weights)
        values = last_axis_to(exact_product(values.movedim(axis, -1), weights.t()), axis)
    return values


def _bicubic(old: int, new: int, like: Tensor) -> Tensor:
    """Return the matrix (2 new - 1, 2 old - 1) of bicubic resampling along one axis: the images of the unit vectors."""
    # resampling is linear, so the images of unit vectors are its matrix
    units = torch.eye(2 * old - 1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    wide = F.interpolate(units[:, None, None], size=(1, 2 * new - 1), mode="bicubic", align_corners=False)
    return wide[:, 0, 0].t()


def _geometric(old: int, new: int, like: Tensor) -> Tensor:
    """Return the matrix (2 new - 1, 2 old - 1) of linear interpolation between geometrically spaced points."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if old == 1:
        return torch.ones(2 * new - 1, 1, dtype=dtype, device=like.device)
    # positions of the old offsets: steps grow by a constant factor from 1 on, so near offsets are unchanged
    ratio = growth(old, new) if fixed_size(new) else traced_growth(old, new, exact_device(like))
    steps = ratio ** torch.arange(old - 1, dtype=torch.float64, device=exact_device(like))
    side = steps.cumsum(0)
    points = torch.cat([-side.flip(0), side.new_zeros(1), side])
    offsets = torch.arange(1 - new, new, dtype=torch.float64, device=points.device)
    # linear interpolation of each new offset between its two old neighbours
    right = torch.bucketize(offsets, points).clamp(1, 2 * old - 2)
    low, high = points.index_select(0, right - 1), points.index_select(0, right)
    fraction = ((offsets - low) / (high - low)).clamp(0, 1)[:, None]
    weights = F.one_hot(right, 2 * old - 1) * fraction + F.one_hot(right - 1, 2 * old - 1) * (1 - fraction)
    return weights.to(device=like.device, dtype=dtype)


def growth(old: int, new: int) -> float:
    """Return the growth factor of steps for which old - 1 of them, starting at 1, reach new - 1.

    Between 1.01 and 1.5, as in BEiT; for smaller grids, offsets remain almost unchanged.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        if (1.0 - middle ** (old - 1)) / (1.0 - middle) > new - 1:
            high = middle
        else:
            low = middle
    return (low + high) / 2.0


def traced_growth(old: int, new: int, device: torch.device) -> Tensor:
    """Return `growth` as a tensor () float64, computed without a branch that depends on `new`.

    The 19 bisections are three rounds that each compare all candidates at once.
    """
    low = torch.full((1,), 1.01, dtype=torch.float64, device=device)
    step, last = 0.49, torch.full((1,), new - 1, dtype=torch.float64, device=device)
    for parts in (128, 64, 64):
        step = step / parts
        tried = low + step * torch.arange(1, parts, dtype=torch.float64, device=device)
        short = (1.0 - tried ** (old - 1)) / (1.0 - tried) <= last
        low = low + step * short.sum()
    return (low + step / 2)[0]
