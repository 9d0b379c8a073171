"""The questions of `vispe rotate`, one file each; each enters its answer into the table when it is imported."""

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
from vispe.evaluate.rotation.plan import Measured, Plan, Step

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
"""The files in the order of the results."""


def measure_step(measured: Measured, plan: Plan, step: Step, name: str) -> Found:
    """Answer one question on one step; what could not be measured is said in `step.notes`."""
    answer = QUESTIONS[name](measured, plan, step)
    return answer if isinstance(answer, dict) else {name: [(len(step.whole), answer)]}
