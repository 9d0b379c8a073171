"""Prediction: from the features of a page to class probabilities and a label map, within the available memory.

The classes of each page are reweighted by their estimated frequencies on that page
(`vispe.segment.classify.class_prior`): a page has the same label map alone and in a stack, provided the grey limits
are equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from vispe.errors import InputError, is_out_of_memory
from vispe.segment.classify.class_prior import area_estimate, areas, estimate
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.classify.probability_histogram import Counts, count
from vispe.segment.features.blend import Blend
from vispe.segment.features.filters.filters3d import Stack
from vispe.segment.features.pixel_features import BLOCK, Features
from vispe.segment.features.prepared_page import PreparedPage
from vispe.segment.features.sample_grid import FeatureGrid
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import Region, common
from vispe.segment.model.model_file import Model
from vispe.segment.model.piece_probabilities import piece_probabilities, piece_threads
from vispe.segment.model.post_processing import finalize, no_large_component
from vispe.segment.types import Areas, PostProcessing, Prediction

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Segmenter:
    """Segmentation of pages: a model, its features, and the post-processing."""

    model: Model
    features: Features
    post: PostProcessing = field(default_factory=PostProcessing)

    def page(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        step: Callable[[float], None] = lambda fraction: None,
        stack: Stack | None = None,
        number: int = 0,
    ) -> Prediction:
        """Segment one page (h, w, c) with valid pixels (h, w); for 3D filters it is page `number` of `stack`."""
        features = self.features if stack is None else self.features.within(stack, number)
        return predict_page(page, valid, features, self.model.classifier, self.post, step, self.model.domain)


def total_areas(results: Sequence[Prediction]) -> Areas | None:
    """Sum the areas of all pages; None without reweighting."""
    areas_of_pages = [r.areas for r in results if r.areas is not None]
    return sum(areas_of_pages[1:], areas_of_pages[0]) if areas_of_pages else None


def predict_page(
    page: np.ndarray,
    valid: np.ndarray,
    features: Features,
    classifier: PixelClassifier | PixelClusters,
    post: PostProcessing,
    step: Callable[[float], None],
    domain: FeatureDistribution | None = None,
) -> Prediction:
    """Segment one page.

    Args:
        page: (h, w, c) float32 grey levels in [0, 1].
        valid: (h, w) bool, pixels with data.
        features: feature extractor.
        classifier: fitted.
        post: post-processing.
        step: called with the fraction of the page that each piece covers.
        domain: reference for the out-of-distribution check; None skips the check.
    """
    prepared = features.prepare(page, valid)
    full_page = Region(0, valid.shape[0], 0, valid.shape[1])
    threads = piece_threads(features, classifier)
    numbers = range(len(prepared.pieces))
    feature_grid = None if domain is None else FeatureGrid.empty(full_page, domain)
    prob, blend = assemble(prepared, numbers, full_page, valid, classifier, threads, step, feature_grid)
    notes = prepared.notes
    # areas are estimated from the raw probabilities, before reweighting and smoothing
    page_areas = estimate_areas(count(prob)) if post.resolve_prior(classifier) != "uniform" else None
    grey = page.mean(-1) if post.clean else None
    labels, uncertainty, has_large_component = finalize(
        prob, valid, post, page_areas.priors[0] if page_areas is not None else None, grey
    )
    if not has_large_component:
        notes += (no_large_component(post),)
    overlap, disagreeing = (0, 0) if blend is None else (blend.overlap_pixels, blend.disagreeing_pixels)
    return Prediction(prob, labels, uncertainty, overlap, disagreeing, notes, page_areas, feature_grid)


def assemble(
    prepared: PreparedPage,
    numbers: Sequence[int],
    region: Region,
    valid: np.ndarray,
    classifier: PixelClassifier | PixelClusters,
    threads: int,
    step: Callable[[float], None],
    feature_grid: FeatureGrid | None = None,
) -> tuple[np.ndarray, Blend | None]:
    """Classify the pieces of a page and merge them, in page order.

    Args:
        prepared: the page.
        numbers: indices of the pieces that intersect the region.
        region: part of the page to compute.
        valid: (h, w) bool, the pixels of the complete page with data; only indexed.
        classifier: fitted.
        threads: number of pieces computed in parallel.
        step: called with the fraction that each piece covers.
        feature_grid: summary of the features of the region, updated in place.

    Returns:
        The probabilities (K, rows, columns) of the region, and the blend of overlapping pieces (None without overlap).
    """
    pieces, n_classes = prepared.pieces, classifier.n_classes
    blend = Blend(*region.shape, n_classes) if prepared.overlapping else None
    # pieces are blended if they overlap, and otherwise written directly, which needs no copy
    prob = np.empty((n_classes if blend is None else 0, *region.shape), np.float32)

    def work(index: int) -> tuple[np.ndarray, list[np.ndarray]]:
        number, codes = numbers[index], list[np.ndarray]()
        # pieces that are partly inside the region are computed completely, for bitwise equal results
        on_features = (
            None
            if feature_grid is None
            else lambda features: codes.append(feature_grid.domain.codes(features))
        )
        return piece_probabilities(
            prepared, number, valid[pieces[number].slices], classifier, on_features
        ), codes

    for number, (part, codes) in zip(numbers, in_order(work, len(numbers), threads), strict=True):
        # part of the piece inside the region, in coordinates of both
        inner, outer = common(pieces[number], region)
        if feature_grid is not None and codes:
            feature_grid.add(pieces[number], codes[0], prepared.weight(number))
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
        # the blend covers all pixels: reset those without data
        prob[:, ~valid[region.slices]] = 0
    if feature_grid is not None:
        feature_grid.forget(~valid[region.slices])
    return prob, blend


def estimate_areas(counts: Counts) -> Areas:
    """Estimate the class frequencies of a page, and the areas that follow."""
    prior = estimate(counts)
    unweighed, _ = areas(counts, np.full_like(prior, 1 / len(prior)))
    return Areas(*area_estimate(counts, prior), (prior,), unweighed)


def within_memory(features: Features, work: Callable[[], _T], note: Callable[[str], None]) -> _T:
    """Run `work`; when memory runs out, shrink the tiles of `features` and try again.

    Args:
        features: feature extractor that `work` uses.
        work: function that can be called repeatedly.
        note: called with each reduction.

    Raises:
        InputError: the smallest tile needs too much memory.
    """
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if torch.cuda.is_available():
                # release cached blocks, which are too small for the next attempt
                torch.cuda.empty_cache()
            reduction = features.shrink()
            if reduction is None:
                side = features.tile or BLOCK
                raise InputError(
                    f"out of memory even with tiles of {side} px on {features.device}. Split the image, or select "
                    "fewer pages with z."
                ) from error
            note(reduction)
