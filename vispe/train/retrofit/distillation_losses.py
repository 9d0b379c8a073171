"""The losses of a student: the teacher's features without blanked channels, and features that move with the image.

An image in two views, turned or elsewhere on a canvas, should have the same features once they are moved back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.model_access import final_tokens
from vispe.errors import OptionError, ShapeError
from vispe.symmetry.d4 import D4, IDENTITY, Element
from vispe.symmetry.translations import Placement, shared
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import Weights

Pair = tuple[Placement, Placement]


class View(Protocol):
    """A way to show an image, which features can be moved back from: an `Element` of D4 or a `Placement`."""

    def apply(self, values: Tensor, /) -> Tensor:
        """Return the image as it is shown."""
        ...

    def undo(self, values: Tensor, /) -> Tensor:
        """Return features of what is shown where the image has them."""
        ...


def cosine_distance(student: Tensor, target: Tensor) -> Tensor:
    """Return 1 - cosine over channels, mean over patches, for every image (b,), in float32.

    >>> cosine_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    tensor([1.])

    Args:
        student: maps (b, d, h, w), or one vector for each image (b, d).
        target: the same shape.

    Raises:
        ShapeError: the shapes differ.
    """
    if student.shape != target.shape:
        raise ShapeError(
            f"Features are compared patch by patch, got {tuple(student.shape)} and {tuple(target.shape)}."
        )
    distance = 1 - F.cosine_similarity(student.float(), target.float(), dim=1)
    return distance.flatten(1).mean(1) if distance.ndim > 1 else distance


def blanked(maps: Tensor, channels: Sequence[int]) -> Tensor:
    """Return maps (b, d, h, w) with some channels set to 0.

    >>> blanked(torch.ones(1, 3, 1, 1), [1]).flatten()
    tensor([1., 0., 1.])

    Raises:
        OptionError: a channel that does not exist.
    """
    bad = [c for c in channels if not 0 <= c < maps.shape[1]]
    if bad:
        raise OptionError(f"Channel {bad[0]} cannot be blanked: the features have {maps.shape[1]}, from 0.")
    if not channels:
        return maps
    return maps.index_fill(1, torch.tensor(list(channels), device=maps.device), 0)


def pose_of(seed: int, step: int) -> Element:
    """Return the pose of an update: one of the seven that move an image, drawn from (seed, step)."""
    return D4[1 + int(np.random.default_rng([seed, 7, step]).integers(len(D4) - 1))]


def pair_of(seed: int, step: int, progress: float, content: tuple[int, int], augment: Augment) -> Pair:
    """Return the two placements of an update, drawn from (seed, step), which differ in their offsets.

    Args:
        seed: of the run.
        step: number of updates before.
        progress: share of the run that is done, by which the canvas grows.
        content: height and width of the images in patches.
        augment: canvas, curriculum and which of the two is the example.
    """
    generator = np.random.default_rng([seed, 13, step])
    options = {"content": content, "canvas": (augment.place,) * 2, "curriculum": augment.curriculum}
    first = second = Placement.draw(generator, progress, **options)
    if augment.place_teacher == "best":
        spare = [size - n for size, n in zip(first.canvas, content, strict=True)]
        first = Placement(content, first.canvas, (spare[0] // 2, spare[1] // 2))
    while second.offset == first.offset:
        second = Placement.draw(generator, progress, **options)
    return shared(first, second)


def disagreement(
    student: nn.Module,
    images: Tensor,
    first: View,
    second: View,
    *,
    of_first: Tensor | None = None,
    follow: bool = False,
) -> Tensor:
    """Return 1 - cosine between a student's features in two views, each moved back, mean over patches, (b,).

    Args:
        student: a model of timm, or an image tower of open_clip.
        images: normalised (b, 3, H, W).
        first: view.
        second: view, which has its patches in common with the first.
        of_first: features of the first view, where they are known; otherwise both views are one batch of the student.
        follow: let the second learn from the first, which is held fixed.

    Raises:
        ShapeError: the views give back different patches.
    """
    if of_first is None:
        both = torch.cat([first.apply(images), second.apply(images)])
        of_first, of_second = final_tokens(student, both)[0].chunk(2)
    else:
        of_second, _ = final_tokens(student, second.apply(images))
    wanted = first.undo(of_first)
    return cosine_distance(second.undo(of_second), wanted.detach() if follow else wanted)


@dataclass(frozen=True, eq=False)
class Objective:
    """The parts of the loss, image by image.

    Attributes:
        teacher: frozen, in evaluation mode.
        student: what is trained.
        weights: of the parts; a part of weight 0 is not computed, except for distill, which is reported.
        channels: that are set to 0 in what the student learns.
        follow: whether the second of two placements learns from the first, and not each from the other.
    """

    teacher: nn.Module
    student: nn.Module
    weights: Weights
    channels: Sequence[int] = ()
    follow: bool = False

    def parts(
        self, images: Tensor, pose: Element, kept: Tensor | None = None, pair: Pair | None = None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the parts (b,) float32 by name, and the maps of the student and of the target, detached.

        Args:
            images: normalised (b, 3, H, W).
            pose: in which the student is compared with itself.
            kept: the teacher's maps of these images, where they are known.
            pair: placements at which it is compared with itself, where they have a weight.

        Raises:
            OptionError: placements have a weight, and there are none.
        """
        with torch.no_grad():
            target, token = final_tokens(self.teacher, images) if kept is None else (kept, None)
            target = blanked(target, self.channels)
        maps, own = final_tokens(self.student, images)
        parts = {"distill": cosine_distance(maps, target)}
        if self.weights.centred:
            parts["centred"] = cosine_distance(
                *(m.float() - m.float().mean((2, 3), keepdim=True) for m in (maps, target))
            )
        if self.weights.d4:
            parts["d4"] = disagreement(self.student, images, IDENTITY, pose, of_first=maps)
        if self.weights.place:
            if pair is None:
                raise OptionError(
                    f"loss.place={self.weights.place} compares two placements, got none; give a pair."
                )
            parts["place"] = disagreement(self.student, images, *pair, follow=self.follow)
        if self.weights.class_token:
            parts["class_token"] = cosine_distance(own, token)
        return parts, maps.detach(), target

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the parts, (b,)."""
        return sum(getattr(self.weights, name) * value for name, value in parts.items())
