"""Checkpoints of LOOPE: keys of the released module, and shifts of cells of another grid."""

from __future__ import annotations

import logging
from typing import Any

from torch.nn import functional as F

from vispe.attention.precision import at_least_float32
from vispe.errors import EncodingMismatch, counted

_logger = logging.getLogger(__name__)


def rename_released_keys(state_dict: dict[str, Any], prefix: str, class_token: bool) -> None:
    """Rename ``art_conv.*`` of the released module, and its ``cls_token`` if the encoding has a vector for it."""
    if f"{prefix}art_conv.0.weight" not in state_dict:
        return
    # layers without parameters are at the odd indices of the released sequence
    names = {f"art_conv.{2 * i}": f"network.convs.{i}" for i in range(5)}
    names |= {"art_conv.10": "network.norm", "art_conv.12": "network.linear"}
    # a counter of torch.nn.BatchNorm2d without a counterpart here
    state_dict.pop(f"{prefix}art_conv.10.num_batches_tracked", None)
    for name in [n for n in state_dict if n.startswith(f"{prefix}art_conv.")]:
        module, _, last = name.removeprefix(prefix).rpartition(".")
        state_dict[f"{prefix}{names[module]}.{last}"] = state_dict.pop(name)
    if class_token and f"{prefix}cls_token" in state_dict:
        state_dict[f"{prefix}vector"] = state_dict.pop(f"{prefix}cls_token").reshape(1, -1)


def resample_offset(state_dict: dict[str, Any], prefix: str, grid: tuple[int, int]) -> None:
    """Resample saved shifts of the cells of another grid (bilinear)."""
    saved = state_dict.get(f"{prefix}offset")
    if saved is None or saved.ndim != 2 or saved.shape == grid:
        return
    exact = at_least_float32(saved)[None, None]
    resampled = F.interpolate(exact, size=grid, mode="bilinear", align_corners=False)
    state_dict[f"{prefix}offset"] = resampled[0, 0].to(saved.dtype)
    _logger.info("%soffset is resampled from the grid %s to %s.", prefix, tuple(saved.shape), grid)


def check_matrix(
    state_dict: dict[str, Any], prefix: str, grid: tuple[int, int], trained: tuple[int, ...] | None
) -> None:
    """Raise `EncodingMismatch` if the saved matrix over all cells is for another grid.

    Args:
        state_dict: the checkpoint.
        prefix: of the keys of the encoding.
        grid: grid of the encoding.
        trained: grid of the checkpoint, if known.
    """
    matrix = state_dict.get(f"{prefix}network.linear.weight")
    if matrix is None:
        return
    if matrix.shape[0] != grid[0] * grid[1] or (trained is not None and trained != grid):
        of_training = f" {trained}" if trained else ""
        raise EncodingMismatch(
            f"{prefix}network.linear.weight is a matrix over the {counted(matrix.shape[0], 'cell')} of the "
            f"grid{of_training} that loope was trained on, but the model has {grid} and a matrix cannot be "
            "resampled. Use that grid as grid=[h,w]: loope then resamples the output of the matrix."
        )
