"""Features averaged over poses and positions: what a model computes that depends on neither, up to sampling.

A view is a pose of D4 followed by a translation on a canvas that is filled by reflection. The inverses are exact, so
the mean of the features over many views has no direction and, except near the borders, no position. `d4_average` is the
mean over the eight poses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from vispe.errors import ShapeError, counted
from vispe.images.symmetry.d4 import D4, IDENTITY, Element
from vispe.images.symmetry.translations import Placement
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeInt, Options

MaxPoses = Annotated[int, Interval(least=1, most=len(D4))]
_SHARE = 6  # the canvas is larger than the image by a sixth of its side, in patches


@dataclass(frozen=True)
class View:
    """A pose of an image, and then a position on a canvas.

    Attributes:
        pose: element of D4.
        placement: position of the posed image on a canvas; None without a canvas.

    Example:
        >>> view = View(D4[1], Placement((3, 2), (4, 4), (1, 2), "mirror"))
        >>> image = torch.arange(6.0).reshape(1, 1, 2, 3)
        >>> view.apply(image).shape, torch.equal(view.undo(view.apply(image)), image)
        (torch.Size([1, 1, 4, 4]), True)
    """

    pose: Element = IDENTITY
    placement: Placement | None = None

    def apply(self, values: Tensor) -> Tensor:
        """Return the view (..., H', W') of an image (..., H, W)."""
        posed = self.pose.apply(values)
        return posed if self.placement is None else self.placement.apply(posed)

    def undo(self, values: Tensor) -> Tensor:
        """Return features (..., h', w') of the view in the frame of the image, (..., h, w)."""
        return self.pose.undo(values if self.placement is None else self.placement.undo(values))


@dataclass(frozen=True, kw_only=True)
class ViewAverage(Options):
    """Numbers of poses and positions over which features are averaged.

    Attributes:
        poses: number of different poses, 1 to 8. With 1, images keep their pose; 8 is the whole group D4; other numbers
            are random selections.
        positions: number of random positions per pose, on a canvas that is larger by a sixth of the image; 0 uses no
            canvas.

    Raises:
        OptionError: a number is out of range.

    Example:
        >>> average = ViewAverage(poses=8, positions=2)
        >>> average.passes, len(average.sample(np.random.default_rng(0), (16, 16)))
        (16, 16)
    """

    poses: MaxPoses = 1
    positions: NonNegativeInt = 0

    @property
    def passes(self) -> int:
        """Number of forward passes per image."""
        return self.poses * max(1, self.positions)

    @property
    def is_identity(self) -> bool:
        """Whether features are those of the image itself."""
        return self.passes == 1 and not self.positions

    def sample(self, generator: np.random.Generator, grid: tuple[int, int]) -> list[View]:
        """Return random views of images.

        Args:
            generator: random generator.
            grid: height and width of the images in patches.
        """
        if self.poses == 1:
            chosen = [IDENTITY]
        else:
            chosen = [D4[k] for k in sorted(generator.permutation(len(D4))[: self.poses].tolist())]
        if not self.positions:
            return [View(pose) for pose in chosen]
        views = []
        for pose in chosen:
            # odd rotations exchange height and width
            content = (grid[1], grid[0]) if pose.turns % 2 else grid
            canvas = (content[0] + max(1, content[0] // _SHARE), content[1] + max(1, content[1] // _SHARE))
            for _ in range(self.positions):
                views.append(
                    View(pose, Placement.draw(generator, content=content, canvas=canvas, fill="mirror"))
                )
        return views


def view_average(features: Callable[[Tensor], Tensor], images: Tensor, views: Sequence[View]) -> Tensor:
    """Return the mean of features over views, in the frame of the images.

    Half precision is summed in float32. Views are computed one after the other.

    Args:
        features: function of images that returns maps (b, c, h, w), in evaluation mode.
        images: (b, 3, H, W).
        views: at least one view, of images of this size.

    Returns:
        Maps (b, c, h, w), with the dtype of `features`.

    Raises:
        ShapeError: the maps of two views differ in shape.

    Example:
        >>> columns = lambda images: images * torch.arange(4.0)
        >>> view_average(columns, torch.ones(1, 1, 4, 4), [View(pose) for pose in D4])[0, 0, 0]
        tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    total, dtype = None, images.dtype
    for view in views:
        maps = features(view.apply(images))
        dtype, maps = maps.dtype, view.undo(maps)
        if total is not None and maps.shape != total.shape:
            raise ShapeError(
                f"Features must have {counted(tuple(total.shape[-2:]), 'cell')} in every view, got "
                f"{tuple(maps.shape[-2:])}. Use features with one cell per patch that support any image size."
            )
        part = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
        total = part / len(views) if total is None else total.add_(part, alpha=1 / len(views))
    return total.to(dtype)


class AveragedFeatures(nn.Module):
    """Features averaged over poses and positions; the views depend on the size of the images only.

    Args:
        features: function of images that returns maps (b, c, h, w); if it is a module, it is registered as a submodule.
        average: numbers of poses and positions.
        patch_size: patch size in pixels.
        seed: seed of the views.

    Raises:
        ShapeError: the sides of the images are not multiples of the patch size.

    Example:
        >>> average = ViewAverage(poses=8, positions=1)
        >>> AveragedFeatures(torch.nn.AvgPool2d(8), average, patch_size=8)(torch.ones(1, 3, 16, 24)).shape
        torch.Size([1, 3, 2, 3])
    """

    def __init__(
        self, features: Callable[[Tensor], Tensor], average: ViewAverage, patch_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.features, self.average, self.patch_size, self.seed = features, average, patch_size, seed

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (b, c, h, w) of images (b, 3, H, W)."""
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ShapeError(
                f"Image sides must be multiples of patch_size={self.patch_size} px, got {(height, width)}. Crop or pad "
                "the images."
            )
        grid = (height // self.patch_size, width // self.patch_size)
        return view_average(
            self.features, images, self.average.sample(np.random.default_rng(self.seed), grid)
        )
