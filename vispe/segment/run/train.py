"""Training: from labelled images to a classifier, or from unlabelled ones to clusters."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.labels.label_files import Labels, read_label_set
from vispe.segment.classify.calibration import advice, joined, strokes
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.clustering import SAMPLE, PixelClusters
from vispe.segment.classify.out_of_distribution import Domain
from vispe.segment.classify.pixel_classifier import import_early
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.model.model_file import Model
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.out_of_distribution import learn_pages
from vispe.segment.run.prediction import within_memory
from vispe.segment.run.request import Labelling
from vispe.segment.run.run_state import one_channel_count

__all__ = ["Labelling", "read_drawn", "train", "train_clusters"]


def train(run: Batch, features: Features) -> Model:
    """Fit one classifier to the labelled pixels of all images."""
    asked = run.asked
    import_early(asked.classifier)
    taught, drawn, channels = read_drawn(run)
    names = drawn[0].names
    run.check_truth(names)
    masks = {i.path: i.drawn.values > 0 for i in taught if i.drawn is not None}
    gathered, where = _gather(run, features, taught, masks)
    parts = [(i.drawn.values, where[i.path]) for i in taught if i.drawn is not None and i.path in where]
    classes = np.concatenate([values[mask] for values, mask in parts])
    of = joined([strokes(np.flatnonzero(mask), values[mask], mask.shape[1:]) for values, mask in parts])
    classifier, facts = learn(asked.classifier, names, gathered, classes, of, asked.seed)
    if text := advice(facts["calibration"]):
        run.note(text)
    files = {"images": [str(i.path) for i in taught], "labels": [str(i.labels) for i in taught]}
    learnt = {"classifier": classifier, "names": names, "colors": drawn[0].colors, "channels": channels}
    learnt |= {"domain": _domain(run, features, where)}
    return Model.of(features, run.reading, **learnt, seed=asked.seed, notes={**files, **facts})


def read_drawn(run: Batch) -> tuple[list[BatchImage], list[Labels], int]:
    """Read the labels of a run, with one numbering of the classes.

    Returns:
        The images that have labels, these labels, and the number of channels that the images have.
    """
    labelled = [image for image in run.images if image.labels is not None]
    run.watch.start("reading labels", len(labelled))
    taught, shapes, frames, channels = [], [], [], {}
    for image, micrograph in run.each(labelled):
        taught.append(image)
        shapes.append(micrograph.pages.shape[:3])
        frames.append(micrograph.frame)
        channels[image.path] = micrograph.channels
    if not taught:
        raise InputError("no labelled image could be read; see the reasons above.")
    count = one_channel_count(channels, "labelled images")
    files, images = [i.labels for i in taught], [i.path for i in taught]
    drawn = read_label_set(files, shapes, **asdict(run.asked.labelling), images=images, frames=frames)
    for image, labels in zip(taught, drawn, strict=True):
        image.drawn = labels
        for text in labels.notes:
            run.note(text)
    return taught, drawn, count


def train_clusters(run: Batch, features: Features, classifier: PixelClusters) -> Model:
    """Fit clusters to pixels drawn at random from all images, and say what their user should know."""
    run.check_truth(None)
    random = np.random.default_rng(run.asked.seed)
    masks: dict[Path, np.ndarray] = {}
    channels: dict[Path, int] = {}
    run.watch.start("reading images", len(run.images))
    share = max(SAMPLE // len(run.images), 1)
    for image, micrograph in run.each(run.images):
        places = np.flatnonzero(micrograph.valid)
        mask = np.zeros(micrograph.valid.shape, bool)
        mask.ravel()[places[random.permutation(len(places))[:share]]] = True
        masks[image.path], channels[image.path] = mask, micrograph.channels
    if not masks:
        raise InputError("no image could be read; see the reasons above.")
    count = one_channel_count(channels, "images")
    grey: list[np.ndarray] = []
    gathered, where = _gather(run, features, list(run.images), masks, grey)
    classifier.fit(gathered, np.concatenate(grey))
    names = tuple(f"cluster {k + 1}" for k in range(classifier.n_classes))
    notes = {"images": [str(path) for path in masks], "sampled_pixels": len(gathered)}
    if text := classifier.note():
        run.note(text)
    learnt = {"classifier": classifier, "names": names, "colors": None, "channels": count}
    learnt |= {"domain": _domain(run, features, where)}
    notes |= classifier.facts()
    return Model.of(features, run.reading, **learnt, seed=run.asked.seed, notes=notes)


def _gather(
    run: Batch,
    features: Features,
    images: list[BatchImage],
    masks: dict[Path, np.ndarray],
    grey: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[Path, np.ndarray]]:
    """Collect the features (n, f) of the chosen pixels of all images, and the masks without no-data pixels."""
    kept: dict[Path, np.ndarray] = {}
    run.watch.start("computing features", len(images))
    if features.learns:
        within_memory(features, lambda: features.fit(list(_chosen_pages(run, images, masks))), run.note)
    parts: list[np.ndarray] = []
    for image in images:
        shown = run.grey(image.path, features)
        valid = shown.image.valid
        mask = masks[image.path] & valid
        lost = int(masks[image.path].sum() - mask.sum())
        if lost:
            why = "".join(f" {text}" for text in shown.image.exclusions)
            run.note(f"{lost} labelled pixels of {image.path.name} hold no data and are not used.{why}")
        kept[image.path] = mask
        for number in np.flatnonzero(mask.any((1, 2))):
            page, wanted = shown.pages[number], mask[number]

            def gathered(p=page, v=valid[number], w=wanted, s=shown.stack, n=int(number)) -> np.ndarray:
                return features.within(s, n).prepare(p, v).gather(w)

            parts.append(within_memory(features, gathered, run.note))
            if grey is not None:
                grey.append(page[wanted].mean(-1))
        run.watch.step(1)
    if not parts:
        raise InputError("all labelled pixels hold no data; draw labels on pixels with data.")
    return np.concatenate(parts), kept


def _domain(run: Batch, features: Features, masks: dict[Path, np.ndarray]) -> Domain | None:
    """Summarise what the whole pages that were learnt from look like."""
    pages = [(path, int(n)) for path, mask in masks.items() for n in np.flatnonzero(mask.any((1, 2)))]

    def one(page: tuple[Path, int], most: int) -> Sample | None:
        shown, number = run.grey(page[0], features), page[1]
        valid = shown.image.valid[number]

        def work() -> Sample | None:
            return sample(
                features.within(shown.stack, number).prepare(shown.pages[number], valid), valid, most
            )

        return within_memory(features, work, run.note)

    return learn_pages(pages, one)


def _chosen_pages(
    run: Batch, images: Iterable[BatchImage], masks: dict[Path, np.ndarray]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield each page that has chosen pixels, with its pixels that hold data."""
    for image in images:
        shown = run.grey(image.path)
        for page, valid, wanted in zip(shown.pages, shown.image.valid, masks[image.path], strict=True):
            if wanted.any():
                yield page, valid
