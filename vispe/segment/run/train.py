"""Training: from labelled images to a classifier, or from unlabelled images to clusters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vispe.errors import InputError, counted
from vispe.segment.classify.calibration import calibration_note, concatenate_ids, label_scribbles
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.clustering import SAMPLE, PixelClusters
from vispe.segment.classify.estimators.threads import import_early
from vispe.segment.classify.feature_importance import feature_groups, feature_importance
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.model.model_file import Model
from vispe.segment.model.prediction import within_memory
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.inputs import BatchImage, common_channel_count
from vispe.segment.run.out_of_distribution import pixel_size_range, summarize_pages
from vispe.segment.run.run_state import Run


@dataclass(eq=False)
class _Pixels:
    """Training pixels with data, page by page."""

    features: list[np.ndarray] = field(default_factory=list)
    classes: list[np.ndarray] = field(default_factory=list)
    scribbles: list[np.ndarray] = field(default_factory=list)
    grey: list[np.ndarray] = field(default_factory=list)
    pages: list[tuple[BatchImage, int]] = field(default_factory=list)
    pixel_sizes: list[tuple[float, float] | None] = field(default_factory=list)


def train(run: Run, features: Features) -> Model:
    """Fit one classifier to the labelled pixels of all images.

    Raises:
        InputError: images with different channels, no labelled pixel with data, or fewer than two classes.
    """
    request = run.request
    import_early(request.classifier)
    labels = run.training_labels()
    run.check_truth(labels.names)
    pixels = _gather(run, features, labels.images, labels.indices, labels.classes)
    classes, scribbles = np.concatenate(pixels.classes), concatenate_ids(pixels.scribbles)
    gathered = np.concatenate(pixels.features)
    scale = features.filter_scale(labels.channels)
    classifier, facts = learn(
        request.classifier, labels.names, gathered, classes, scribbles, request.seed, scale
    )
    groups = feature_groups(features.filter_names(labels.channels), gathered.shape[1], features.config.model)
    facts["feature_importance"] = feature_importance(classifier, gathered, classes, groups, request.seed)
    if text := calibration_note(facts["calibration"]):
        run.note(text)
    images = labels.images
    files = {"images": [str(i.path) for i in images], "labels": [str(i.labels) for i in images]}
    fields = {"classifier": classifier, "names": labels.names, "colors": labels.colors}
    fields |= {"channels": labels.channels, "domain": _domain(run, features, pixels.pages)}
    return Model.of(
        features, run.reading, **fields, seed=request.seed, notes={**files, **facts, **_pixel_size(pixels)}
    )


def train_clusters(run: Batch, features: Features, classifier: PixelClusters) -> Model:
    """Fit clusters to random pixels of all images, and note how their number was chosen."""
    run.check_truth(None)
    random = np.random.default_rng(run.request.seed)
    images, indices, channels = [], [], {}
    run.watch.start("reading images", len(run.images))
    pixels_per_image = max(SAMPLE // len(run.images), 1)
    for image, micrograph in run.each(run.images):
        valid_indices = np.flatnonzero(micrograph.valid)
        images.append(image)
        indices.append(np.sort(valid_indices[random.permutation(len(valid_indices))[:pixels_per_image]]))
        channels[image.path] = micrograph.channels
    if not images:
        raise InputError("no image could be read. See the errors above.")
    count = common_channel_count(channels, "images")
    pixels = _gather(run, features, images, indices)
    gathered = np.concatenate(pixels.features)
    classifier.fit(gathered, np.concatenate(pixels.grey))
    names = tuple(f"cluster {k + 1}" for k in range(classifier.n_classes))
    notes = {"images": [str(image.path) for image in images], "sampled_pixels": len(gathered)}
    if text := classifier.note():
        run.note(text)
    fields = {"classifier": classifier, "names": names, "colors": None, "channels": count}
    fields |= {"domain": _domain(run, features, pixels.pages)}
    notes |= classifier.facts() | _pixel_size(pixels)
    return Model.of(features, run.reading, **fields, seed=run.request.seed, notes=notes)


def _gather(
    run: Run,
    features: Features,
    images: Sequence[BatchImage],
    indices: Sequence[np.ndarray],
    classes: Sequence[np.ndarray] | None = None,
) -> _Pixels:
    """Compute the features of selected pixels.

    Args:
        run: the run.
        features: feature extractor; it is fitted to the pages with selected pixels if it has parameters.
        images: images with selected pixels.
        indices: flat indices (n,) of the selected pixels of each image, ascending.
        classes: classes (n,) of these pixels; None for clusters, which need their grey levels instead.
    """
    out = _Pixels()
    run.watch.start("computing features", len(images))
    if features.learns:
        within_memory(features, lambda: features.fit(list(_pages(run, images, indices))), run.note)
    for position, image in enumerate(images):
        pages = run.pages(image, features)
        out.pixel_sizes.append(pages.image.pixel_size)
        n_without_data = 0
        for number, start, stop in _page_ranges(indices[position], pages.shape):
            selected = indices[position][start:stop] - number * pages.shape[0] * pages.shape[1]
            have_data = pages.have_data(number, selected)
            n_without_data += int((~have_data).sum())
            selected = selected[have_data]
            if not len(selected):
                continue
            page, valid = pages.page(number)

            def gathered(p=page, v=valid, i=selected, s=pages.stack, n=number) -> np.ndarray:
                return features.within(s, n).prepare(p, v).gather_indices(i)

            out.pages.append((image, number))
            out.features.append(within_memory(features, gathered, run.note))
            if classes is None:
                out.grey.append(page.reshape(-1, page.shape[-1])[selected].mean(-1))
            else:
                out.classes.append(classes[position][start:stop][have_data])
                out.scribbles.append(label_scribbles(selected, out.classes[-1], pages.shape))
        if n_without_data:
            why = "".join(f" {text}" for text in pages.exclusions)
            verbs = "has no data and is" if n_without_data == 1 else "have no data and are"
            run.note(
                f"{counted(n_without_data, 'labelled pixel')} of {image.path.name} {verbs} ignored.{why}"
            )
        run.watch.step(1)
    if not out.features:
        raise InputError("all labelled pixels have no data. Label pixels with data.")
    return out


def _pixel_size(pixels: _Pixels) -> dict[str, list[float]]:
    """Return the range of pixel sizes as metadata of the model, if it is known for every training image."""
    size = pixel_size_range(pixels.pixel_sizes)
    return {} if size is None else {"pixel_size_um": size}


def _page_ranges(indices: np.ndarray, shape: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield each page with pixels, and the range of its pixels in ascending flat indices (n,)."""
    of_page = indices // (shape[0] * shape[1])
    numbers, starts = np.unique(of_page, return_index=True)
    stops = [*starts[1:], len(indices)]
    yield from zip(numbers.tolist(), starts.tolist(), map(int, stops), strict=True)


def _pages(
    run: Run, images: Sequence[BatchImage], indices: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each page with selected pixels, and its mask of pixels with data."""
    for image, selected in zip(images, indices, strict=True):
        pages = run.pages(image, None)
        for number, *_ in _page_ranges(selected, pages.shape):
            yield pages.page(number)


def _domain(
    run: Run, features: Features, training_pages: Sequence[tuple[BatchImage, int]]
) -> FeatureDistribution | None:
    """Summarise the complete pages used for training, as reference for the out-of-distribution check."""

    def sample_page(training_page: tuple[BatchImage, int], most: int) -> Sample | None:
        image, number = training_page
        pages = run.pages(image, features)
        page, valid = pages.page(number)
        within = features.within(pages.stack, number)
        return within_memory(features, lambda: sample(within.prepare(page, valid), valid, most), run.note)

    return summarize_pages(training_pages, sample_page)
