"""PESI: how a position table's similarity falls off with distance, in general and by direction (arXiv 2504.14386).

Scores of a table (h, w, d). From every cell as centre, the cosine similarity of the table there and at every cell is
compared with the distance of the two; the scores are means over all centres.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError

DECIMALS = 9  # of similarities, so that equal ones are tied and not ordered by rounding


@dataclass(frozen=True)
class PESI:
    """The three scores of a table.

    Attributes:
        undirected_monotonicity: 1 - rank correlation of distance and mean similarity; 2 is best, 0 worst.
        directed_monotonicity: the same within each of `directions` sectors, averaged; empty sectors pull it
            towards 1, so only tables of equal grids compare.
        undirected_asymmetry: spread of the similarity around its mean among cells of equal distance; 0 is best.
        directions: the number of sectors.
    """

    undirected_monotonicity: float
    directed_monotonicity: float
    undirected_asymmetry: float
    directions: int


def pesi(table: Tensor | np.ndarray, directions: int = 60) -> PESI:
    """Return the scores of a table (h, w, d), computed in float64.

    Args:
        table: one vector per grid cell.
        directions: number of sectors of the directed score; the paper takes 60.

    Raises:
        ShapeError: the table is not (h, w, d) with numbers that are finite.
        OptionError: `directions` is no whole number above 0.

    >>> pesi(np.random.default_rng(0).normal(size=(4, 4, 8))).directions
    60
    """
    if isinstance(directions, bool) or directions != int(directions) or directions < 1:
        raise OptionError(f"pesi needs a number of directions above 0, got directions={directions!r}.")
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
        seen = count > 0
        mean = np.bincount(r, s)[seen] / count[seen]
        square = np.bincount(r, (s - (np.bincount(r, s) / np.maximum(count, 1))[r]) ** 2)[seen] / count[seen]
        monotone.append(1 - _spearman(np.flatnonzero(seen), np.round(mean, DECIMALS)))
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.where(square == 0, 0.0, np.sqrt(square) / mean)
        asymmetry.append(float(spread.mean()))
        rho = [_spearman(d[k == i], s[k == i]) for i in np.unique(k)]
        directed.append(1 - sum(rho) / directions)
    return PESI(
        float(np.mean(monotone)), float(np.mean(directed)), float(np.mean(asymmetry)), int(directions)
    )


def cosine_similarity(table: Tensor | np.ndarray) -> np.ndarray:
    """Return the similarity of all pairs of cells (h * w, h * w) of a table (h, w, d), in float64.

    Rounded to 9 decimals, because the scores rank it; a zero vector has similarity 0 with all.
    """
    values = table.detach().cpu().double().numpy() if isinstance(table, Tensor) else np.asarray(table)
    if values.ndim != 3 or 0 in values.shape or not np.isfinite(values.astype(np.float64)).all():
        raise ShapeError(f"pesi needs a table (h, w, d) of finite numbers, got {values.shape}.")
    flat = torch.as_tensor(values.astype(np.float64)).flatten(0, 1)
    length = flat.square().sum(1).sqrt()
    cosine = (flat @ flat.t()) / (length[:, None] * length[None]).clamp(min=1e-12)
    return np.round(cosine.numpy(), DECIMALS)


def _ranks(x: np.ndarray) -> np.ndarray:
    """Return ranks from 0; equal values share the mean of theirs."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count + 1) / 2)[inverse]


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation; 0 where it is undefined."""
    if len(x) < 2:
        return 0.0
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0
