"""The words for what was measured, and what would help."""

import math
from collections.abc import Sequence

INVARIANT, MILD = 0.05, 0.3
"""Limits of the verdict, for the centred error over D4 and for the held-out R² alike; they are our choice."""

EXACT = 1e-5
"""Error over D4 below which float32 features count as exactly equivariant."""


SCALE = (
    "0 says that nothing changed, 1.41 (√2) is what two unrelated maps of equal mean and spread give. There is no "
    "upper limit: opposite maps give 2, and a mean or a spread that differs between the poses adds to it."
)
"""What the centred error ranges over, in words."""


def scale_notes(errors: Sequence[float], full: float, position: float | None = None) -> tuple[str, ...]:
    """Return what has to be said about centred errors beyond what a reader would expect of them.

    Args:
        errors: of every pose and image, image turned.
        full: their mean over D4.
        position: the same, tokens turned after the patch embedding; None if not measured.
    """
    notes: list[str] = []
    largest = max((e for e in errors if math.isfinite(e)), default=0.0)
    if largest > 1.02 * math.sqrt(2):  # unrelated maps scatter around the root
        notes.append(
            f"An error of up to {largest:.3g} was found, above 1.41: there features are opposite, or their mean or "
            "spread changes with the pose too. The error has no upper limit."
        )
    if position is not None and position > full:
        notes.append(
            f"The error due to the position code alone ({position:.3g}) is above the whole one ({full:.3g}): what "
            "position code and patch kernel change are differences of features, which partly cancel and do not add up."
        )
    return tuple(notes)


def verdict(what: str, value: float, symbol: str) -> str:
    """Return the words for a centred error or a held-out R²: invariant, mild or strong."""
    if not math.isfinite(value):
        return f"{what}: cannot be judged, for they do not vary over the image"
    word = "invariant" if value < INVARIANT else "mild dependence" if value < MILD else "strong dependence"
    return f"{what}: {word} ({symbol} = {value:.2g})"


def remedy(full: float, position: float | None = None) -> str:
    """Return what to do about the centred errors over D4.

    Args:
        full: image turned.
        position: tokens turned after the patch embedding; None if not measured.
    """
    if not math.isfinite(full) or full < INVARIANT:
        return ""
    if position is None:
        return (
            "The part of the position code was not measured: average over the eight poses with --d4, or "
            "measure it with a vision transformer."
        )
    if position >= INVARIANT:
        kernel = " The patch kernel has a part in it too: average it over D4." if full > 2 * position else ""
        return (
            "The position code breaks the symmetry: replace it by an isotropic one, such as alibi2d, and train "
            f"by distillation; or average over the eight poses with --d4.{kernel}"
        )
    return (
        "The patch kernel breaks the symmetry, not the position code: average the kernel over D4 and distil, or "
        "average over the eight poses with --d4."
    )
