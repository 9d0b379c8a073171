"""Learned table per patch, shared by frames, with a fixed sinusoid of the frame (MoonViT, arXiv 2504.07491)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from vispe.encodings.additive.trained.learned import Learned
from vispe.encodings.parts.additive.waves import rates, waves
from vispe.encodings.registry import register
from vispe.errors import ShapeError, counted
from vispe.grid import Grid
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class LearnedVideo(Learned):
    """Adds a learned vector per patch to the tokens, and to those of videos a fixed sinusoid of their frame.

    table[y, x] + [sin(f w_i), cos(f w_i)], w_i = temperature ** (-2 i / d), i = 0 .. d/2 - 1, for frame f of several;
    images, with one frame, have table[y, x] only, although frame 0 of a video adds [0 ..., 1 ...].

    For other grids, the table is resampled bicubically with cell centres aligned, without antialiasing.
    ``learned_video.moonvit`` has the settings of the vision tower of Kimi K2.5, with at most 4 frames.

    Args:
        dim: width of the tokens, d; even.
        grid: rows and columns of the table: the grid of the training resolution; of (t, h, w), the last two.
        frames: largest number of frames; None for no limit.
        temperature: ratio of the longest to the shortest wavelength of the sinusoid; the shortest is 2 pi frames.
        std: standard deviation of the truncated normal initialisation.
        resample: how the table is resampled for another grid; see `learned`.

    Shapes: pos of a grid (h, w) or (t, h, w) with n tokens -> (1, n, d) float32; prefix tokens get 0.
    New resolution: resampled as above; frames are extrapolated.   Cost: h * w * d parameters, one resampling per grid.
    Invariant to: nothing.
    Raises: ShapeError if `pos` does not come from a grid of two or three axes, or has more than `frames`.
    Differs from the reference: transformers 5.24.0 reads tables as square, with the height as side; here, a table may
        have any height and width. It indexes out of range with more frames than its table has.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("learned_video", dim=16, grid=(4, 4))
        >>> encoding.table(Grid((3, 2, 3)).positions()).shape
        torch.Size([1, 18, 16])
    """

    name = "learned_video"
    paper = "Kimi-VL Technical Report, https://arxiv.org/abs/2504.07491"
    year = 2025
    ndim = (2, 3)
    formula = (
        r"T_{yx} + \left[ \sin f \omega_i, \; \cos f \omega_i \right] \text{ for several frames}, \quad \omega_i = "
        r"\Theta^{-2 i / d}"
    )
    tested_options = ("frames=9,temperature=100", "std=0.5")
    antialias: ClassVar[bool] = False
    presets: ClassVar[dict[str, dict[str, Any]]] = {"moonvit": {"frames": 4}}

    dim: PositiveEvenInt
    grid: Annotated[tuple[PositiveInt, ...], Interval(least=2, most=3)]
    frames: PositiveInt | None = None
    temperature: PositiveFloat = 10000.0

    @property
    def _cells(self) -> tuple[int, ...]:
        """Rows and columns of the table."""
        return self.grid[-2:]

    def _patches(self, grid: Grid) -> Tensor:
        """Return the table for the patches of a grid, (1, patches, d), in float32 or better."""
        cells = super()._patches(grid)
        frames = 1 if grid.axes == 2 else grid.shape[0]
        if self.frames is not None and frames > self.frames:
            raise ShapeError(
                f"{self.name} needs at most {counted(self.frames, 'frame')}, got {frames}. Split the video, or set "
                "frames=None."
            )
        # a single frame has no temporal term
        if frames == 1:
            return cells
        frame = torch.arange(frames, dtype=cells.dtype, device=cells.device)
        times = waves(frame[:, None] * rates(self.dim // 2, self.temperature, cells))
        # (1, h w, d) + (t, 1, d) -> (1, t h w, d)
        return (cells + times[:, None]).flatten(0, 1)[None]
