"""From the features of a page to class probabilities and a label map, within the memory there is.

The classes of each page are weighed by how frequent they are on that page (`vispe.segment.classify.class_prior`): a page
has the same label map alone and in a stack, where the grey limits are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from vispe.errors import InputError, OptionError, did_you_mean, is_memory
from vispe.segment.classify.box_filter import smooth
from vispe.segment.classify.class_prior import PRIORS, Counts, areas, count, estimate, reweigh, weights
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.guided_filter import clean
from vispe.segment.classify.out_of_distribution import Domain
from vispe.segment.classify.pixel_classifier import PixelClassifier, by_chunks
from vispe.segment.features.filters3d import Stack
from vispe.segment.features.pixel_features import BLOCK, Features, PreparedPage
from vispe.segment.features.sample_grid import Seen, offsets
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import Blend, Region, common
from vispe.segment.model.model_file import Model

_T = TypeVar("_T")
_PIXELS = 1 << 17  # pixels that are worked on at once


@dataclass(frozen=True)
class Post:
    """What is done to the probabilities and labels at the end.

    Attributes:
        smooth: radius in pixels of the square over which probabilities are averaged; 0 leaves them.
        min_area: connected patches of one class with fewer pixels take the class of the nearest larger patch.
        prior: what classes that were learnt from labels are weighed by on each page: `'sqrt'`, the root of how frequent
            they are there; `'em'`, that itself; `'uniform'`, nothing. None: sqrt. Clusters and words are never weighed.
        clean: whether probabilities are filtered with the picture as a guide, before smoothing.
    """

    smooth: int = 0
    min_area: int = 0
    prior: str | None = None
    clean: bool = False

    def __post_init__(self) -> None:
        if self.prior is not None and self.prior not in PRIORS:
            hint = did_you_mean(self.prior, PRIORS)
            raise OptionError(f"prior={self.prior!r} is not one of {', '.join(PRIORS)}.{hint}")
        for name in ("smooth", "min_area"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)} must be 0 or more pixels.")

    def weighing(self, classifier: object) -> str:
        """Return which of `PRIORS` a classifier is used with.

        Raises:
            OptionError: a prior was asked for, but the classes were not learnt from labels.
        """
        if isinstance(classifier, PixelClassifier):
            return self.prior or PRIORS[0]
        if self.prior is not None:
            raise OptionError(
                f"prior={self.prior!r} has no effect on clusters and words, whose classes are not learnt as equally "
                "frequent; leave it out."
            )
        return "uniform"


@dataclass(frozen=True, eq=False)
class Areas:
    """How much of a page, or of several together, belongs to each class.

    Attributes:
        pixels: (K,) float64, counted with the estimated frequencies, before cleaning, smoothing and `min_area`.
        doubt: (K,) float64, pixels in doubt, of which an interval is made.
        priors: the estimated frequencies (K,) of each page.
        unweighed: (K,) float64, pixels counted as if all classes were equally frequent.
    """

    pixels: np.ndarray
    doubt: np.ndarray
    priors: tuple[np.ndarray, ...]
    unweighed: np.ndarray

    def __add__(self, other: "Areas") -> "Areas":
        sums = (self.pixels + other.pixels, self.doubt + other.doubt, self.priors + other.priors)
        return Areas(*sums, self.unweighed + other.unweighed)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The result for one page.

    Attributes:
        prob: (K, h, w) float32, weighed by `Post.prior`, what labels and uncertainty follow; 0 where there is no data.
        labels: (h, w) uint8, 1..K, 0 = no data.
        uncertainty: (h, w) float32, 1 - (largest - second largest probability); NaN = no data.
        overlap: pixels in more than one tile.
        disagreeing: of these, the pixels to which two tiles give different classes.
        notes: what the user should know.
        areas: of the classes; None where nothing was weighed.
        seen: what the features look like on a lattice; None where the model has nothing to compare them with.
    """

    prob: np.ndarray
    labels: np.ndarray
    uncertainty: np.ndarray
    overlap: int
    disagreeing: int
    notes: tuple[str, ...]
    areas: Areas | None = None
    seen: Seen | None = None


@dataclass(frozen=True, eq=False)
class Segmenter:
    """What segments pages: a model, what computes its features, and what is done to the probabilities."""

    model: Model
    features: Features
    post: Post = Post()

    def page(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        step: Callable[[float], None] = lambda share: None,
        stack: Stack | None = None,
        number: int = 0,
    ) -> Prediction:
        """Segment one page (h, w, c) with pixels `valid` (h, w); 3D filters take it for page `number` of a stack."""
        features = self.features if stack is None else self.features.within(stack, number)
        return predict_page(page, valid, features, self.model.classifier, self.post, step, self.model.domain)


def total_areas(results: Sequence[Prediction]) -> Areas | None:
    """Add up the areas of all pages; None where nothing was weighed."""
    found = [r.areas for r in results if r.areas is not None]
    return sum(found[1:], found[0]) if found else None


def predict_page(
    page: np.ndarray,
    valid: np.ndarray,
    features: Features,
    classifier: PixelClassifier | PixelClusters,
    post: Post,
    step: Callable[[float], None],
    domain: Domain | None = None,
) -> Prediction:
    """Segment one page.

    Args:
        page: (h, w, c) float32 grey levels in [0, 1].
        valid: (h, w) bool, pixels with data.
        features: how features are computed.
        classifier: fitted.
        post: smoothing.
        step: called with the share of the page that each piece is.
        domain: what its features are compared with; None compares nothing.
    """
    prepared = features.prepare(page, valid)
    whole = Region(0, valid.shape[0], 0, valid.shape[1])
    threads = piece_threads(features, classifier)
    numbers = range(len(prepared.pieces))
    seen = None if domain is None else Seen.empty(whole, domain)
    prob, blend = assemble(prepared, numbers, whole, valid, classifier, threads, step, seen)
    notes = prepared.notes
    found = find_areas(count(prob)) if post.weighing(classifier) != "uniform" else None
    grey = page.mean(-1) if post.clean else None
    labels, uncertainty = settle(prob, valid, post, found.priors[0] if found is not None else None, grey)
    if post.min_area > 1:
        labels, left = _drop_small(labels, post.min_area)
        if not left:
            notes += (
                f"no patch of one class has min_area={post.min_area} pixels: min_area changed nothing.",
            )
    overlap, disagreeing = (0, 0) if blend is None else (blend.overlap_pixels, blend.disagreeing_pixels)
    return Prediction(prob, labels, uncertainty, overlap, disagreeing, notes, found, seen)


def assemble(
    prepared: PreparedPage,
    numbers: Sequence[int],
    region: Region,
    valid: np.ndarray,
    classifier: PixelClassifier | PixelClusters,
    threads: int,
    step: Callable[[float], None],
    seen: Seen | None = None,
) -> tuple[np.ndarray, Blend | None]:
    """Classify pieces of a page and put them together, in their order on the page.

    Args:
        prepared: the page.
        numbers: of the pieces that touch the region.
        region: of the page.
        valid: (h, w) bool, the pixels of the whole page with data; only indexed.
        classifier: fitted.
        threads: pieces at once.
        step: called with the share that each piece is.
        seen: of the region, filled with what the features look like.

    Returns:
        The probabilities (K, rows, columns) of the region; what counted where pieces overlap, None where none can.
    """
    pieces, n_classes = prepared.pieces, classifier.n_classes
    blend = Blend(*region.shape, n_classes) if prepared.overlapping else None
    prob = np.empty((n_classes if blend is None else 0, *region.shape), np.float32)

    def work(index: int) -> tuple[np.ndarray, list[np.ndarray]]:
        number, kept = numbers[index], list[np.ndarray]()
        # whole pieces, also where only a part of them lies in the region: the same numbers in the last bit
        look = None if seen is None else lambda found: kept.append(seen.domain.codes(found))
        return piece_probabilities(prepared, number, valid[pieces[number].slices], classifier, look), kept

    for number, (part, kept) in zip(numbers, in_order(work, len(numbers), threads), strict=True):
        inner, outer = common(pieces[number], region)
        if seen is not None and kept:
            seen.add(pieces[number], kept[0], prepared.weight(number))
        part = part[(slice(None), *inner.slices)]
        if blend is None:
            prob[(slice(None), *outer.slices)] = part
        else:
            weight = prepared.weight(number)
            weight = None if weight is None else weight[inner.slices]
            blend.add(outer, np.moveaxis(part, 0, -1), weight)
        step(1 / len(numbers))
    if blend is not None:
        prob = blend.result()
        prob[:, ~valid[region.slices]] = 0
    if seen is not None:
        seen.forget(~valid[region.slices])
    return prob, blend


def find_areas(counts: Counts) -> Areas:
    """Estimate the frequencies of the classes on a page, and with them the areas."""
    prior = estimate(counts)
    return Areas(*areas(counts, prior), (prior,), areas(counts, np.full_like(prior, 1 / len(prior)))[0])


def settle(
    prob: np.ndarray,
    valid: np.ndarray,
    post: Post,
    prior: np.ndarray | None,
    grey: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weigh and smooth the probabilities (K, h, w) of a page, in place, and decide.

    Args:
        prob: of the classifier.
        valid: (h, w) bool, pixels with data.
        post: what to do.
        prior: (K,) frequencies of the classes on the whole page; None weighs nothing.
        grey: (h, w) grey levels in [0, 1], for `Post.clean`.

    Returns:
        Labels (h, w) uint8 and uncertainty (h, w) float32, as in `Prediction`.
    """
    weight = None if prior is None else weights(prior, post.prior or PRIORS[0])
    if weight is not None:
        reweigh(prob, weight)
    if post.clean and grey is not None:
        clean(prob, grey, valid)
    if post.smooth:
        smooth(prob, valid, post.smooth)
    return decide(prob, valid)


def piece_threads(features: Features, classifier: PixelClassifier | PixelClusters) -> int:
    """Pieces that are worked on at once: one where the device, or scikit-learn, uses all cores by itself."""
    own = features.device == "cpu" and classifier.kind in ("logistic", "forest")
    return torch.get_num_threads() if own else 1


def piece_probabilities(
    prepared: PreparedPage,
    number: int,
    valid: np.ndarray,
    classifier: PixelClassifier | PixelClusters,
    look: Callable[[np.ndarray], None] | None = None,
) -> np.ndarray:
    """Classify a piece of a page.

    Args:
        prepared: the page.
        number: of the piece.
        valid: (rows, columns) bool, its pixels with data.
        classifier: fitted.
        look: called with the features (rows, columns, f) on the lattice of `vispe.segment.features.sample_grid`.

    Returns:
        (K, rows, columns) float32; 0 where there is no data.
    """
    linear = classifier.linear if isinstance(classifier, PixelClassifier) else None
    if linear is not None:
        prob = classifier.of_scores(prepared.scores(number, linear, look))
        prob[:, ~valid] = 0
        return prob
    found = prepared.compute(number)
    if look is not None:
        rows, columns = offsets(prepared.pieces[number])
        look(found[:, rows[:, None], columns].transpose(1, 2, 0))
    if valid.all():
        return _planes(found.reshape(len(found), -1), classifier).reshape(-1, *valid.shape)
    prob = np.zeros((classifier.n_classes, *valid.shape), np.float32)
    if valid.any():
        prob[:, valid] = _planes(found[:, valid], classifier)
    return prob


def _planes(features: np.ndarray, classifier: PixelClassifier | PixelClusters) -> np.ndarray:
    """Classify features (f, n) -> (K, n)."""
    planes = getattr(classifier, "planes", None)
    if planes is not None:
        return planes(features)
    return by_chunks(features, classifier.n_classes, classifier.probabilities)


def decide(prob: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the most probable class of each pixel and its uncertainty; of equal classes the first one."""
    labels = np.empty(valid.shape, np.uint8)
    uncertainty = np.empty(valid.shape, np.float32)
    rows = max(_PIXELS // valid.shape[1], 1)
    for top in range(0, len(valid), rows):
        part, own = prob[:, top : top + rows], valid[top : top + rows]
        largest, label = part[0].copy(), np.ones(own.shape, np.uint8)
        second = np.full(own.shape, -np.inf, np.float32)
        for k in range(1, len(part)):
            np.maximum(second, np.minimum(largest, part[k]), out=second)
            label[part[k] > largest] = k + 1
            np.maximum(largest, part[k], out=largest)
        unsure = 1 - (largest - second)
        if not own.all():
            label[~own], unsure[~own] = 0, np.nan
        labels[top : top + rows], uncertainty[top : top + rows] = label, unsure
    return labels, uncertainty


def within_memory(features: Features, work: Callable[[], _T], note: Callable[[str], None]) -> _T:
    """Run `work`; when memory runs out, let `features` shrink and try again.

    Args:
        features: what `work` computes with.
        work: repeatable.
        note: called with each step taken.

    Raises:
        InputError: the smallest tile needs too much memory.
    """
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_memory(error):
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
            note(taken)


def _drop_small(labels: np.ndarray, least: int) -> tuple[np.ndarray, bool]:
    """Give patches (8-connected) below `least` pixels the class of the nearest pixel of a larger patch.

    Returns:
        The labels, and whether there is a larger patch; they are left as they are where there is none.
    """
    from scipy.ndimage import distance_transform_edt
    from skimage.measure import label

    patches = label(labels, background=0, connectivity=2)
    counts = np.bincount(patches.ravel())
    small = (counts[patches] < least) & (labels > 0)
    keep = (labels > 0) & ~small
    if not small.any() or not keep.any():
        return labels, bool(keep.any()) or not labels.any()
    nearest = distance_transform_edt(~keep, return_distances=False, return_indices=True)
    return np.where(small, labels[tuple(nearest)], labels), True
