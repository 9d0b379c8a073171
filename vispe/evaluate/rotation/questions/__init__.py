"""The questions of `vispe rotate`, one file each; each enters its answer into the table when it is imported."""

from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.questions import (
    accuracy,
    angles,
    clusters,
    d4,
    layers,
    lie,
    quadrant,
    segmentation,
    shifts,
)
from vispe.evaluate.rotation.steps import QUESTIONS, Found

FILES = (d4, angles, shifts, lie, layers, clusters, quadrant, segmentation, accuracy)
"""The files in the order of the results."""


def measure_step(measured: Measured, plan: Plan, step: Step, name: str) -> Found:
    """Answer one question on one step; what could not be measured is said in `step.notes`."""
    answer = QUESTIONS[name](measured, plan, step)
    return answer if isinstance(answer, dict) else {name: [(len(step.whole), answer)]}
