"""Consistency of unsupervised segmentations: k-means on the tokens of an image, under rotations and reflections.

The clusters are fitted once, on the untransformed image, and applied to every pose, so that changes are due
to the features. A second fit at every pose adds the noise of k-means itself; it is reported as well, with
clusters matched one to one by the Hungarian method.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import OptionError, counted
from vispe.evaluate.rotation.comparison import Pair, compared, poses_of
from vispe.evaluate.rotation.distributed import Piece
from vispe.evaluate.rotation.helpers import Found, features, question
from vispe.evaluate.rotation.metrics.segmentation_consistency import agreement, pose_rows
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.record_key import FITTED_ONCE, REFITTED
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.d4 import D4, Element
from vispe.segment.metrics import apply_mapping, match_clusters

PARTS = (FITTED_ONCE, REFITTED)


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
    """Compare the clusters of tokens of transformed images, with the pose undone, with those of the original image.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each.
        clusters: number of clusters, at most the number of different tokens.
        elements: poses without the identity.
        batch_size: images of equal size per forward pass.
        refit: whether to measure clusters that are fitted again at every pose.
        seed: random seed of k-means, the same for every fit.

    Returns:
        mIoU and adjusted Rand index for each pose and on average, under both names of `PARTS`.

    Raises:
        OptionError: there are fewer than two clusters or more than different tokens, or no pose besides the
            identity.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or `f` does not return one map per image.
        ModuleNotFoundError: scikit-learn is not installed.

    Example:
        >>> import torch
        >>> image = torch.zeros(1, 1, 8, 8)
        >>> image[..., :4] = 1
        >>> rows = cluster_consistency(lambda images: images, image, 2, refit=False)
        >>> rows[0].transform, rows[0].metric, rows[0].values.tolist()
        ('D4', 'miou', [1.0])
    """
    poses = poses_of(elements, "Consistency of clusters")
    if clusters < 2:
        raise OptionError(f"Consistency of clusters needs 2 or more of them, got {clusters=}.")

    def pairs(batch: Tensor) -> Iterator[Pair]:
        tokens = [_tokens(one) for one in features_of(f, batch)]
        models = [_fit(one, clusters, seed) for one in tokens]
        still = [model.predict(one).astype(np.int64) + 1 for model, one in zip(models, tokens, strict=True)]
        for g in poses:
            moved = features_of(f, g.apply(batch))

            def back(
                labels: np.ndarray, g: Element = g, grid: tuple[int, ...] = tuple(moved.shape[-2:])
            ) -> np.ndarray:
                return g.undo(labels.astype(np.int64).reshape(grid) + 1).reshape(-1)

            tokens = [_tokens(one) for one in moved]
            applied = [back(m.predict(one)) for m, one in zip(models, tokens, strict=True)]
            yield (g, FITTED_ONCE), still, applied
            if refit:
                refitted = [back(_fit(one, clusters, seed).labels_) for one in tokens]
                yield (
                    (g, REFITTED),
                    still,
                    [_matched(*ab, clusters) for ab in zip(refitted, still, strict=True)],
                )

    values = compared(images, pairs, agreement(clusters), batch_size)
    rows = [pose_rows(values, poses, m, part) for part in PARTS[: 1 + refit] for m in agreement(clusters)]
    return tuple(chain.from_iterable(rows))


def _tokens(one: Tensor) -> np.ndarray:
    """Return a map (d, h, w) as tokens (n, d)."""
    return np.ascontiguousarray(one.flatten(1).T.cpu().numpy())


def _fit(tokens: np.ndarray, clusters: int, seed: int):
    from sklearn.cluster import KMeans

    different = len(np.unique(tokens, axis=0))
    if different < clusters:
        raise OptionError(
            f"clusters={clusters} is more than the {counted(different, 'different token')} of the image; ask for fewer."
        )
    return KMeans(clusters, n_init=4, random_state=seed).fit(tokens)


def _matched(labels: np.ndarray, own: np.ndarray, clusters: int) -> np.ndarray:
    """Return clusters renumbered for the best agreement with `own`."""
    return apply_mapping(labels[None], match_clusters(labels[None], own[None], clusters))[0].astype(np.int64)


@question("clusters")
def clusters(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Found:
    """Compare clusters of each image; images with too few distinct tokens are skipped."""
    f = features(measured)
    pieces: list[Piece] = []
    for image in step.fitted:
        try:
            pieces.append((1, cluster_consistency(f, [image], plan.clusters, seed=plan.seed)))
        except OptionError as error:
            step.notes.append(f"An image was skipped in the clusters: {error}")
            pieces.append((1, None))
    return {"clusters": pieces}
