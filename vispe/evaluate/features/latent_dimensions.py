"""How many dimensions hold the place? A Gaussian probe chooses them one by one.

The place is one of 4 x 4 cells of the grid, and features given the cell are taken for Gaussian, with one covariance
for all cells. Dimensions are chosen greedily by the likelihood of patches that were not fitted (after Torroba Hennigen
et al., Intrinsic Probing through Dimension Selection, 2020): a few are enough where a model keeps the place apart.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import GROUPS, Family, Kept, Measure, Outcome, View
from vispe.evaluate.behaviour.rolls import refuse

CELLS = 4  # a side
MOST = 16  # dimensions that may be chosen
FIRST = 64  # dimensions among which they are, those whose means over cells differ most
SHRINK = 0.05  # of the covariance towards its diagonal


def cells(shape: tuple[int, int]) -> Tensor:
    """Return the cell of every patch of a grid, (h w,) int64 from 0 to 15, row by row.

    >>> cells((4, 4)).tolist() == list(range(16)), cells((8, 8))[:3].tolist()
    (True, [0, 0, 1])
    """
    rows, cols = (torch.arange(n) * CELLS // n for n in shape)
    return (rows[:, None] * CELLS + cols).flatten()


def bits(sums: Tensor, squares: Tensor, count: Tensor, held: Tensor, where: Tensor) -> Tensor:
    """Return the bits about the cell in held-out features, for a Gaussian of each cell with a common covariance.

    Args:
        sums: (cells, d) of the features that are fitted.
        squares: (d, d), their products, summed over all.
        count: patches of each cell.
        held: (n, d).
        where: (n,) their cells.

    Returns:
        Mean over patches of log2 p(cell | features) - log2 p(cell); 0 or less where features say nothing.
    """
    mean = sums / count[:, None]
    within = (squares - (mean * count[:, None]).mT @ mean) / count.sum()
    diagonal = within.diagonal().clamp(min=1e-12)
    within = (1 - SHRINK) * within + SHRINK * torch.diag(diagonal) + 1e-9 * torch.diag(diagonal)
    # distances to all means in units of the common spread
    lower = torch.linalg.cholesky(within)
    unit, centre = (torch.linalg.solve_triangular(lower, t.mT, upper=False).mT for t in (held, mean))
    logits = unit @ centre.mT - centre.square().sum(1) / 2
    right = logits.log_softmax(1).gather(1, where[:, None])
    return (right.mean() + np.log(len(mean))) / np.log(2)


def moments(features: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums by cell, products, and patches of each cell, as `bits` takes them."""
    hot = torch.nn.functional.one_hot(where, CELLS**2).to(features)
    return hot.mT @ features, features.mT @ features, hot.sum(0)


def choose(
    fitted: Tensor, places: Tensor, held: Tensor, where: Tensor, most: int = MOST
) -> tuple[list[int], list[float]]:
    """Return dimensions in the order in which they are chosen, and the held-out bits after each.

    Args:
        fitted: (n, d) features.
        places: (n,) their cells.
        held: (m, d) features of other pictures.
        where: (m,) their cells.
        most: how many are chosen.
    """
    sums, squares, count = moments(fitted, places)
    means = sums / count[:, None]
    # only dimensions whose means differ can say anything
    spread = means.var(0) / fitted.var(0).clamp(min=1e-12)
    left = spread.argsort(descending=True)[:FIRST].tolist()
    chosen: list[int] = []
    curve: list[float] = []
    for _ in range(min(most, len(left))):
        found = []
        for c in left:
            some = torch.tensor([*chosen, c])
            found.append(float(bits(sums[:, some], squares[some][:, some], count, held[:, some], where)))
        best = int(np.argmax(found))
        chosen.append(left.pop(best))
        curve.append(found[best])
    return chosen, curve


class Latent(Measure):
    """Bits about the place in the best few dimensions; pictures of one half are fitted, those of the other read."""

    name: ClassVar[str] = "latent"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "How many dimensions hold the place?"
    number: ClassVar[str] = (
        "bits about which of 16 cells a patch is in, of 4, at the best number of dimensions"
    )
    misleads: ClassVar[str] = (
        "Pictures laid out alike tell the cell too; a place that is spread thinly over all dimensions is not found."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    controls: ClassVar[tuple[View, ...]] = ("none",)
    default: ClassVar[bool] = False

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Add the features of the picture to those of its group, place by place."""
        if min(maps.shape[-2:]) < CELLS:
            kept.note(
                refused=f"cells need {CELLS} patches a side or more, and this has {tuple(maps.shape[-2:])}"
            )
            return
        kept.note(grid=maps.shape[-2:], group=kept.number % GROUPS)
        kept.add("maps", (maps - maps.mean((1, 2), keepdim=True)).float(), groups=True)

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Choose dimensions on one half of the groups, read them on the other, and the other way round."""
        refuse(kept)
        numbers = [r["group"] for r in kept.records]
        groups, count = np.unique(numbers), np.bincount(numbers, minlength=GROUPS)
        if len(groups) < 2:
            return Outcome(
                float("nan"), control={"no place": 0.0}, note="One image cannot be fitted and read."
            )
        # a group counts as one picture: its mean map
        mean = (
            kept.sums["maps"].double().flatten(2).mT / torch.from_numpy(np.maximum(count, 1))[:, None, None]
        )
        where = cells(tuple(kept.records[0]["grid"]))
        mixed = where[torch.randperm(len(where), generator=torch.Generator().manual_seed(0))]
        by_group, curves, chosen = self._read(mean[groups], where)
        chance = self._read(mean[groups], mixed)[0]
        best = int(np.argmax(curves))
        return Outcome(
            float(by_group.mean()),
            control={"shuffled cells": float(chance.mean()), "no place": 0.0},
            statistic=lambda picks: float(by_group[picks].mean()),
            units=len(groups),
            note=f"{best + 1} dimensions hold it best.",
            details={"bits_by_dimensions": curves.tolist(), "dimensions": chosen[: best + 1]},
        )

    @staticmethod
    def _read(maps: Tensor, where: Tensor) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the bits of every group at the best number of dimensions, the mean curve, and dimensions."""
        halves = torch.arange(0, len(maps), 2), torch.arange(1, len(maps), 2)
        found = np.zeros(len(maps))
        curves, chosen = [], []
        for own, other in (halves, halves[::-1]):
            fitted, places = maps[own].flatten(0, 1), where.repeat(len(own))
            chosen, curve = choose(fitted, places, maps[other].flatten(0, 1), where.repeat(len(other)))
            some = chosen[: int(np.argmax(curve)) + 1]
            stats = moments(fitted[:, some], places)
            for k in other.tolist():
                found[k] = float(bits(*stats, maps[k][:, some], where))
            curves.append(curve)
        return found, np.mean(curves, 0), chosen
