"""Training of one model on the labelled pages of one or several images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vispe.errors import InputError
from vispe.segment.classify.calibration import concatenate_ids, label_scribbles
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.live.labelled_pages import LabelledPages, Pixels
from vispe.segment.model.model_file import Model
from vispe.segment.overlays import Color
from vispe.segment.run.out_of_distribution import pixel_size_range, summarize_pages
from vispe.segment.types import ReadOptions

Domains = dict[tuple[object, ...], FeatureDistribution | None]
"""At most one summary of the features of labelled pages, by what it depends on."""


def train_model(
    sessions: Sequence[LabelledPages],
    features: CachedFeatures,
    kind: str,
    names: tuple[str, ...],
    colors: tuple[Color, ...] | None,
    reading: ReadOptions,
    seed: int,
    domains: Domains,
    calibrated: bool = True,
) -> Model:
    """Train a model on all labels of several images.

    Args:
        sessions: the images, in their order.
        features: the extractor that they share.
        kind: kind of classifier.
        names: class names; further classes are named by their number.
        colors: (r, g, b) of the classes; None: the default palette.
        reading: normalisation of the images.
        seed: seed of all random numbers.
        domains: cached summary, updated in place.
        calibrated: calibrate the probabilities by cross-validation over scribbles.

    Raises:
        InputError: duplicate names, or fewer than 2 labelled classes.
    """
    channels = sessions[0].image.channels
    labelled = {session: pages for session in sessions if (pages := session.labelled())}
    class_parts = [page_classes for pages in labelled.values() for _, page_classes in pages.values()]
    classes = np.concatenate(class_parts) if class_parts else np.zeros(0, np.int64)
    count = max(len(names), int(classes.max(initial=0)))
    names += tuple(f"class {k + 1}" for k in range(len(names), count))
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(f"two classes are named {duplicates[0]!r}. Use distinct names.")
    if len(np.unique(classes)) < 2:
        # raises an error that lists the labelled classes
        PixelClassifier(kind, max(count, 2)).fit(np.zeros((len(classes), 1), np.float32), classes, names)
    scribble_ids = _scribble_ids(labelled) if calibrated else None
    classifier, facts = learn(
        kind,
        names,
        _gather_all(labelled, features),
        classes,
        scribble_ids,
        seed,
        features.filter_scale(channels),
    )
    pages = [(session, page) for session, pages in labelled.items() for page in pages]
    files = [str(session.image.path) for session in labelled]
    notes = {"images": files, "pages": [page for _, page in pages], **facts}
    pixel_size = pixel_size_range([session.image.pixel_size for session in labelled])
    if pixel_size is not None:
        notes["pixel_size_um"] = pixel_size
    return Model.of(
        features,
        reading,
        classifier=classifier,
        names=names,
        colors=None if colors is None or len(colors) < count else colors[:count],
        channels=channels,
        seed=seed,
        notes=notes,
        domain=_domain(pages, features, domains),
    )


def _scribble_ids(labelled: dict[LabelledPages, dict[int, Pixels]]) -> np.ndarray:
    """Return the scribble number (n,) of the labelled pixels of all images."""
    return concatenate_ids(
        [
            label_scribbles(indices, page_classes, session.image.shape)
            for session, pages in labelled.items()
            for indices, page_classes in pages.values()
        ]
    )


def _gather_all(labelled: dict[LabelledPages, dict[int, Pixels]], features: CachedFeatures) -> np.ndarray:
    """Return the features (n, f) of the labelled pixels of all images."""
    settings = features.tile, features.device
    gathered = [session.gather_labelled(pages) for session, pages in labelled.items()]
    # memory ran out in one session, which changes the features of all
    if (features.tile, features.device) != settings:
        return _gather_all(labelled, features)
    return np.concatenate(gathered)


def _domain(
    pages: Sequence[tuple[LabelledPages, int]], features: CachedFeatures, domains: Domains
) -> FeatureDistribution | None:
    """Summarise the features of the labelled pages; cached until the set of pages changes."""
    key = (*pages, features.tile, features.basis)
    if key in domains:
        return domains[key]

    def sample_page(session_page: tuple[LabelledPages, int], most: int) -> Sample | None:
        session, page = session_page
        grey, valid = session.normalized(page)
        return session.within(lambda: sample(features.prepare(grey, valid), valid, most))

    domain = summarize_pages(pages, sample_page)
    domains.clear()
    domains[key] = domain
    return domain
