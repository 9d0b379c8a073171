"""Out-of-distribution check: distance of an image's features from those of the training images.

A classifier assigns every pixel a class, even in an image with another contrast, magnification or material.
So a model stores a summary of the features of its complete training pages, not only of the labelled pixels:
`COMPONENTS` principal components z of the features, and the covariance of the means of z and |z| over patches
of 64 x 64 pixels. The distance of an image is the Mahalanobis distance between its means and those of the
training pages, divided by the root of the number of means. All means are computed from integer sums, so the
distance of a page does not depend on whether it is read at once or in blocks. The limit is the largest
distance of a held-out part times a margin. Held-out parts are pages if there are several, otherwise quarters
of the only page. Quarters of one page are more similar than pages of a series; the margins are calibrated in
`eval/results/domain.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

COMPONENTS = 12
"""Number of principal components compared."""

MARGIN_ONE, MARGIN = 7.5, 1.5
"""Factors of the largest distance of a held-out part: for quarters of one page, and for complete pages."""

_UNIT = 1024  # quantisation steps per standard deviation, so that sums are exact integers
_CLIP = 4.0  # bound of components, in standard deviations
_FLOOR = 0.1  # smallest variance of a component of standardised features
_SHRINK = 0.1  # shrinkage of the covariance towards its diagonal
_RIDGE = 0.02  # fraction of the mean variance added to the diagonal
_FOLDS = 8  # number of held-out pages at most
_PATCHES = 99.0  # percentile of the distances of held-out patches used as limit of a patch


class Sampled(Protocol):
    """Features sampled at points of a page's patches, as `vispe.segment.features.sample_grid.Sample`."""

    features: np.ndarray
    patch: np.ndarray
    part: np.ndarray


@dataclass(frozen=True, eq=False)
class FeatureDistribution:
    """Summary of the features of the training pages.

    Attributes:
        mean: (f,) float32.
        components: (m, f) float32; z = components @ (features - mean).
        center: (2 m,) float64, means of z and |z| over all points.
        whitening: (2 m, 2 m) float64; the distance of means e is |(e - center) @ whitening|.
        limits: (2,) float64, limits of the distances of a page and of a patch.
        pages: number of training pages.
    """

    mean: np.ndarray
    components: np.ndarray
    center: np.ndarray
    whitening: np.ndarray
    limits: np.ndarray
    pages: int

    def codes(self, features: np.ndarray) -> np.ndarray:
        """Project features (..., f) onto components (..., m), quantised to int16 in steps of 1 / 1024, clipped at 4."""
        flat = (features.reshape(-1, features.shape[-1]) - self.mean) @ self.components.T
        quantised = np.rint(np.clip(flat, -_CLIP, _CLIP) * _UNIT).astype(np.int16)
        return quantised.reshape(*features.shape[:-1], len(self.components))

    def score(self, sums: np.ndarray) -> float | None:
        """Return the distance of a page in units of its limit, from the sums of `feature_sums`; None without points."""
        return float(self._distances(sums[None])[0] / self.limits[0]) if sums[0] else None

    def patches(self, sums: np.ndarray) -> np.ndarray:
        """Return the distances (n,) of patches in units of their limit from sums (n, 1 + 2 m); NaN without points."""
        out = np.full(len(sums), np.nan)
        out[sums[:, 0] > 0] = self._distances(sums[sums[:, 0] > 0]) / self.limits[1]
        return out

    def _distances(self, sums: np.ndarray) -> np.ndarray:
        means = sums[:, 1:] / (sums[:, :1] * float(_UNIT))
        return np.linalg.norm((means - self.center) @ self.whitening, axis=1)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of a model file, by name."""
        arrays = {key: getattr(self, key) for key in ("mean", "components", "center", "whitening", "limits")}
        return {**arrays, "pages": np.array([self.pages])}

    @classmethod
    def from_tensors(cls, arrays: Mapping[str, np.ndarray]) -> "FeatureDistribution":
        """Create a `FeatureDistribution` from the arrays of `tensors`."""
        return cls(**{**arrays, "pages": int(arrays["pages"][0])})


def is_consistent(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether the arrays of a model file have the expected names, shapes and signs."""
    if set(arrays) != {"mean", "components", "center", "whitening", "limits", "pages"}:
        return False
    width, count = arrays["components"].shape[-1:], 2 * len(arrays["components"])
    shapes = {"mean": width, "center": (count,), "whitening": (count, count), "limits": (2,), "pages": (1,)}
    consistent = arrays["components"].ndim == 2 and all(
        arrays[k].shape == shape for k, shape in shapes.items()
    )
    return consistent and all(bool((arrays[k] > 0).all()) for k in ("limits", "pages"))


def feature_sums(codes: np.ndarray) -> np.ndarray:
    """Return the number, the sums of z and the sums of |z| of components (n, m) int16, as (1 + 2 m,) int64."""
    wide = codes.astype(np.int64)
    return np.concatenate([[len(wide)], wide.sum(0), np.abs(wide).sum(0)])


def fit_distribution(pages: Sequence[Sampled]) -> FeatureDistribution | None:
    """Summarise training pages and calibrate the limits by holding out parts.

    Args:
        pages: training pages, each with at least one patch.

    Returns:
        None if nothing can be held out: a single page whose patches cover fewer than two quarters.
    """
    if len(pages) > 1:
        chosen = np.unique(np.linspace(0, len(pages) - 1, _FOLDS).round().astype(int)).tolist()
        folds = [([p for i, p in enumerate(pages) if i != out], pages[out]) for out in chosen]
    else:
        quarters = np.unique(pages[0].part).tolist() if pages else []
        folds = [
            ([_part(pages[0], pages[0].part != k)], _part(pages[0], pages[0].part == k)) for k in quarters
        ]
    if len(folds) < 2:
        return None
    distances, patches = list[float](), list[np.ndarray]()
    for rest, out in folds:
        summary = _summary(rest)
        distances.append(float(summary._distances(feature_sums(summary.codes(out.features))[None])[0]))
        patches.append(summary._distances(_by_patch(summary, out)))
    full_summary = _summary(pages)
    margin = MARGIN if len(pages) > 1 else MARGIN_ONE
    # lower bound, for pages whose quarters are identical
    limits = np.maximum([margin * max(distances), np.percentile(np.concatenate(patches), _PATCHES)], 1e-3)
    return replace(full_summary, limits=limits)


def _part(page: Sampled, selected: np.ndarray) -> Sampled:
    """Return the patches of a page selected by a mask (n,) bool."""
    keep = selected[page.patch]
    return replace(
        page,  # type: ignore[type-var] - samples are dataclasses
        features=page.features[keep],
        patch=(np.cumsum(selected) - 1)[page.patch[keep]],
        part=page.part[selected],
    )


def _summary(pages: Sequence[Sampled]) -> FeatureDistribution:
    """Summarise pages, with limits of 1."""
    features = np.concatenate([page.features for page in pages]).astype(np.float64)
    mean, spread = features.mean(0), features.std(0) + 1e-6
    # principal components of standardised features, with the sign that makes the largest loading positive
    values, vectors = np.linalg.eigh(
        (features - mean).T @ (features - mean) / len(features) / np.outer(spread, spread)
    )
    count = min(COMPONENTS, len(values))
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0)
    components = (vectors * np.sign(largest) / np.sqrt(np.maximum(values, _FLOOR)) / spread[:, None]).T
    empty = np.zeros(2 * count)
    summary = FeatureDistribution(
        mean.astype(np.float32),
        np.ascontiguousarray(components, np.float32),
        empty,
        np.eye(2 * count),
        np.ones(2),
        len(pages),
    )
    sums = np.concatenate([_by_patch(summary, page) for page in pages])
    total, each = sums.sum(0), sums[:, 1:] / (sums[:, :1] * float(_UNIT))
    # with few patches the covariance is noisy and nearly singular: shrink it towards its diagonal, add a ridge
    deviation = each - each.mean(0)
    covariance = deviation.T @ deviation / max(len(each) - 1, 1)
    covariance += _SHRINK * (np.diag(np.diag(covariance)) - covariance)
    covariance += np.eye(2 * count) * max(_RIDGE * np.trace(covariance) / (2 * count), 1e-9)
    # whitening: inverse transposed Cholesky factor, scaled so that the expected squared distance is 1
    root = np.linalg.inv(np.linalg.cholesky(covariance)).T / np.sqrt(2 * count)
    return replace(
        summary, center=total[1:] / (total[0] * float(_UNIT)), whitening=np.ascontiguousarray(root)
    )


def _by_patch(domain: FeatureDistribution, page: Sampled) -> np.ndarray:
    """Return `feature_sums` of each patch of a page, (patches, 1 + 2 m) int64."""
    wide = domain.codes(page.features).astype(np.int64)
    terms = np.concatenate([np.ones((len(wide), 1), np.int64), wide, np.abs(wide)], 1)
    out = np.zeros((len(page.part), terms.shape[1]), np.int64)
    np.add.at(out, page.patch, terms)
    return out
