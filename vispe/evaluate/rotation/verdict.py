"""The words for what was measured, and what would help."""

import math

INVARIANT, MILD = 0.05, 0.3
"""Limits of the verdict, for the centred error over D4 and for the held-out R² alike; they are our choice."""

EXACT = 1e-5
"""Error over D4 below which float32 features count as exactly equivariant."""


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
