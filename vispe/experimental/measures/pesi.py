"""PESI: similarity of a position table as a function of distance and direction (LOOPE, arXiv 2504.14386).

For every cell of a table (h, w, d) as centre, the cosine similarity to every cell is compared with the distance; the
scores are means over all centres.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.evaluate.features.similarity_distance import DECIMALS, mean_ranks
from vispe.utils.options import PositiveInt, checked


@dataclass(frozen=True)
class PESI:
    """The three scores of a table.

    Attributes:
        undirected_monotonicity: 1 - rank correlation of distance and mean similarity; 2 is best, 0 worst.
        directed_monotonicity: the same score within each of `directions` sectors, averaged; empty sectors
            count as 1, so only tables of equal grids are comparable.
        undirected_asymmetry: relative deviation of the similarity among cells at equal distance; 0 is best.
        directions: number of sectors.
    """

    undirected_monotonicity: float
    directed_monotonicity: float
    undirected_asymmetry: float
    directions: int


@checked
def pesi(table: Tensor | np.ndarray, directions: PositiveInt = 60) -> PESI:
    """Return the scores of a table (h, w, d), computed in float64.

    Args:
        table: one vector per grid cell.
        directions: number of sectors of the directed score; 60 in the paper.

    Raises:
        ShapeError: the table is not (h, w, d), or has non-finite entries.
        OptionError: `directions` is not a positive integer.

    >>> pesi(np.random.default_rng(0).normal(size=(4, 4, 8))).directions
    60
    """
    similarity = cosine_similarity(table)
    h, w = int(table.shape[0]), int(table.shape[1])
    rows, cols = np.repeat(np.arange(h), w), np.tile(np.arange(w), h)
    down, right = rows[None] - rows[:, None], cols[None] - cols[:, None]  # from centre to cell
    distance = np.hypot(down, right)
    radius = np.rint(distance).astype(int)  # half to even
    sector = np.floor(np.arctan2(right, down) / (2 * math.pi / directions)).astype(int) % directions
    monotone: list[float] = []
    directed: list[float] = []
    asymmetry: list[float] = []
    for s, r, d, k in zip(similarity, radius, distance, sector, strict=True):
        count = np.bincount(r)
        occupied = count > 0
        mean = np.bincount(r, s)[occupied] / count[occupied]
        square = (
            np.bincount(r, (s - (np.bincount(r, s) / np.maximum(count, 1))[r]) ** 2)[occupied]
            / count[occupied]
        )
        monotone.append(1 - _spearman(np.flatnonzero(occupied), np.round(mean, DECIMALS)))
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.where(square == 0, 0.0, np.sqrt(square) / mean)
        asymmetry.append(float(spread.mean()))
        rho = [_spearman(d[k == i], s[k == i]) for i in np.unique(k)]
        directed.append(1 - sum(rho) / directions)
    return PESI(
        float(np.mean(monotone)), float(np.mean(directed)), float(np.mean(asymmetry)), int(directions)
    )


def cosine_similarity(table: Tensor | np.ndarray) -> np.ndarray:
    """Return the cosine similarity of all pairs of cells (h * w, h * w) of a table (h, w, d), in float64.

    Rounded to 9 decimals, because the scores use ranks; a zero vector has similarity 0 to all cells.

    Raises:
        ShapeError: the table is not (h, w, d), or has non-finite entries.
    """
    values = table.detach().cpu().double().numpy() if isinstance(table, Tensor) else np.asarray(table)
    if values.ndim != 3 or 0 in values.shape or not np.isfinite(values.astype(np.float64)).all():
        raise ShapeError(
            f"pesi: table must be (h, w, d) with finite entries, got {values.shape}. Remove rows of prefix tokens."
        )
    flat = torch.as_tensor(values.astype(np.float64)).flatten(0, 1)
    length = flat.square().sum(1).sqrt()
    cosine = (flat @ flat.t()) / (length[:, None] * length[None]).clamp(min=1e-12)
    return np.round(cosine.numpy(), DECIMALS)


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation; 0 if it is undefined."""
    if len(x) < 2:
        return 0.0
    a, b = mean_ranks(x), mean_ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0
