"""Metrics of `vispe rotate`, one file each, registered on import."""

from vispe.evaluate.rotation.helpers import QUESTIONS, Found
from vispe.evaluate.rotation.metrics import (
    accuracy,
    any_angle,
    clusters,
    d4,
    layer_curve,
    lie_derivative,
    quadrant_gap,
    segmentation_consistency,
    translation,
)
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan

FILES = (
    d4,
    any_angle,
    translation,
    lie_derivative,
    layer_curve,
    clusters,
    quadrant_gap,
    segmentation_consistency,
    accuracy,
)
"""Modules in the order of the results."""


def measure_step(measured: Measured, plan: RotationPlan, step: ImageBatch, name: str) -> Found:
    """Compute one metric on one step; reasons for skipped records are in `step.notes`."""
    answer = QUESTIONS[name](measured, plan, step)
    return answer if isinstance(answer, dict) else {name: [(len(step.whole), answer)]}
