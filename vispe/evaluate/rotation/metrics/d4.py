"""Equivariance of features to the eight poses of the square (D4), with controls."""

from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.rotation.helpers import Rows, features, question
from vispe.evaluate.rotation.metrics.controls import control_rows
from vispe.evaluate.rotation.metrics.equivariance import equivariance, position_equivariance
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan


@question("d4")
def d4(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Rows:
    """Compare features in the eight poses, also for the position code alone, with controls."""
    f, images, size = features(measured), step.fitted, plan.batch_size
    rows = equivariance(f, images, batch_size=size, seed=plan.seed, first=step.first)
    if isinstance(f, VisionModel) and f.permutable:
        rows += position_equivariance(f, images, batch_size=size)
    else:
        step.notes.append(
            "The effect of the position code alone is unknown: it can only be measured in vision transformers, whose "
            "tokens can be permuted after the patch embedding."
        )
    controls, notes = control_rows(f, images, batch_size=size, random_copy=measured.random_copy)
    step.notes += notes
    return rows + controls
