"""Shared pattern: fraction of the variance of feature maps that is common to all images.

Follows the idea of PPP, the position-information pattern from padding ("Unveiling The Mask of Position-Information
Pattern Through the Mist of Image Features"): a response pattern that does not depend on the image. The estimator is
ours. For maps centred over patches, the mean inner product of two different images measures the common part;
the mean inner product of an image with itself measures the total. Their ratio is (S - E) / (S - E + W), where
S is the variance of the mean map, W the variance over images at a patch, and E = W / n the expected noise in
S. The ratio therefore has no bias from the number of images n.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError, UnsupportedHost
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator, Measure, Outcome


def map_share(maps: Tensor) -> float:
    """Return the fraction of the variance over patches in a map common to all images, in [0, 1].

    Args:
        maps: features (n, d, h, w) of n >= 2 images.

    Raises:
        ShapeError: another shape, or a single image.

    >>> map_share(torch.arange(12.0).reshape(1, 1, 3, 4).expand(5, -1, -1, -1))
    1.0
    """
    if maps.ndim != 4 or len(maps) < 2:
        raise ShapeError(
            f"map_share: maps must be (n, d, h, w) with at least 2 images, got {tuple(maps.shape)}. Pass more images."
        )
    flat = _centred(maps.double()).flatten(1)
    return _share((flat @ flat.T).numpy(), np.ones(len(flat)))


def _centred(maps: Tensor) -> Tensor:
    # the mean over patches carries no position
    return maps - maps.mean((-2, -1), keepdim=True)


def _share(products: np.ndarray, weights: np.ndarray) -> float:
    """Return the fraction from inner products of maps (n, n) and how often each image was drawn."""
    # pairs of an image with itself would bias the common part upwards
    pairs = np.outer(weights, weights) * (1 - np.eye(len(weights)))
    total = (products.diagonal() * weights).sum() / weights.sum()
    if pairs.sum() == 0:
        return float("nan")
    return float(max(0.0, (products * pairs).sum() / pairs.sum()) / total) if total > 0 else 0.0


class SharedPattern(Measure):
    """Fraction of the variance in a map common to all images; the interval resamples groups of images.

    Follows PPP ("Unveiling The Mask of Position-Information Pattern Through the Mist of Image Features") in asking for
    a pattern that is independent of the image; the estimator is ours.
    """

    name = "pattern"
    family = "features"
    order = 1
    limit = 0.05
    question = "Do features contain a pattern that does not depend on the image?"
    number = "fraction of the variance over patches in the mean map, unbiased"
    misleads = (
        "Images with a common layout, such as sky above ground, share a map too; compare with the model without its "
        "encoding."
    )
    papers = ("Unveiling The Mask of Position-Information Pattern Through the Mist of Image Features",)
    needs = frozenset({"maps"})
    controls = ("none",)

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Add the map to the sum of its group."""
        centred = _centred(maps.double())
        acc.add("maps", centred.float(), groups=True)
        acc.note(group=acc.number % GROUPS, power=centred.square().sum())

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction over all pairs of images; the statistic uses pairs of drawn groups."""
        if len(acc.records) < 2:
            raise UnsupportedHost("A common map needs at least 2 images, got 1; pass more images.")
        power = np.bincount(acc.column("group").astype(int), acc.column("power"), GROUPS)
        count = np.bincount(acc.column("group").astype(int), minlength=GROUPS)
        used = np.flatnonzero(count)
        sums = acc.sums["maps"][torch.from_numpy(used)].double().flatten(1)
        products, power, count = (sums @ sums.T).numpy(), power[used], count[used]
        n, total = count.sum(), power.sum()
        common = (products.sum() - total) / (n * (n - 1))
        value = max(0.0, common) / (total / n) if total > 0 else 0.0

        def drawn(pick: np.ndarray) -> float:
            times = np.bincount(pick, minlength=len(used))
            pairs = np.outer(times, times) * (1 - np.eye(len(used)))
            if not pairs.any() or not (times * power).any():
                return float("nan")
            # pairs of different groups, weighted by their number of pairs of images
            both = (products * pairs).sum() / (np.outer(count, count) * pairs).sum()
            return max(0.0, both) * (times * count).sum() / (times * power).sum()

        return Outcome(float(value), control={"no position": 0.0}, statistic=drawn, units=len(used))
