"""Verdicts and recommendations of `vispe rotate`."""

import math
from collections.abc import Sequence

from vispe.utils.report.result import Grades

INVARIANT, MILD = 0.05, 0.3
"""Limits of the verdict, for the centred error over D4 and for the held-out R²; chosen by us."""

GRADES = Grades(INVARIANT, MILD, ("invariant", "mild dependence", "strong dependence"))

EXACT = 1e-5
"""Error over D4 below which float32 features count as exactly equivariant."""


SCALE = (
    "0 means no change, and 1.41 (√2) two unrelated maps of equal mean and variance. There is no upper bound: opposite "
    "maps give 2, and a mean or variance that differs between poses adds to it."
)
"""Scale of the centred error as text."""


def scale_notes(errors: Sequence[float], full: float, position: float | None = None) -> tuple[str, ...]:
    """Return remarks on the scale of centred errors.

    Args:
        errors: errors of every pose and image, for transformed images.
        full: mean of these errors over D4.
        position: mean error with tokens permuted after the patch embedding; None if not measured.
    """
    notes: list[str] = []
    largest = max((e for e in errors if math.isfinite(e)), default=0.0)
    if largest > 1.02 * math.sqrt(2):  # unrelated maps scatter around sqrt(2)
        notes.append(
            f"The largest error is {largest:.3g}, above 1.41: there features are anticorrelated, or their mean or "
            "variance changes with the pose as well. The error has no upper bound."
        )
    if position is not None and position > full:
        notes.append(
            f"The error due to the position code alone ({position:.3g}) is above the total ({full:.3g}): the effects "
            "of position code and patch kernel are differences of features, which partly cancel."
        )
    return tuple(notes)


def verdict(what: str, value: float, symbol: str) -> str:
    """Return the verdict on a centred error or a held-out R²: invariant, mild or strong."""
    if not math.isfinite(value):
        return f"{what}: cannot be judged, because they are constant over the image"
    return f"{what}: {GRADES.word(value)} ({symbol} = {value:.2g})"


def remedy(full: float, position: float | None = None) -> str:
    """Return a recommendation for centred errors over D4, '' for invariant features.

    Args:
        full: error for transformed images.
        position: error for tokens permuted after the patch embedding; None if not measured.
    """
    if not math.isfinite(full) or full < INVARIANT:
        return ""
    if position is None:
        return (
            "The effect of the position code alone was not measured: average over the eight poses (d4), or measure it "
            "with a vision transformer."
        )
    if position >= INVARIANT:
        kernel = " The patch kernel contributes as well: average it over D4." if full > 2 * position else ""
        return (
            "The position code breaks the symmetry: replace it by an isotropic one, such as alibi2d, and train "
            f"by distillation; or average over the eight poses (d4).{kernel}"
        )
    return (
        "The patch kernel breaks the symmetry, not the position code: average the kernel over D4 and distil, or "
        "average over the eight poses (d4)."
    )
