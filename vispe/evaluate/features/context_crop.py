"""Border effect of padding: features of a crop alone compared with the same crop in two contexts.

Follows the idea of PPP, the position-information pattern from padding ("Unveiling The Mask of Position-Information
Pattern Through the Mist of Image Features"): compare features with and without the influence of the border; the numbers
are ours. The centre of an image is encoded alone, and surrounded by the horizontally or vertically flipped
image. Padding, and positions relative to a side, change features at the border of the crop. Other neighbours
change them as well; the difference between the two contexts is the control for this effect.
"""

from __future__ import annotations

from types import EllipsisType

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.evaluate.behaviour.rolls import raise_if_refused, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns

LEAST = 10
"""Min patches per side of an image; the crop is half of it: a border, a centre, and a patch between them."""


def change(alone: Tensor, inside: Tensor) -> Tensor:
    """Return the norm of the difference relative to that of `inside`, per cell: two (d, h, w) -> (h, w) float64.

    Raises:
        ShapeError: the shapes differ, or are not (d, h, w).

    >>> change(torch.full((4, 1, 2), 3.0), torch.full((4, 1, 2), 2.0))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    if alone.ndim != 3 or alone.shape != inside.shape:
        raise ShapeError(
            f"change: both maps must have the same shape (d, h, w), got {tuple(alone.shape)} and "
            f"{tuple(inside.shape)}. Crop them to the same cells."
        )
    difference = (alone.double() - inside.double()).square().sum(0).sqrt()
    norm = inside.double().square().sum(0).sqrt()
    # where the reference is 0, the relative change is 0 or 1
    return torch.where(norm > 0, difference / norm, (difference > 0).double())


def border_distance(h: int, w: int) -> Tensor:
    """Return the distance (h, w) int64 in cells to the nearest border, 0 at the border.

    >>> border_distance(3, 4).tolist()
    [[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    """
    row_slice, col_slice = (torch.minimum(torch.arange(n), torch.arange(n).flip(0)) for n in (h, w))
    return torch.minimum(row_slice[:, None], col_slice[None, :])


def by_distance(values: Tensor, step: int = 1) -> Tensor:
    """Return the mean of cells (h, w) at each distance to the border, (distances,), in units of `step` cells."""
    distance = border_distance(*values.shape).flatten() // step
    total = torch.zeros(int(distance.max()) + 1, dtype=values.dtype).index_add(0, distance, values.flatten())
    return total / distance.bincount()


def border_excess(profile: Tensor) -> float:
    """Return the value at the border minus the mean in the centre (distances beyond half of the maximum)."""
    return float(profile[0] - profile[(len(profile) - 1) // 2 + 1 :].mean())


class ContextCrop(Measure):
    """Border minus centre of the change of a crop encoded alone, minus that between two contexts.

    Follows PPP ("Unveiling The Mask of Position-Information Pattern Through the Mist of Image Features") in comparing
    features with and without padding; the statistic is ours.
    """

    name = "crop"
    family = "features"
    limit = 0.01
    question = "Do features change at the border of an image?"
    number = "change of a crop encoded alone, border minus centre, minus that of other contexts"
    misleads = (
        "Smaller images may be out of distribution, and contexts have a seam: both count at the border if features are "
        "local, and effects common to both contexts are not subtracted."
    )
    papers = ("Unveiling The Mask of Position-Information Pattern Through the Mist of Image Features",)
    needs = frozenset({"maps"})
    default = False

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Encode the centre alone and in two contexts: three forward passes in addition to the original image."""
        step = step_or_refusal(acc, runs, LEAST)
        if step is None:
            return
        image, size = runs.image, [n // 2 for n in step.grid]
        pixels, cells = (_middle(step.grid, unit) for unit in (step.pixels, step.cells))
        try:
            without_context = runs.maps("crop alone", image[pixels].contiguous())
        except (AssertionError, ValueError, RuntimeError) as error:
            acc.note(refused=f"it does not accept a crop of {size[0]} x {size[1]} patches: {error}")
            return
        contexts: list[Tensor] = []
        for axis in (-1, -2):
            context = image.flip(axis)
            context[pixels] = image[pixels]
            contexts.append(runs.maps(f"crop in a frame {axis}", context)[cells])
        one, two = contexts
        changed = by_distance((change(without_context, one) + change(without_context, two)) / 2, step.cells)
        # both orders, since each change is relative to its second argument
        control = by_distance((change(one, two) + change(two, one)) / 2, step.cells)
        acc.note(
            value=border_excess(changed) - border_excess(control),
            changed=border_excess(changed),
            surroundings=border_excess(control),
            profile=changed,
            profile_surroundings=control,
        )

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean over images."""
        raise_if_refused(acc)
        value = acc.column("value")
        details = {name: float(acc.column(name).mean()) for name in ("changed", "surroundings")}
        sizes = {len(record["profile"]) for record in acc.records}
        if len(sizes) == 1:
            names = ("profile", "profile_surroundings")
            details |= {name: acc.column(name).mean(0).tolist() for name in names}
        return Outcome(float(value.mean()), value.tolist(), control={"no border": 0.0}, details=details)


def _middle(grid: tuple[int, int], unit: int) -> tuple[EllipsisType, slice, slice]:
    """Return the middle half (..., rows, columns) of a grid whose steps are `unit` pixels or cells."""
    row_slice, col_slice = (
        slice((n - n // 2) // 2 * unit, ((n - n // 2) // 2 + n // 2) * unit) for n in grid
    )
    return ..., row_slice, col_slice
