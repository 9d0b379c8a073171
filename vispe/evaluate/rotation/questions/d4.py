"""What the eight poses of the square change in features."""

from __future__ import annotations

from vispe.backbones.maps import ModelFeatures, patch_projection
from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.questions.controls import control_rows
from vispe.evaluate.rotation.questions.features import ALL, equivariance, position_equivariance
from vispe.evaluate.rotation.steps import Found, _features


def _d4(what: Measured, plan: Plan, step: Step) -> Found:
    f, images, size = _features(what), step.fitted, plan.batch_size
    rows = equivariance(f, images, measures=ALL, batch_size=size, seed=plan.seed, first=step.first)
    if isinstance(f, ModelFeatures) and patch_projection(f.model) is not None:
        rows += position_equivariance(f, images, batch_size=size)
    else:
        step.notes.append(
            "The share of the position code is not known: it is told apart in a vision transformer only, where "
            "tokens can be moved after the patches were embedded."
        )
    found, notes = control_rows(f, images, batch_size=size, twin=what.twin)
    step.notes += notes
    return {"d4": [(len(images), rows + found)]}
