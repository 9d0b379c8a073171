"""Losses of a student: distillation of the teacher's ablated features, and equivariance.

The features of two views of an image (poses, or positions on a canvas) should be equal after the inverse transform.
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
from vispe.images.symmetry.d4 import D4, IDENTITY, Element
from vispe.images.symmetry.translations import Placement, common_part
from vispe.images.symmetry.view_averages import View, view_average
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import LossWeights, Target

Pair = tuple[Placement, Placement]


class AugmentedView(Protocol):
    """Invertible transform of images and features: an `Element` of D4 or a `Placement`."""

    def apply(self, values: Tensor, /) -> Tensor:
        """Return the transformed image."""
        ...

    def undo(self, values: Tensor, /) -> Tensor:
        """Return the features of a transformed image in the frame of the original image."""
        ...


def cosine_distance(student: Tensor, target: Tensor) -> Tensor:
    """Return 1 - cosine over channels, mean over patches, (b,) float32.

    >>> cosine_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    tensor([1.])

    Args:
        student: maps (b, d, h, w), or one vector per image (b, d).
        target: tensor of the same shape.

    Raises:
        ShapeError: the shapes differ.
    """
    if student.shape != target.shape:
        raise ShapeError(
            f"cosine_distance: shapes must be equal, got {tuple(student.shape)} and {tuple(target.shape)}."
        )
    # float32, since norms of half-precision features lose digits under autocast; (b, d, h, w) -> (b, h, w)
    distance = 1 - F.cosine_similarity(student.float(), target.float(), dim=1)
    # class tokens have no spatial axes: (b, d) -> (b,)
    return distance.flatten(1).mean(1) if distance.ndim > 1 else distance


def ablated(maps: Tensor, channels: Sequence[int]) -> Tensor:
    """Return maps (b, d, h, w) with `channels` set to 0.

    >>> ablated(torch.ones(1, 3, 1, 1), [1]).flatten()
    tensor([1., 0., 1.])

    Raises:
        OptionError: a channel does not exist.
    """
    invalid = [c for c in channels if not 0 <= c < maps.shape[1]]
    if invalid:
        raise OptionError(f"ablated: channels must be below {maps.shape[1]}, got {invalid[0]}.")
    if not channels:
        return maps
    return maps.index_fill(1, torch.tensor(list(channels), device=maps.device), 0)


def averaged_tokens(
    teacher: nn.Module, images: Tensor, views: Sequence[View] = ()
) -> tuple[Tensor, Tensor | None]:
    """Return the final patch features (b, d, h, w) and class tokens (b, d) of a model, averaged over views.

    Args:
        teacher: model of timm, or an image tower of open_clip.
        images: normalised, (b, 3, H, W).
        views: views of the images; none returns the features of the images themselves.
    """
    if not views:
        return final_tokens(teacher, images)
    tokens: list[Tensor | None] = []

    def maps(view: Tensor) -> Tensor:
        patches, token = final_tokens(teacher, view)
        tokens.append(token)
        return patches

    mean = view_average(maps, images, views)
    return mean, None if tokens[0] is None else torch.stack(tokens).float().mean(0).to(mean.dtype)


def sample_views(seed: int, step: int, grid: tuple[int, int], target: Target) -> list[View]:
    """Return the views of the target at a step; none without an average. They depend on (seed, step) only."""
    average = target.average
    # 17 separates this random stream from those of poses and placements
    return [] if average.is_identity else average.sample(np.random.default_rng([seed, 17, step]), grid)


def sample_pose(seed: int, step: int) -> Element:
    """Return the random pose of a step, one of the seven that are not the identity; depends on (seed, step) only."""
    # 7 and 13 (below) separate the random streams of poses and placements; D4[0] is the identity
    return D4[1 + int(np.random.default_rng([seed, 7, step]).integers(len(D4) - 1))]


def sample_placements(
    seed: int, step: int, progress: float, content: tuple[int, int], augment: Augment
) -> Pair:
    """Return two random placements with different offsets for a step; they depend on (seed, step) only.

    Args:
        seed: seed of the run.
        step: index of the step.
        progress: completed fraction of the run, which determines the size of the canvas.
        content: height and width of the images in patches.
        augment: canvas, curriculum, and which of the two is the target.
    """
    generator = np.random.default_rng([seed, 13, step])
    options = {"content": content, "canvas": (augment.place,) * 2, "curriculum": augment.curriculum}
    first = second = Placement.draw(generator, progress, **options)
    if augment.place_teacher == "best":
        # centred on the canvas, where the content has the largest distance to the border
        spare = [size - n for size, n in zip(first.canvas, content, strict=True)]
        first = Placement(content, first.canvas, (spare[0] // 2, spare[1] // 2))
    # equal offsets would have a loss of 0
    while second.offset == first.offset:
        second = Placement.draw(generator, progress, **options)
    return common_part(first, second)


def view_distance(
    student: nn.Module,
    images: Tensor,
    first: AugmentedView,
    second: AugmentedView,
    *,
    of_first: Tensor | None = None,
    follow: bool = False,
) -> Tensor:
    """Return 1 - cosine of a student's features in two views after the inverse transforms, mean over patches, (b,).

    Args:
        student: a model of timm, or an image tower of open_clip.
        images: normalised (b, 3, H, W).
        first: first view.
        second: second view, with patches in common with the first.
        of_first: features of the first view, if known; otherwise both views are passed as one batch.
        follow: detach the first view, so that it is the target of the second.

    Raises:
        ShapeError: the views have different patches.
    """
    if of_first is None:
        # one forward pass for both views, (2 b, 3, H, W)
        views = torch.cat([first.apply(images), second.apply(images)])
        of_first, of_second = final_tokens(student, views)[0].chunk(2)
    else:
        of_second, _ = final_tokens(student, second.apply(images))
    # both maps in the frame of the original image, so that equal indices are equal patches
    target = first.undo(of_first)
    # without detach, the views are symmetric and both receive gradients
    return cosine_distance(second.undo(of_second), target.detach() if follow else target)


@dataclass(frozen=True, eq=False)
class Objective:
    """Loss of a retrofit, by term and image.

    Attributes:
        teacher: frozen model, in evaluation mode.
        student: trained model.
        weights: weights of the terms; terms of weight 0 are not computed, except for distill, which is logged.
        channels: ablated channels of the target.
        follow: whether the second of two placements is trained on the first, instead of both on each other.
    """

    teacher: nn.Module
    student: nn.Module
    weights: LossWeights
    channels: Sequence[int] = ()
    follow: bool = False

    def parts(
        self,
        images: Tensor,
        pose: Element,
        target_maps: Tensor | None = None,
        pair: Pair | None = None,
        views: Sequence[View] = (),
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the loss terms (b,) float32 by name, and the detached maps of student and target.

        Args:
            images: normalised (b, 3, H, W).
            pose: pose of the second view for `d4`.
            target_maps: precomputed teacher maps of these images, if available.
            pair: placements for `place`; required if its weight is not 0.
            views: views over which the teacher's features are averaged; none for the features of the images.

        Raises:
            OptionError: `place` has a weight, but `pair` is None.
        """
        with torch.no_grad():
            target, token = (
                averaged_tokens(self.teacher, images, views) if target_maps is None else (target_maps, None)
            )
            # position-dependent channels are 0 in the target, so the student learns not to encode them
            target = ablated(target, self.channels)
        maps, student_token = final_tokens(self.student, images)  # (b, d, h, w), (b, d)
        parts = {"distill": cosine_distance(maps, target)}
        if self.weights.centred:
            # the component common to all patches dominates the cosine and hides differences between patches
            parts["centred"] = cosine_distance(
                *(m.float() - m.float().mean((2, 3), keepdim=True) for m in (maps, target))
            )
        if self.weights.d4:
            # the unrotated view was computed above
            parts["d4"] = view_distance(self.student, images, IDENTITY, pose, of_first=maps)
        if self.weights.place:
            if pair is None:
                raise OptionError(
                    f"loss.place={self.weights.place} needs two placements, got none. Pass `pair`."
                )
            parts["place"] = view_distance(self.student, images, *pair, follow=self.follow)
        if self.weights.class_token:
            parts["class_token"] = cosine_distance(student_token, token)
        return parts, maps.detach(), target

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the terms, (b,)."""
        return sum(getattr(self.weights, name) * value for name, value in parts.items())
