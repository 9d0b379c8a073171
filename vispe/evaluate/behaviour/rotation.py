"""Equivariance of features to rotations and reflections, the audit's view of `vispe rotate`, for three poses.

The error is that of `vispe rotate`; it follows the equivariance error of "The Lie Derivative for Measuring Learned
Equivariance" (arXiv 2210.02984), for exact transformations. If tokens can be permuted after the patch
embedding, the headline is the error of the encoding alone, because patch kernels depend on direction as well,
but not on position.
"""

from __future__ import annotations

import numpy as np
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import counted
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.evaluate.rotation.feature_similarity import error
from vispe.images.symmetry.d4 import element

POSES = ("rot90", "rot180", "hflip")
LEVEL = ("rot180", "hflip")  # poses of non-square images, whose size changes under rot90


class Equivariance(Measure):
    """Equivariance error of features: three forward passes, and three more with permuted tokens where supported.

    The error is that of `vispe rotate`, after "The Lie Derivative for Measuring Learned Equivariance" (arXiv
    2210.02984).
    """

    name = "turn"
    family = "behaviour"
    order = 1
    limit = 0.15
    question = "Do features change when the image is rotated or reflected?"
    number = "equivariance error over two rotations and a reflection, of the encoding alone if known"
    misleads = (
        "Rotated photographs are out of distribution, so the number then includes the canonical orientation of the "
        "training images."
    )
    papers = ("The Lie Derivative for Measuring Learned Equivariance, https://arxiv.org/abs/2210.02984",)
    needs = frozenset({"maps"})

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Transform the image, and its tokens, and undo the transformation on the features."""
        f, image, first = runs.audited.f, runs.image, runs.maps()
        vision = f if isinstance(f, VisionModel) and f.permutable else None
        poses = POSES if image.shape[-1] == image.shape[-2] else LEVEL
        for g in map(element, poses):
            acc.layer(everything=error(first, g.undo(runs.maps(g.name, g.apply(image)))))
            if vision is not None:
                with torch.no_grad():
                    moved = vision.permuted(image[None], g)[0].float().cpu()
                acc.layer(encoding=error(first, g.undo(moved)))
        acc.note(poses=poses)

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean over images and poses."""
        separate = "encoding" in acc.records[0]
        total = acc.column("everything")
        # the error is undefined for features that are constant over positions
        known = np.isfinite(total).all(1)
        total, headline = total[known], acc.column("encoding" if separate else "everything")[known]
        notes = [] if separate else ["The part of the encoding is unknown, so patch kernels are included."]
        if not known.all():
            notes.append(f"Excluded {counted((~known).sum(), 'image')} with constant features.")
        if not known.any():
            return Outcome(float("nan"), control={"floor": 0.0}, note=" ".join(notes))
        details = {"everything": total.mean()} | dict(
            zip(acc.records[0]["poses"], headline.mean(0), strict=True)
        )
        per_image = headline.mean(1)
        return Outcome(
            per_image.mean(), per_image, control={"floor": 0.0}, note=" ".join(notes), details=details
        )
