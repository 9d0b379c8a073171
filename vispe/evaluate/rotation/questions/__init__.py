"""The questions of `vispe rotate`, one file each, and which file answers which."""

from __future__ import annotations

from collections.abc import Callable

from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.questions.accuracy import _poses
from vispe.evaluate.rotation.questions.angles import _angles
from vispe.evaluate.rotation.questions.clusters import _clusters
from vispe.evaluate.rotation.questions.d4 import _d4
from vispe.evaluate.rotation.questions.layers import _curve, _position
from vispe.evaluate.rotation.questions.lie import _lie
from vispe.evaluate.rotation.questions.quadrant import _quadrant
from vispe.evaluate.rotation.questions.segmentation import _segmentation
from vispe.evaluate.rotation.questions.shifts import _shift
from vispe.evaluate.rotation.steps import Found


def measure_step(what: Measured, plan: Plan, step: Step, group: str) -> Found:
    """Measure one group on one step; what could not be measured is said in `step.notes`."""
    return _GROUPS[group](what, plan, step)


_GROUPS: dict[str, Callable[[Measured, Plan, Step], Found]] = {
    "d4": _d4,
    "angles": _angles,
    "shift": _shift,
    "lie": _lie,
    "position": _position,
    "layers": _curve,
    "clusters": _clusters,
    "quadrant": _quadrant,
    "segmentation": _segmentation,
    "poses": _poses,
}
