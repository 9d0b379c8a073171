"""Whether an image looks like those that a model was trained on, by its features alone.

A classifier gives every pixel a class, also in a picture of another contrast, magnification or material. So a model
keeps a summary of the features of its whole training pages, not only of what was labelled: `COMPONENTS` principal
components z of the features, and how the means of z and |z| over patches of 64 x 64 pixels spread. The distance of a
picture is that of its own means from those of training, in units of this spread (Mahalanobis, divided by the root of
the number of means). All means come from sums of whole numbers, so a page has the same distance read at once and block
by block.

The limit is the largest distance of a part that was held out of the summary, times a margin: another page where there
are several, else a quarter of the only one. Quarters of one page are more alike than pages of a series; how much is
measured in `eval/results/domain.json`, from which the margins are taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

COMPONENTS = 12
"""Principal components of the features that are compared."""

MARGIN_ONE, MARGIN = 7.5, 1.5
"""What the largest distance of a held-out part is multiplied by: quarters of one page, and whole pages."""

_UNIT = 1024  # steps of a component in one standard deviation: sums are of whole numbers
_CLIP = 4.0  # standard deviations from which on a component counts no more
_FLOOR = 0.1  # smallest variance of a component of standardised features
_SHRINK = 0.1  # share of the covariance that is taken from its diagonal
_RIDGE = 0.02  # share of the mean variance that is added to each
_FOLDS = 8  # pages that are held out, one after the other
_PATCHES = 99.0  # percentile of held-out patches that is the limit of a patch


class Sampled(Protocol):
    """Features of a page at points of its patches, as `vispe.segment.features.sample_grid.Sample`."""

    features: np.ndarray
    patch: np.ndarray
    part: np.ndarray


@dataclass(frozen=True, eq=False)
class Domain:
    """What the features of the training pages look like.

    Attributes:
        mean: (f,) float32.
        components: (m, f) float32; z = components @ (features - mean).
        center: (2 m,) float64, the means of z and |z| over all points.
        whitening: (2 m, 2 m) float64; the distance of means e is |(e - center) @ whitening|.
        limits: (2,) float64, distances of a page and of a patch from which on they differ.
        pages: number of training pages.
    """

    mean: np.ndarray
    components: np.ndarray
    center: np.ndarray
    whitening: np.ndarray
    limits: np.ndarray
    pages: int

    def codes(self, features: np.ndarray) -> np.ndarray:
        """Turn features (..., f) into components (..., m) int16, in steps of 1 / 1024, cut at 4."""
        flat = (features.reshape(-1, features.shape[-1]) - self.mean) @ self.components.T
        found = np.rint(np.clip(flat, -_CLIP, _CLIP) * _UNIT).astype(np.int16)
        return found.reshape(*features.shape[:-1], len(self.components))

    def score(self, sums: np.ndarray) -> float | None:
        """Return the distance of a page in units of its limit, from the sums of `tally`; None without a point."""
        return float(self._distances(sums[None])[0] / self.limits[0]) if sums[0] else None

    def patches(self, sums: np.ndarray) -> np.ndarray:
        """Return the distance (n,) of patches in units of their limit, from their sums (n, 1 + 2 m); NaN: no point."""
        out = np.full(len(sums), np.nan)
        out[sums[:, 0] > 0] = self._distances(sums[sums[:, 0] > 0]) / self.limits[1]
        return out

    def _distances(self, sums: np.ndarray) -> np.ndarray:
        means = sums[:, 1:] / (sums[:, :1] * float(_UNIT))
        return np.linalg.norm((means - self.center) @ self.whitening, axis=1)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, for a model file."""
        own = {key: getattr(self, key) for key in ("mean", "components", "center", "whitening", "limits")}
        return {**own, "pages": np.array([self.pages])}

    @classmethod
    def from_tensors(cls, found: Mapping[str, np.ndarray]) -> "Domain":
        """Build it from what `tensors` returned."""
        return cls(**{**found, "pages": int(found["pages"][0])})


def fits(found: Mapping[str, np.ndarray]) -> bool:
    """Tell whether the arrays of a model file belong together."""
    if set(found) != {"mean", "components", "center", "whitening", "limits", "pages"}:
        return False
    width, count = found["components"].shape[-1:], 2 * len(found["components"])
    shapes = {"mean": width, "center": (count,), "whitening": (count, count), "limits": (2,), "pages": (1,)}
    right = found["components"].ndim == 2 and all(found[k].shape == shape for k, shape in shapes.items())
    return right and all(bool((found[k] > 0).all()) for k in ("limits", "pages"))


def tally(codes: np.ndarray) -> np.ndarray:
    """Sum up components (n, m) int16 -> (1 + 2 m,) int64: their number, the sums of z and of |z|."""
    wide = codes.astype(np.int64)
    return np.concatenate([[len(wide)], wide.sum(0), np.abs(wide).sum(0)])


def learn_domain(pages: Sequence[Sampled]) -> Domain | None:
    """Summarise training pages, and find the limits.

    Args:
        pages: each with at least one patch.

    Returns:
        None where there is too little to hold anything out: one page whose patches lie in fewer than two quarters.
    """
    if len(pages) > 1:
        chosen = np.unique(np.linspace(0, len(pages) - 1, _FOLDS).round().astype(int)).tolist()
        folds = [([p for i, p in enumerate(pages) if i != out], pages[out]) for out in chosen]
    else:
        named = np.unique(pages[0].part).tolist() if pages else []
        folds = [([_part(pages[0], pages[0].part != k)], _part(pages[0], pages[0].part == k)) for k in named]
    if len(folds) < 2:
        return None
    held, patches = list[float](), list[np.ndarray]()
    for rest, out in folds:
        found = _summary(rest)
        held.append(float(found._distances(tally(found.codes(out.features))[None])[0]))
        patches.append(found._distances(_by_patch(found, out)))
    whole = _summary(pages)
    margin = MARGIN if len(pages) > 1 else MARGIN_ONE
    # a page whose quarters are all alike would have no room at all
    limits = np.maximum([margin * max(held), np.percentile(np.concatenate(patches), _PATCHES)], 1e-3)
    return replace(whole, limits=limits)


def _part(page: Sampled, wanted: np.ndarray) -> Sampled:
    """Return some patches (n,) bool of a page."""
    keep = wanted[page.patch]
    return replace(
        page,  # type: ignore[type-var] - samples are dataclasses
        features=page.features[keep],
        patch=(np.cumsum(wanted) - 1)[page.patch[keep]],
        part=page.part[wanted],
    )


def _summary(pages: Sequence[Sampled]) -> Domain:
    """Summarise pages, without limits."""
    features = np.concatenate([page.features for page in pages]).astype(np.float64)
    mean, spread = features.mean(0), features.std(0) + 1e-6
    # principal components of standardised features, the largest loading positive
    values, vectors = np.linalg.eigh(
        (features - mean).T @ (features - mean) / len(features) / np.outer(spread, spread)
    )
    count = min(COMPONENTS, len(values))
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0)
    components = (vectors * np.sign(largest) / np.sqrt(np.maximum(values, _FLOOR)) / spread[:, None]).T
    empty = np.zeros(2 * count)
    found = Domain(
        mean.astype(np.float32),
        np.ascontiguousarray(components, np.float32),
        empty,
        np.eye(2 * count),
        np.ones(2),
        len(pages),
    )
    sums = np.concatenate([_by_patch(found, page) for page in pages])
    total, each = sums.sum(0), sums[:, 1:] / (sums[:, :1] * float(_UNIT))
    # the covariance of few patches is uncertain off the diagonal, and nearly singular
    deviation = each - each.mean(0)
    covariance = deviation.T @ deviation / max(len(each) - 1, 1)
    covariance += _SHRINK * (np.diag(np.diag(covariance)) - covariance)
    covariance += np.eye(2 * count) * max(_RIDGE * np.trace(covariance) / (2 * count), 1e-9)
    root = np.linalg.inv(np.linalg.cholesky(covariance)).T / np.sqrt(2 * count)
    return replace(found, center=total[1:] / (total[0] * float(_UNIT)), whitening=np.ascontiguousarray(root))


def _by_patch(domain: Domain, page: Sampled) -> np.ndarray:
    """Sum up each patch of a page -> (patches, 1 + 2 m) int64."""
    wide = domain.codes(page.features).astype(np.int64)
    own = np.concatenate([np.ones((len(wide), 1), np.int64), wide, np.abs(wide)], 1)
    out = np.zeros((len(page.part), own.shape[1]), np.int64)
    np.add.at(out, page.patch, own)
    return out
