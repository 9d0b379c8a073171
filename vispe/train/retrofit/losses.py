"""The losses of a student: the teacher's features without blanked channels, and features that turn with the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.tokens import final_tokens
from vispe.errors import OptionError, ShapeError
from vispe.symmetry.d4 import D4, Element
from vispe.train.retrofit.config import Weights


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


@dataclass(frozen=True, eq=False)
class Objective:
    """The parts of the loss, image by image.

    Attributes:
        teacher: frozen, in evaluation mode.
        student: what is trained.
        weights: of the parts; a part of weight 0 is not computed, except for distill, which is reported.
        channels: that are set to 0 in what the student learns.
    """

    teacher: nn.Module
    student: nn.Module
    weights: Weights
    channels: Sequence[int] = ()

    def parts(
        self, images: Tensor, pose: Element, kept: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the parts (b,) float32 by name, and the maps of the student and of the target, detached.

        Args:
            images: normalised (b, 3, H, W).
            pose: in which the student is compared with itself.
            kept: the teacher's maps of these images, where they are known.
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
            moved, _ = final_tokens(self.student, pose.apply(images))
            parts["d4"] = cosine_distance(moved, pose.apply(maps))
        if self.weights.class_token:
            parts["class_token"] = cosine_distance(own, token)
        return parts, maps.detach(), target

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the parts, (b,)."""
        return sum(getattr(self.weights, name) * value for name, value in parts.items())
