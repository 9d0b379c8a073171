"""What the eight poses of the square change in features."""

from vispe.backbones.vision_model import ModelFeatures, patch_projection
from vispe.evaluate.rotation.helpers import Rows, features, question
from vispe.evaluate.rotation.metrics.controls import control_rows
from vispe.evaluate.rotation.metrics.equivariance import equivariance, position_equivariance
from vispe.evaluate.rotation.plan import Measured, Plan, Step


@question("d4")
def d4(measured: Measured, plan: Plan, step: Step) -> Rows:
    """Compare features in the eight poses, with the share of the position code, and controls."""
    f, images, size = features(measured), step.fitted, plan.batch_size
    rows = equivariance(f, images, batch_size=size, seed=plan.seed, first=step.first)
    if isinstance(f, ModelFeatures) and patch_projection(f.model) is not None:
        rows += position_equivariance(f, images, batch_size=size)
    else:
        step.notes.append(
            "The share of the position code is not known: it is measured in a vision transformer only, where "
            "tokens can be moved after the patches were embedded."
        )
    controls, notes = control_rows(f, images, batch_size=size, twin=measured.twin)
    step.notes += notes
    return rows + controls
