"""Comparison of teacher, ablated teacher and student on the same images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.evaluate.probe.group_averages import effective_rank, mean_cosine
from vispe.train.retrofit.distillation_losses import ablated

SIDES = ("before", "blanked", "after")
"""The teacher; the teacher with ablated channels, the target of the student; the student."""


@dataclass(frozen=True, eq=False)
class ModelPair:
    """Teacher and student of a retrofit, as functions from images (b, 3, H, W) to maps (b, d, h, w).

    Attributes:
        teacher: the model before.
        student: the model after; its maps have the same shape.
        channels: ablated channels of the teacher.
    """

    teacher: FeatureFunction
    student: FeatureFunction
    channels: Sequence[int] = ()

    def functions(self) -> dict[str, FeatureFunction]:
        """Return a feature function for each of `SIDES`."""
        functions = (self.teacher, lambda images: ablated(self.teacher(images), self.channels), self.student)
        return dict(zip(SIDES, functions, strict=True))

    def maps(self, image: Tensor) -> dict[str, Tensor]:
        """Return the maps (d, h, w) float64 of one image (3, H, W) on the CPU, for each of `SIDES`."""
        teacher, student = (features_of(f, image[None]).cpu() for f in (self.teacher, self.student))
        maps = (teacher, ablated(teacher, self.channels), student)
        return {side: value[0] for side, value in zip(SIDES, maps, strict=True)}


@dataclass(frozen=True, eq=False)
class FeatureSimilarity:
    """Similarity of student and teacher by image.

    Attributes:
        cosine: cosine of student and teacher, mean over patches, (n,).
        cosine_blanked: cosine of student and ablated teacher, (n,).
        rank: effective rank of the features of each of `SIDES`, (n,) each.
    """

    cosine: np.ndarray
    cosine_blanked: np.ndarray
    rank: dict[str, np.ndarray]


def feature_similarity(maps: Iterable[dict[str, Tensor]]) -> FeatureSimilarity:
    """Compare the maps of images as returned by `ModelPair.maps`, image by image.

    >>> import torch
    >>> one = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> feature_similarity([{"before": one, "blanked": one, "after": 2 * one}]).cosine
    array([1.])
    """
    cosines, ranks = [], []
    for sides in maps:
        cosines.append([mean_cosine(sides[side], sides["after"]) for side in ("before", "blanked")])
        ranks.append([effective_rank(sides[side]) for side in SIDES])
    return FeatureSimilarity(*np.array(cosines).T, dict(zip(SIDES, np.array(ranks).T, strict=True)))
