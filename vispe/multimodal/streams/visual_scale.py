"""Scale of the positions of images and videos, such as the steps that MODIX and OMEGA compute from content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, ShapeError, counted
from vispe.multimodal.streams.attention_blocks import Blocks

Scale = float | Sequence[float] | Tensor | Callable[[Any], Any]


def scaled_blocks(blocks: Blocks, scale: float | Sequence[float] | Tensor) -> Blocks:
    """Return blocks with a scale for the coordinates of every image and video.

    Args:
        blocks: blocks of a stream.
        scale: number, or one number per image or video (p), in the order of the batch.

    Raises:
        ShapeError: the number of values differs from that of images and videos.
        InputError: a value is not a finite number above 0.
    """
    try:
        values = torch.as_tensor(scale, device=blocks.picture.device)
    except (TypeError, ValueError, RuntimeError):
        values = torch.tensor(False)
    if values.dtype == torch.bool or values.is_complex():
        raise InputError(f"scale needs a number, or one for each visual segment, got {scale!r}.")
    images = int(blocks.picture.max()) + 1
    if values.ndim and values.shape != (images,):
        raise ShapeError(
            f"scale needs one value for each of {counted(images, 'visual segment')}, got the shape "
            f"{tuple(values.shape)}. Pass one number, or a value per image or video."
        )
    values = values.detach().double()
    wrong = values[~(values.isfinite() & (values > 0))]
    if len(wrong):
        raise InputError(f"scale must be finite and above 0, got {wrong[0].item():g}. Pass other values.")
    of_block = torch.ones_like(blocks.seconds)
    if images:
        of_block = torch.where(blocks.visual, values.expand(images)[blocks.picture.clamp(min=0)], of_block)
    before = 1.0 if blocks.scale is None else blocks.scale
    return replace(blocks, scale=of_block * before)
