"""Rank correlation of the similarity of patch tokens and the distance of their patches.

Related to Spatial Similarity Distance Correlation (arXiv 2606.00124), whose definition could not be compared: the
similarity, distance, correlation and sign below are ours, and so is the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid

DECIMALS = 9  # of similarities, so that rounding errors do not order equal values

Method = Literal["spearman", "pearson"]
Distance = Literal["euclidean", "manhattan"]


@dataclass(frozen=True)
class SimilarityDistance:
    """Correlation of similarity and distance over images.

    Attributes:
        mean: mean over images with a value, from -1 to 1; positive if near patches are similar. NaN without any value.
        standard_error: standard error of the mean over images; NaN with fewer than 2 values.
        values: (b,), one per image; NaN where all similarities or all distances are equal.
    """

    mean: float
    standard_error: float
    values: np.ndarray


def similarity_distance_correlation(
    features: Tensor | np.ndarray,
    grid: Grid | Sequence[int],
    method: Method = "spearman",
    distance: Distance = "euclidean",
    *,
    cells: Tensor | np.ndarray | None = None,
) -> SimilarityDistance:
    """Return minus the correlation of the similarity of two patches and their distance, computed in float64.

    The similarity is the cosine of the features, centred over the patches of their image: without centring the cosines
    of the tokens of a ViT are all near 1. All pairs i < j of an image count once.

    To separate position from content, permute the patches of the image before the encoder. With distances on
    the grid (the default) the correlation is then due to position; with distances of the original positions
    (`cells`) it is due to content. For a model without position information, the first correlation is 0, and
    the second is larger.

    Args:
        features: patch tokens (b, n, d), or (n, d) of one image, without prefix tokens.
        grid: their grid, or its shape; distances are in units of `Grid.spacing`.
        method: 'spearman' correlates ranks, where ties have their mean rank; 'pearson' the values, which depends more
            on the aspect ratio of the grid.
        distance: 'euclidean' or 'manhattan'.
        cells: (n,) or (b, n) integers, cell whose position is assigned to each token; by default the token's
            own cell.

    Raises:
        ShapeError: shapes disagree, features are not finite, or `cells` are not indices of cells.
        OptionError: `method` or `distance` is unknown.

    Example:
        >>> rows = torch.arange(12.0).reshape(1, 12, 1) * torch.tensor([1.0, -2.0])
        >>> similarity_distance_correlation(rows, (12,)).mean > 0.7
        True
    """
    for name, value, known in (
        ("method", method, get_args(Method)),
        ("distance", distance, get_args(Distance)),
    ):
        if value not in known:
            raise OptionError(
                f"similarity_distance_correlation: {name} must be one of {', '.join(known)}, got {value!r}."
            )
    grid = grid if isinstance(grid, Grid) else Grid(tuple(grid))
    tokens = _images(features, grid)
    coords = Grid(grid.shape, spacing=grid.spacing).positions().coords[0].double().numpy()
    index = _indices(cells, len(tokens), grid.patches)
    first, second = np.triu_indices(grid.patches, 1)
    values = np.full(len(tokens), math.nan)
    for image, (x, order) in enumerate(zip(tokens, index, strict=True)):
        step = np.abs(coords[order[first]] - coords[order[second]])
        apart = step.sum(-1) if distance == "manhattan" else np.sqrt((step**2).sum(-1))
        x = x - x.mean(0)
        x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
        similarity = (x @ x.T).numpy()[first, second]
        # values that differ by rounding errors only are ties
        pair = [np.round(similarity, DECIMALS), np.round(apart, DECIMALS)]
        values[image] = -_correlation(*(map(mean_ranks, pair) if method == "spearman" else pair))
    valid = values[~np.isnan(values)]
    count = len(valid)
    error = float(valid.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return SimilarityDistance(float(valid.mean()) if count else math.nan, error, values)


def _images(features: Tensor | np.ndarray, grid: Grid) -> Tensor:
    """Return the features (b, n, d) in float64."""
    x = torch.as_tensor(features).detach().cpu().double()
    x = x[None] if x.ndim == 2 else x
    if x.ndim != 3 or 0 in x.shape or x.shape[1] != grid.patches:
        raise ShapeError(
            f"similarity_distance_correlation: features must be (b, {grid.patches}, d) for the patches of {grid}, got "
            f"{tuple(x.shape)}. Remove prefix tokens."
        )
    if not bool(x.isfinite().all()):
        raise ShapeError(
            "similarity_distance_correlation: features must be finite, got NaN or infinity. Remove such images."
        )
    return x


def _indices(cells: Tensor | np.ndarray | None, images: int, patches: int) -> np.ndarray:
    """Return the cell of each token, (images, patches)."""
    if cells is None:
        return np.broadcast_to(np.arange(patches), (images, patches))
    index = torch.as_tensor(cells).cpu().numpy()
    fits = index.shape in ((patches,), (1, patches), (images, patches)) and index.dtype.kind in "iu"
    if not fits or index.min() < 0 or index.max() >= patches:
        raise ShapeError(
            f"similarity_distance_correlation: cells must be integers from 0 to {patches - 1} of shape ({patches},) or "
            f"({images}, {patches}), got {index.dtype} {index.shape}."
        )
    return np.broadcast_to(index, (images, patches))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation coefficient, or NaN where it is undefined."""
    if not len(x):
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan


def mean_ranks(x: np.ndarray) -> np.ndarray:
    """Return ranks from 0; ties get their mean rank."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count + 1) / 2)[inverse]
