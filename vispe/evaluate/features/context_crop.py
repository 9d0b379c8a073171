"""Do features know where a picture ends? A crop shown alone, and inside two other surroundings.

The middle of an image is shown by itself, and with a frame from the image mirrored left to right or upside down.
Padding, and places counted from a side, change features where the crop ends. So do new neighbours, which
the difference between the two surroundings tells.
"""

from __future__ import annotations

from types import EllipsisType
from typing import ClassVar

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import refuse, step_or_note

LEAST = 10
"""Patches along a side of an image, of which the crop takes half: a border, a middle, and one between them."""


def change(alone: Tensor, inside: Tensor) -> Tensor:
    """Return the size of a change beside that of features inside, by cell: two (d, h, w) -> (h, w) float64.

    Raises:
        ShapeError: shapes that differ, or are not (d, h, w).

    >>> change(torch.full((4, 1, 2), 3.0), torch.full((4, 1, 2), 2.0))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    if alone.ndim != 3 or alone.shape != inside.shape:
        raise ShapeError(
            f"Two maps of the same shape (d, h, w) are compared, got {tuple(alone.shape)} and {tuple(inside.shape)}."
        )
    gap = (alone.double() - inside.double()).square().sum(0).sqrt()
    size = inside.double().square().sum(0).sqrt()
    # a cell that is nothing inside has changed as a whole or not at all
    return torch.where(size > 0, gap / size, (gap > 0).double())


def border_distance(h: int, w: int) -> Tensor:
    """Return the distance (h, w) int64 to the nearest border, 0 beside it.

    >>> border_distance(3, 4).tolist()
    [[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    """
    rows, cols = (torch.minimum(torch.arange(n), torch.arange(n).flip(0)) for n in (h, w))
    return torch.minimum(rows[:, None], cols[None, :])


def by_distance(values: Tensor, step: int = 1) -> Tensor:
    """Return the mean of cells (h, w) at every distance to the border, (distances,), in steps of cells."""
    distance = border_distance(*values.shape).flatten() // step
    total = torch.zeros(int(distance.max()) + 1, dtype=values.dtype).index_add(0, distance, values.flatten())
    return total / distance.bincount()


def fall(profile: Tensor) -> float:
    """Return by how much the border exceeds the middle: the distances beyond half of the largest."""
    return float(profile[0] - profile[(len(profile) - 1) // 2 + 1 :].mean())


class Crop(Measure):
    """Change of a crop shown alone, at its border beyond its middle, minus that between two surroundings."""

    name: ClassVar[str] = "crop"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Do features change where a picture ends?"
    number: ClassVar[str] = (
        "change of a crop shown alone, border minus middle, beyond that of other surroundings"
    )
    misleads: ClassVar[str] = (
        "A smaller picture may itself be unusual for a model, and frames have a seam: both count at the border if "
        "features are local, and what two frames have in common is not subtracted."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    default: ClassVar[bool] = False

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Show the middle alone and in two frames: three passes beside that of the image as it is."""
        step = step_or_note(kept, reruns, LEAST)
        if step is None:
            return
        image, size = reruns.image, [n // 2 for n in step.grid]
        pixels, cells = (_middle(step.grid, unit) for unit in (step.pixels, step.cells))
        try:
            alone = reruns.maps("crop alone", image[pixels].contiguous())
        except (AssertionError, ValueError, RuntimeError) as error:
            kept.note(refused=f"it takes no crop of {size[0]} x {size[1]} patches: {error}")
            return
        framed: list[Tensor] = []
        for axis in (-1, -2):
            picture = image.flip(axis)
            picture[pixels] = image[pixels]
            framed.append(reruns.maps(f"crop in a frame {axis}", picture)[cells])
        one, two = framed
        changed = by_distance((change(alone, one) + change(alone, two)) / 2, step.cells)
        # both orders, since each change is beside the features that it ends in
        control = by_distance((change(one, two) + change(two, one)) / 2, step.cells)
        kept.note(
            value=fall(changed) - fall(control),
            changed=fall(changed),
            surroundings=fall(control),
            profile=changed,
            profile_surroundings=control,
        )

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images."""
        refuse(kept)
        value = kept.column("value")
        details = {name: float(kept.column(name).mean()) for name in ("changed", "surroundings")}
        sizes = {len(record["profile"]) for record in kept.records}
        if len(sizes) == 1:
            names = ("profile", "profile_surroundings")
            details |= {name: kept.column(name).mean(0).tolist() for name in names}
        return Outcome(float(value.mean()), value.tolist(), control={"no border": 0.0}, details=details)


def _middle(grid: tuple[int, int], unit: int) -> tuple[EllipsisType, slice, slice]:
    """Return the middle half (..., rows, columns) of a grid whose steps are `unit` pixels or cells."""
    rows, cols = (slice((n - n // 2) // 2 * unit, ((n - n // 2) // 2 + n // 2) * unit) for n in grid)
    return ..., rows, cols
