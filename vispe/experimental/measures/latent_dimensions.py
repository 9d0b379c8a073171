"""Intrinsic probing of position: number of feature dimensions that encode the cell of a patch.

Follows "Intrinsic Probing through Dimension Selection" (Torroba Hennigen et al., 2020). The target is one of 4 x 4
cells of the grid; features given the cell are modelled as Gaussian with a covariance common to all cells, and
dimensions are selected greedily by the likelihood of held-out patches. Few dimensions suffice if a model
encodes position in a separate subspace.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.behaviour.rolls import raise_if_refused
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator, Measure, Outcome

CELLS = 4  # per side
MOST = 16  # max number of selected dimensions
FIRST = 64  # number of candidate dimensions, those with the largest variance between cells
SHRINK = 0.05  # shrinkage of the covariance towards its diagonal


def cells(shape: tuple[int, int]) -> Tensor:
    """Return the cell of every patch of a grid, (h w,) int64 from 0 to 15, in row-major order.

    >>> cells((4, 4)).tolist() == list(range(16)), cells((8, 8))[:3].tolist()
    (True, [0, 0, 1])
    """
    rows, cols = (torch.arange(n) * CELLS // n for n in shape)
    return (rows[:, None] * CELLS + cols).flatten()


def bits(sums: Tensor, squares: Tensor, count: Tensor, held: Tensor, where: Tensor) -> Tensor:
    """Return the information in bits about the cell in held-out features, by Gaussians with a common covariance.

    Args:
        sums: (cells, d), sums of the training features by cell.
        squares: (d, d), sum of their outer products.
        count: number of patches of each cell.
        held: features of held-out patches (n, d).
        where: their cells (n,).

    Returns:
        Mean over patches of log2 p(cell | features) - log2 p(cell); at most 0 for uninformative features.
    """
    mean = sums / count[:, None]
    within = (squares - (mean * count[:, None]).mT @ mean) / count.sum()
    diagonal = within.diagonal().clamp(min=1e-12)
    within = (1 - SHRINK) * within + SHRINK * torch.diag(diagonal) + 1e-9 * torch.diag(diagonal)
    # whitening by the Cholesky factor turns Mahalanobis distances to the means into Euclidean ones
    lower = torch.linalg.cholesky(within)
    unit, centre = (torch.linalg.solve_triangular(lower, t.mT, upper=False).mT for t in (held, mean))
    logits = unit @ centre.mT - centre.square().sum(1) / 2
    log_likelihood = logits.log_softmax(1).gather(1, where[:, None])
    return (log_likelihood.mean() + np.log(len(mean))) / np.log(2)


def moments(features: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `sums`, `squares` and `count` of `bits`."""
    one_hot = torch.nn.functional.one_hot(where, CELLS**2).to(features)
    return one_hot.mT @ features, features.mT @ features, one_hot.sum(0)


def choose(fitted: Tensor, labels: Tensor, held: Tensor, where: Tensor) -> tuple[list[int], list[float]]:
    """Return the selected dimensions in order, and the held-out bits after each.

    Args:
        fitted: training features (n, d).
        labels: their cells (n,).
        held: held-out features (m, d) of other images.
        where: their cells (m,).
    """
    sums, squares, count = moments(fitted, labels)
    means = sums / count[:, None]
    # dimensions with equal means are uninformative under this model
    spread = means.var(0) / fitted.var(0).clamp(min=1e-12)
    candidates = spread.argsort(descending=True)[:FIRST].tolist()
    chosen: list[int] = []
    curve: list[float] = []
    for _ in range(min(MOST, len(candidates))):
        scores = []
        for c in candidates:
            dims = torch.tensor([*chosen, c])
            scores.append(float(bits(sums[:, dims], squares[dims][:, dims], count, held[:, dims], where)))
        best = int(np.argmax(scores))
        chosen.append(candidates.pop(best))
        curve.append(scores[best])
    return chosen, curve


class IntrinsicProbe(Measure):
    """Information about the position in the best few dimensions, fitted and evaluated on different images.

    Follows "Intrinsic Probing through Dimension Selection" (Torroba Hennigen et al., 2020).
    """

    name = "latent"
    family = "features"
    question = "How many dimensions encode the position?"
    number = "bits, of 4, about which of 16 cells contains a patch, at the best number of dimensions"
    misleads = "Images with a common layout predict the cell too; a position spread over all dimensions is not found."
    papers = ("Intrinsic Probing through Dimension Selection",)
    needs = frozenset({"maps"})
    controls = ("none",)
    default = False

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Add the centred map of the image to the sum of its group."""
        if min(maps.shape[-2:]) < CELLS:
            acc.note(refused=f"cells need at least {CELLS} patches per side, got {tuple(maps.shape[-2:])}")
            return
        acc.note(grid=maps.shape[-2:], group=acc.number % GROUPS)
        acc.add("maps", (maps - maps.mean((1, 2), keepdim=True)).float(), groups=True)

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Select dimensions on one half of the groups, evaluate on the other, and vice versa."""
        raise_if_refused(acc)
        numbers = [r["group"] for r in acc.records]
        groups, count = np.unique(numbers), np.bincount(numbers, minlength=GROUPS)
        if len(groups) < 2:
            return Outcome(
                float("nan"),
                control={"no position": 0.0},
                note="At least two images are needed to fit and evaluate.",
            )
        # the mean map of a group is treated as one image
        mean = acc.sums["maps"].double().flatten(2).mT / torch.from_numpy(np.maximum(count, 1))[:, None, None]
        where = cells(tuple(acc.records[0]["grid"]))
        shuffled = where[torch.randperm(len(where), generator=torch.Generator().manual_seed(0))]
        by_group, curves, chosen = self._read(mean[groups], where)
        chance = self._read(mean[groups], shuffled)[0]
        best = int(np.argmax(curves))
        return Outcome(
            float(by_group.mean()),
            control={"shuffled cells": float(chance.mean()), "no position": 0.0},
            statistic=lambda picks: float(by_group[picks].mean()),
            units=len(groups),
            note=f"The best number of dimensions is {best + 1}.",
            details={"bits_by_dimensions": curves.tolist(), "dimensions": chosen[: best + 1]},
        )

    @staticmethod
    def _read(maps: Tensor, where: Tensor) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the bits of every group at the best number of dimensions, the mean curve, and the dimensions."""
        halves = torch.arange(0, len(maps), 2), torch.arange(1, len(maps), 2)
        by_group = np.zeros(len(maps))
        curves, chosen = [], []
        for train, test in (halves, halves[::-1]):
            fitted, labels = maps[train].flatten(0, 1), where.repeat(len(train))
            chosen, curve = choose(fitted, labels, maps[test].flatten(0, 1), where.repeat(len(test)))
            dims = chosen[: int(np.argmax(curve)) + 1]
            stats = moments(fitted[:, dims], labels)
            for k in test.tolist():
                by_group[k] = float(bits(*stats, maps[k][:, dims], where))
            curves.append(curve)
        return by_group, np.mean(curves, 0), chosen
