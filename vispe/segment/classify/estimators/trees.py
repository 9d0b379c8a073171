"""Extremely randomised trees of the `ensemble` classifier.

Geurts, Ernst and Wehenkel, "Extremely randomized trees", Machine Learning 63, 2006; scikit-learn's implementation. Each
split tests a random threshold of a few random features. The trees depend on the set of labelled pixels and not on their
order, so the labels of a rotated image result in the same trees. They are stored as plain arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vispe.errors import InputError, counted

TREES = 32
"""Number of trees: 100 gain less than 0.002 mean IoU more on public micrographs, in three times the time."""

PIXELS = 50_000
"""Upper bound of the labelled pixels that trees are fitted to; classes with more are subsampled evenly."""

_BLOCK = 4096  # pixels classified at a time (measured: 2048 takes as long, 8192 takes 10 % longer)
_LEAF = 2  # labelled pixels in a leaf, at least
_WEIGHT = 2.0**32  # total weight of a class
_ARRAYS = ("sizes", "left", "right", "feature", "threshold", "value", "classes", "width")
_LARGEST = 1 << 20  # upper bound of the number of features


@dataclass(frozen=True, eq=False)
class Trees:
    """Fitted trees; the nodes of all trees are concatenated.

    Attributes:
        sizes: (t,) int64, number of nodes of each tree.
        left, right: (n,) int32, children as indices in the same tree, larger than the index of the node; -1: a leaf.
        feature: (n,) int32, feature that is compared with `threshold`.
        threshold: (n,) float64; values up to the threshold go left.
        value: (n, k) float32, probabilities of the labelled classes.
        classes: (k,) int64, the labelled classes, 1..K.
        width: (1,) int64, number of features.
    """

    sizes: np.ndarray
    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    classes: np.ndarray
    width: np.ndarray

    @classmethod
    def fit(cls, features: np.ndarray, classes: np.ndarray, seed: int, count: int = TREES) -> "Trees":
        """Fit trees to labelled pixels, with equal total weight for each class.

        Args:
            features: (n, f) float32, finite.
            classes: (n,) int, 1..K.
            seed: seed of all random numbers.
            count: number of trees.
        """
        from sklearn.ensemble import ExtraTreesClassifier

        index = _subset(features, classes)
        width, features, classes = features.shape[1], features[index], classes[index]
        # integer weights: their sums are exact, so that the order of the pixels does not affect any split
        weight = np.rint(_WEIGHT / np.bincount(classes).clip(1))[classes]
        forest = ExtraTreesClassifier(count, min_samples_leaf=_LEAF, random_state=seed, n_jobs=1)
        fitted = [tree.tree_ for tree in forest.fit(features, classes, sample_weight=weight).estimators_]
        return cls(
            np.array([tree.node_count for tree in fitted], np.int64),
            np.concatenate([tree.children_left for tree in fitted]).astype(np.int32),
            np.concatenate([tree.children_right for tree in fitted]).astype(np.int32),
            np.concatenate([tree.feature for tree in fitted]).clip(0).astype(np.int32),
            np.concatenate([tree.threshold for tree in fitted]).astype(np.float64),
            np.concatenate([tree.value[:, 0] for tree in fitted]).astype(np.float32),
            np.asarray(forest.classes_, np.int64),
            np.array([width], np.int64),
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray], n_classes: int) -> "Trees":
        """Create trees from the arrays of a model file.

        Raises:
            InputError: arrays that are missing or inconsistent. Compiled code reads them without further checks.
        """
        arrays = {name: tensors.get(f"trees.{name}") for name in _ARRAYS}
        missing = [name for name, value in arrays.items() if value is None]
        if missing:
            raise InputError(
                f"an ensemble without trees.{', trees.'.join(missing)} is not usable. Train it again."
            )
        trees = cls(**{name: np.array(value) for name, value in arrays.items()})
        if not trees._is_consistent(n_classes):
            raise InputError(
                f"the arrays of an ensemble for {counted(n_classes, 'class')} are inconsistent or not finite. Train "
                "it again."
            )
        return trees

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays for a model file."""
        return {f"trees.{name}": getattr(self, name) for name in _ARRAYS}

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return the mean probabilities (n, k) float32 of the labelled classes for features (n, f) float32."""
        features = np.ascontiguousarray(features, np.float32)
        total = np.zeros((len(features), len(self.classes)), np.float32)
        # few pixels at a time, whose features remain in the CPU cache for all trees
        for start in range(0, len(features), _BLOCK):
            pixels, sums = features[start : start + _BLOCK], total[start : start + _BLOCK]
            of_leaf = np.empty_like(sums)
            for tree, value in self._trees:
                sums += value.take(tree.apply(pixels), axis=0, out=of_leaf, mode="clip")
        return total / np.float32(len(self.sizes))

    @cached_property
    def _trees(self) -> list[tuple[Any, np.ndarray]]:
        """Trees of scikit-learn that find the leaf of a pixel, and the probabilities of their nodes."""
        from sklearn.tree._tree import NODE_DTYPE, Tree

        trees = []
        for end, size in zip(np.cumsum(self.sizes), self.sizes, strict=True):
            part = slice(end - size, end)
            nodes = np.zeros(size, NODE_DTYPE)
            nodes["left_child"], nodes["right_child"] = self.left[part], self.right[part]
            nodes["feature"], nodes["threshold"] = self.feature[part], self.threshold[part]
            tree = Tree(int(self.width[0]), np.array([len(self.classes)], np.intp), 1)
            values = np.ascontiguousarray(self.value[part, None], np.float64)
            tree.__setstate__({"max_depth": 0, "node_count": int(size), "nodes": nodes, "values": values})
            trees.append((tree, self.value[part]))
        return trees

    def _is_consistent(self, n_classes: int) -> bool:
        """Return whether every path ends in a leaf of its tree, with probabilities."""
        integers = (self.sizes, self.left, self.right, self.feature, self.classes, self.width)
        n = self.left.size
        if any(array.dtype.kind != "i" or array.ndim != 1 for array in integers) or self.width.shape != (1,):
            return False
        shapes = [array.shape for array in (self.left, self.right, self.feature, self.threshold)]
        if shapes != [(n,)] * 4 or self.value.shape != (n, len(self.classes)) or not len(self.sizes):
            return False
        if (self.sizes < 1).any() or int(self.sizes.sum()) != n or not 1 <= self.width[0] <= _LARGEST:
            return False
        classes = self.classes
        if len(classes) < 2 or (np.diff(classes) < 1).any() or classes[0] < 1 or classes[-1] > n_classes:
            return False
        ends = np.cumsum(self.sizes)
        number, size = (
            np.arange(n) - np.repeat(ends - self.sizes, self.sizes),
            np.repeat(self.sizes, self.sizes),
        )
        leaf = self.left == -1
        if not np.array_equal(leaf, self.right == -1):
            return False
        # children follow their node, so that no path is a cycle
        for child in (self.left, self.right):
            if not ((child > number) & (child < size))[~leaf].all():
                return False
        if not ((self.feature >= 0) & (self.feature < self.width[0])).all():
            return False
        reals = self.threshold.dtype.kind == self.value.dtype.kind == "f"
        finite = reals and bool(np.isfinite(self.threshold).all() and np.isfinite(self.value).all())
        return finite and bool((self.value >= 0).all() and np.allclose(self.value.sum(1), 1, atol=1e-3))


def _subset(features: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the indices of at most `PIXELS` labelled pixels, evenly spaced in the order of their features."""
    if len(classes) <= PIXELS:
        return np.arange(len(classes))
    most = PIXELS // len(np.unique(classes))
    # sorted by the features instead of by position, which changes if the image is rotated
    order = np.argsort(features.sum(1, dtype=np.float64), kind="stable")
    parts = []
    for k in np.unique(classes):
        members = order[classes[order] == k]
        parts.append(
            members[np.linspace(0, len(members) - 1, min(most, len(members))).round().astype(np.int64)]
        )
    return np.sort(np.concatenate(parts))
