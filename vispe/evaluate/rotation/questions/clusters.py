"""Consistency of unsupervised segmentations: k-means on the tokens of an image, under turns and mirrorings.

The clusters are fitted once, on the image as it stands, and applied to every pose: what changes then is due to the
features. Fitting again at every pose adds the noise of k-means itself and is given beside it, clusters matched one to
one by the Hungarian method.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, batches, features_of
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.processes import Piece
from vispe.evaluate.rotation.questions.features import label_of
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.steps import Found, _features
from vispe.segment.metrics import mean_iou, rand_index
from vispe.symmetry.d4 import D4, IDENTITY, Element

PARTS = ("clusters fitted once", "clusters refitted")


def cluster_consistency(
    f: FeatureFunction,
    images: Iterable[Tensor],
    clusters: int,
    *,
    elements: Sequence[Element] = D4,
    batch_size: int = 1,
    refit: bool = True,
    seed: int = 0,
) -> tuple[Measurement, ...]:
    """Compare the clusters of tokens of moved images, brought back, with those of the image.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each.
        clusters: number of clusters, at most the number of different tokens.
        elements: poses without the identity.
        batch_size: images of equal size that f sees at once.
        refit: measure fitting again too.
        seed: of k-means, the same at every fit.

    Returns:
        mIoU and adjusted Rand index for each pose and on average, under both names of `PARTS`.
    """
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if clusters < 2 or not poses:
        raise OptionError(
            f"Consistency of clusters needs 2 or more of them and a pose besides the identity, got {clusters=} and "
            f"{len(poses)} poses."
        )
    parts = PARTS[: 1 + refit]
    found: dict[tuple[str, str, str], list[float]] = {}
    for batch in batches(images, batch_size):
        first = features_of(f, batch)
        fitted = [_fit(_tokens(one), clusters, seed) for one in first]
        still = [m.predict(_tokens(one)).astype(np.int64) + 1 for m, one in zip(fitted, first, strict=True)]
        for g in poses:
            moved = features_of(f, g.apply(batch))
            grid = tuple(moved.shape[-2:])
            for one, model, own in zip(moved, fitted, still, strict=True):
                tokens = _tokens(one)
                labels = {PARTS[0]: model.predict(tokens)}
                if refit:
                    labels[PARTS[1]] = _fit(tokens, clusters, seed).labels_
                for part, numbers in labels.items():
                    back = g.undo(numbers.astype(np.int64).reshape(grid) + 1).reshape(-1)
                    if part == PARTS[1]:
                        back = _matched(back, own, clusters)
                    found.setdefault((g.name, "miou", part), []).append(mean_iou(own, back, clusters))
                    found.setdefault((g.name, "ari", part), []).append(rand_index(own, back))
    rows = []
    for part in parts:
        for m in ("miou", "ari"):
            over = np.array([found[g.name, m, part] for g in poses])
            rows.append(Measurement(label_of(poses), m, over.mean(0), part))
            rows += [Measurement(g.name, m, np.array(found[g.name, m, part]), part) for g in poses]
    return tuple(rows)


def _tokens(one: Tensor) -> np.ndarray:
    """A map (d, h, w) as tokens (n, d)."""
    return np.ascontiguousarray(one.flatten(1).T.cpu().numpy())


def _fit(tokens: np.ndarray, clusters: int, seed: int):
    from sklearn.cluster import KMeans

    different = len(np.unique(tokens, axis=0))
    if different < clusters:
        raise OptionError(
            f"clusters={clusters} is more than the {different} different tokens of the image; ask for fewer."
        )
    return KMeans(clusters, n_init=4, random_state=seed).fit(tokens)


def _matched(labels: np.ndarray, own: np.ndarray, clusters: int) -> np.ndarray:
    """Give clusters the numbers that agree best with `own`."""
    from vispe.segment.metrics import apply_mapping, match_clusters

    return apply_mapping(labels[None], match_clusters(labels[None], own[None], clusters))[0].astype(np.int64)


def _clusters(what: Measured, plan: Plan, step: Step) -> Found:
    f, images = _features(what), step.fitted
    pieces: list[Piece] = []
    for image in images:
        try:
            pieces.append((1, cluster_consistency(f, [image], plan.clusters, seed=plan.seed)))
        except OptionError as error:
            step.notes.append(f"An image was left out of the clusters: {error}")
            pieces.append((1, None))
    return {"clusters": pieces}
