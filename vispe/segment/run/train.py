"""Training: from labelled images to a classifier, or from unlabelled images to clusters."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.labels.label_files import Labels, read_label_set
from vispe.segment.classify.calibration import calibration_note, concatenate_ids, label_scribbles
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.clustering import SAMPLE, PixelClusters
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import import_early
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.model.model_file import Model
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.out_of_distribution import summarize_pages
from vispe.segment.run.prediction import within_memory
from vispe.segment.run.request import LabelOptions
from vispe.segment.run.run_state import common_channel_count

__all__ = ["LabelOptions", "read_training_labels", "train", "train_clusters"]


def train(run: Batch, features: Features) -> Model:
    """Fit one classifier to the labelled pixels of all images."""
    request = run.request
    import_early(request.classifier)
    labelled, labels, channels = read_training_labels(run)
    names = labels[0].names
    run.check_truth(names)
    masks = {i.path: i.label_data.values > 0 for i in labelled if i.label_data is not None}
    gathered, used_masks = _gather(run, features, labelled, masks)
    parts = [
        (i.label_data.values, used_masks[i.path])
        for i in labelled
        if i.label_data is not None and i.path in used_masks
    ]
    classes = np.concatenate([values[mask] for values, mask in parts])
    scribble_ids = concatenate_ids(
        [label_scribbles(np.flatnonzero(mask), values[mask], mask.shape[1:]) for values, mask in parts]
    )
    scale = features.filter_scale(channels)
    classifier, facts = learn(request.classifier, names, gathered, classes, scribble_ids, request.seed, scale)
    if text := calibration_note(facts["calibration"]):
        run.note(text)
    files = {"images": [str(i.path) for i in labelled], "labels": [str(i.labels) for i in labelled]}
    fields = {"classifier": classifier, "names": names, "colors": labels[0].colors, "channels": channels}
    fields |= {"domain": _domain(run, features, used_masks)}
    return Model.of(features, run.reading, **fields, seed=request.seed, notes={**files, **facts})


def read_training_labels(run: Batch) -> tuple[list[BatchImage], list[Labels], int]:
    """Read the labels of a run, with a common class numbering.

    Returns:
        The labelled images, their labels, and the number of channels of the images.

    Raises:
        InputError: no labelled image could be read, or the channels differ.
    """
    labelled = [image for image in run.images if image.labels is not None]
    run.watch.start("reading labels", len(labelled))
    labelled_images, shapes, frames, channels = [], [], [], {}
    for image, micrograph in run.each(labelled):
        labelled_images.append(image)
        shapes.append(micrograph.pages.shape[:3])
        frames.append(micrograph.frame)
        channels[image.path] = micrograph.channels
    if not labelled_images:
        raise InputError("no labelled image could be read. See the errors above.")
    count = common_channel_count(channels, "labelled images")
    files, images = [i.labels for i in labelled_images], [i.path for i in labelled_images]
    labels_of_images = read_label_set(
        files, shapes, **asdict(run.request.labelling), images=images, frames=frames
    )
    for image, labels in zip(labelled_images, labels_of_images, strict=True):
        image.label_data = labels
        for text in labels.notes:
            run.note(text)
    return labelled_images, labels_of_images, count


def train_clusters(run: Batch, features: Features, classifier: PixelClusters) -> Model:
    """Fit clusters to random pixels of all images, and note how their number was chosen."""
    run.check_truth(None)
    random = np.random.default_rng(run.request.seed)
    masks: dict[Path, np.ndarray] = {}
    channels: dict[Path, int] = {}
    run.watch.start("reading images", len(run.images))
    pixels_per_image = max(SAMPLE // len(run.images), 1)
    for image, micrograph in run.each(run.images):
        valid_indices = np.flatnonzero(micrograph.valid)
        mask = np.zeros(micrograph.valid.shape, bool)
        mask.ravel()[valid_indices[random.permutation(len(valid_indices))[:pixels_per_image]]] = True
        masks[image.path], channels[image.path] = mask, micrograph.channels
    if not masks:
        raise InputError("no image could be read. See the errors above.")
    count = common_channel_count(channels, "images")
    grey: list[np.ndarray] = []
    gathered, used_masks = _gather(run, features, list(run.images), masks, grey)
    classifier.fit(gathered, np.concatenate(grey))
    names = tuple(f"cluster {k + 1}" for k in range(classifier.n_classes))
    notes = {"images": [str(path) for path in masks], "sampled_pixels": len(gathered)}
    if text := classifier.note():
        run.note(text)
    fields = {"classifier": classifier, "names": names, "colors": None, "channels": count}
    fields |= {"domain": _domain(run, features, used_masks)}
    notes |= classifier.facts()
    return Model.of(features, run.reading, **fields, seed=run.request.seed, notes=notes)


def _gather(
    run: Batch,
    features: Features,
    images: list[BatchImage],
    masks: dict[Path, np.ndarray],
    grey: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[Path, np.ndarray]]:
    """Return the features (n, f) of the selected pixels of all images, and the masks without no-data pixels."""
    used_masks: dict[Path, np.ndarray] = {}
    run.watch.start("computing features", len(images))
    if features.learns:
        within_memory(features, lambda: features.fit(list(_chosen_pages(run, images, masks))), run.note)
    parts: list[np.ndarray] = []
    for image in images:
        grey_image = run.grey(image.path, features)
        valid = grey_image.image.valid
        mask = masks[image.path] & valid
        n_without_data = int(masks[image.path].sum() - mask.sum())
        if n_without_data:
            why = "".join(f" {text}" for text in grey_image.image.exclusions)
            run.note(
                f"{n_without_data} labelled pixels of {image.path.name} have no data and are ignored.{why}"
            )
        used_masks[image.path] = mask
        for number in np.flatnonzero(mask.any((1, 2))):
            page, selected = grey_image.pages[number], mask[number]

            def gathered(
                p=page, v=valid[number], w=selected, s=grey_image.stack, n=int(number)
            ) -> np.ndarray:
                return features.within(s, n).prepare(p, v).gather(w)

            parts.append(within_memory(features, gathered, run.note))
            if grey is not None:
                grey.append(page[selected].mean(-1))
        run.watch.step(1)
    if not parts:
        raise InputError("all labelled pixels have no data. Label pixels with data.")
    return np.concatenate(parts), used_masks


def _domain(run: Batch, features: Features, masks: dict[Path, np.ndarray]) -> FeatureDistribution | None:
    """Summarise the complete pages used for training, as reference for the out-of-distribution check."""
    pages = [(path, int(n)) for path, mask in masks.items() for n in np.flatnonzero(mask.any((1, 2)))]

    def sample_page(page: tuple[Path, int], most: int) -> Sample | None:
        grey_image, number = run.grey(page[0], features), page[1]
        valid = grey_image.image.valid[number]

        def work() -> Sample | None:
            return sample(
                features.within(grey_image.stack, number).prepare(grey_image.pages[number], valid),
                valid,
                most,
            )

        return within_memory(features, work, run.note)

    return summarize_pages(pages, sample_page)


def _chosen_pages(
    run: Batch, images: Iterable[BatchImage], masks: dict[Path, np.ndarray]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield each page with selected pixels, and its mask of pixels with data."""
    for image in images:
        grey_image = run.grey(image.path)
        for page, valid, selected in zip(
            grey_image.pages, grey_image.image.valid, masks[image.path], strict=True
        ):
            if selected.any():
                yield page, valid
