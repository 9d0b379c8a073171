"""From the features of a page to class probabilities and a label map, within the memory there is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from vispe.errors import InputError, OptionError
from vispe.segment.classify import PixelClassifier
from vispe.segment.cluster import PixelClusters
from vispe.segment.features import BLOCK, Features
from vispe.segment.tiles import Blend

_T = TypeVar("_T")
_ROWS = 1 << 18  # pixels whose probabilities are computed at once


@dataclass(frozen=True)
class Post:
    """What is done to the probabilities and labels at the end.

    Attributes:
        smooth: radius in pixels of the square over which probabilities are averaged; 0 leaves them.
        min_area: connected patches of one class with fewer pixels take the class of the nearest larger patch.
    """

    smooth: int = 0
    min_area: int = 0

    def __post_init__(self) -> None:
        for name in ("smooth", "min_area"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)} must be 0 or more pixels.")


@dataclass(frozen=True, eq=False)
class Prediction:
    """The result for one page.

    Attributes:
        prob: (K, h, w) float32; 0 where there is no data.
        labels: (h, w) uint8, 1..K, 0 = no data.
        uncertainty: (h, w) float32, 1 - (largest - second largest probability); NaN = no data.
        overlap: pixels in more than one tile.
        disagreeing: of these, the pixels to which two tiles give different classes.
        notes: what the user should know.
    """

    prob: np.ndarray
    labels: np.ndarray
    uncertainty: np.ndarray
    overlap: int
    disagreeing: int
    notes: tuple[str, ...]


def predict_page(
    page: np.ndarray,
    valid: np.ndarray,
    features: Features,
    classifier: PixelClassifier | PixelClusters,
    post: Post,
    step: Callable[[float], None],
) -> Prediction:
    """Segment one page.

    Args:
        page: (h, w, c) float32 grey levels in [0, 1].
        valid: (h, w) bool, pixels with data.
        features: how features are computed.
        classifier: fitted.
        post: smoothing.
        step: is told the share of the page that each piece was.
    """
    prepared = features.prepare(page, valid)
    height, width = valid.shape
    blend = Blend(height, width, classifier.n_classes)
    for number, piece in enumerate(prepared.pieces):
        own = valid[piece.slices]
        found = prepared.compute(number)
        prob = np.zeros((*piece.shape, classifier.n_classes), np.float32)
        rows = max(_ROWS // piece.shape[1], 1)
        for top in range(0, piece.shape[0], rows):
            part = own[top : top + rows]
            if part.any():
                prob[top : top + rows][part] = classifier.probabilities(found[top : top + rows][part])
        blend.add(piece, prob, prepared.weight(number))
        step(1 / len(prepared.pieces))
    prob = blend.result()
    prob[:, ~valid] = 0
    if post.smooth:
        prob = _smooth(prob, valid, post.smooth)
    labels = np.where(valid, prob.argmax(0) + 1, 0).astype(np.uint8)
    if post.min_area > 1:
        labels = _drop_small(labels, post.min_area)
    top_two = np.partition(prob, -2, axis=0)[-2:]
    uncertainty = np.where(valid, 1 - (top_two[1] - top_two[0]), np.nan).astype(np.float32)
    return Prediction(
        prob, labels, uncertainty, blend.overlap_pixels, blend.disagreeing_pixels, prepared.notes
    )


def within_memory(features: Features, work: Callable[[], _T], tell: Callable[[str], None]) -> _T:
    """Run `work`; when memory runs out, let `features` shrink and try again.

    Args:
        features: what `work` computes with.
        work: repeatable.
        tell: is told of each step taken.

    Raises:
        InputError: the smallest tile needs too much memory.
    """
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            taken = features.shrink()
            if taken is None:
                side = features.tile or BLOCK
                raise InputError(
                    f"out of memory even with tiles of {side} px on {features.device}; cut the image into parts or "
                    "take fewer pages with --z."
                ) from error
            tell(taken)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "allocate memory" in str(error) or "out of memory" in str(error)


def _smooth(prob: np.ndarray, valid: np.ndarray, radius: int) -> np.ndarray:
    """Average probabilities over squares of 2 radius + 1 px, over the pixels with data only."""
    from scipy.ndimage import uniform_filter

    weight = uniform_filter(valid.astype(np.float32), 2 * radius + 1, mode="reflect")
    weight = np.maximum(weight, np.finfo(np.float32).tiny)
    for k in range(len(prob)):
        prob[k] = np.where(valid, uniform_filter(prob[k], 2 * radius + 1, mode="reflect") / weight, 0)
    return prob


def _drop_small(labels: np.ndarray, least: int) -> np.ndarray:
    """Give patches (8-connected) below `least` pixels the class of the nearest pixel of a larger patch."""
    from scipy.ndimage import distance_transform_edt
    from skimage.measure import label

    patches = label(labels, background=0, connectivity=2)
    counts = np.bincount(patches.ravel())
    small = (counts[patches] < least) & (labels > 0)
    keep = (labels > 0) & ~small
    if not small.any() or not keep.any():
        return labels
    nearest = distance_transform_edt(~keep, return_distances=False, return_indices=True)
    return np.where(small, labels[tuple(nearest)], labels)
