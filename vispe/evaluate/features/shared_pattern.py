"""Do features hold a pattern that all pictures share, place by place?

Of maps of several pictures, centred over patches, the mean product of two different pictures is what they share, and
that of a picture with itself is everything; their quotient is (S - E) / (S - E + within), where S is the variance of
the mean map, `within` that over pictures at a patch and E = within / n what chance adds to S: it does not depend on n.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError, UnsupportedHost
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import GROUPS, Family, Kept, Measure, Outcome, View


def map_share(maps: Tensor) -> float:
    """Return the share of variance over patches that a map common to all pictures has, in [0, 1].

    Args:
        maps: (n, d, h, w), features of n pictures, at least 2.

    Raises:
        ShapeError: another shape, or a single picture.

    >>> map_share(torch.arange(12.0).reshape(1, 1, 3, 4).expand(5, -1, -1, -1))
    1.0
    """
    if maps.ndim != 4 or len(maps) < 2:
        raise ShapeError(
            f"A common map needs features (n, d, h, w) of 2 pictures or more, got {tuple(maps.shape)}."
        )
    flat = _centred(maps.double()).flatten(1)
    return _share((flat @ flat.T).numpy(), np.ones(len(flat)))


def _centred(maps: Tensor) -> Tensor:
    # what a picture has everywhere is no matter of places
    return maps - maps.mean((-2, -1), keepdim=True)


def _share(products: np.ndarray, weights: np.ndarray) -> float:
    """Return the share from products of the maps of single pictures (n, n) and how often each was drawn."""
    # a picture drawn twice shares everything with itself: such pairs say nothing
    pairs = np.outer(weights, weights) * (1 - np.eye(len(weights)))
    total = (products.diagonal() * weights).sum() / weights.sum()
    if pairs.sum() == 0:
        return float("nan")
    return float(max(0.0, (products * pairs).sum() / pairs.sum()) / total) if total > 0 else 0.0


class Pattern(Measure):
    """Share of a map that all pictures have in common; the interval draws groups of pictures."""

    name: ClassVar[str] = "pattern"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Do features hold a pattern that does not depend on the picture?"
    number: ClassVar[str] = "share of the variance over patches in the mean map, unbiased"
    misleads: ClassVar[str] = (
        "Pictures laid out alike, as sky above ground, share a map too; the model without its encoding shows how much."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    controls: ClassVar[tuple[View, ...]] = ("none",)

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Add the map to the sum of its group."""
        own = _centred(maps.double())
        kept.add("maps", own.float(), groups=True)
        kept.note(group=kept.number % GROUPS, power=own.square().sum())

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share over all pairs of pictures, and the same over pairs of groups that were drawn."""
        if len(kept.records) < 2:
            raise UnsupportedHost(
                "A map that pictures share needs 2 images or more, and there is 1; give more."
            )
        power = np.bincount(kept.column("group").astype(int), kept.column("power"), GROUPS)
        count = np.bincount(kept.column("group").astype(int), minlength=GROUPS)
        some = np.flatnonzero(count)
        sums = kept.sums["maps"][torch.from_numpy(some)].double().flatten(1)
        products, power, count = (sums @ sums.T).numpy(), power[some], count[some]
        n, total = count.sum(), power.sum()
        common = (products.sum() - total) / (n * (n - 1))
        value = max(0.0, common) / (total / n) if total > 0 else 0.0

        def drawn(pick: np.ndarray) -> float:
            times = np.bincount(pick, minlength=len(some))
            pairs = np.outer(times, times) * (1 - np.eye(len(some)))
            if not pairs.any() or not (times * power).any():
                return float("nan")
            # pairs of different groups, weighted by how many pairs of pictures they are
            both = (products * pairs).sum() / (np.outer(count, count) * pairs).sum()
            return max(0.0, both) * (times * count).sum() / (times * power).sum()

        return Outcome(float(value), control={"no place": 0.0}, statistic=drawn, units=len(some))
