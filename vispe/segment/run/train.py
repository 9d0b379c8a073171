"""Training: from labelled images to a classifier, or from unlabelled ones to clusters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, VispeError
from vispe.images.labels.read import Labels, read_label_set
from vispe.segment.classify.calibrate import advice, calibrate, joined, strokes
from vispe.segment.classify.cluster import SAMPLE, PixelClusters
from vispe.segment.classify.pixels import PixelClassifier, import_early
from vispe.segment.model.file import Model
from vispe.segment.run.batch import Batch
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.predict import within_memory


@dataclass(frozen=True)
class Labelling:
    """How label files are read; see `read_labels` in `vispe.images.labels.read`."""

    classes: Sequence[str] | None = None
    legend: str | Path | None = None
    dense: bool = False
    max_classes: int = 20
    label_page: int | None = None


def train(run: Batch, how: Labelling, kind: str, seed: int) -> Model:
    """Fit one classifier to the labelled pixels of all images."""
    import_early(kind)
    taught, drawn, channels = read_drawn(run, how)
    run.check_truth(len(drawn[0].names))
    masks = {i.path: i.drawn.values > 0 for i in taught if i.drawn is not None}
    found, where = _gather(run, taught, masks)
    parts = [(i.drawn.values, where[i.path]) for i in taught if i.drawn is not None and i.path in where]
    classes = np.concatenate([values[mask] for values, mask in parts])
    of = joined([strokes(np.flatnonzero(mask), values[mask], mask.shape[1:]) for values, mask in parts])
    names = drawn[0].names
    classifier = PixelClassifier(kind, len(names), seed=seed)
    classifier.fit(found, classes, names)
    calibration = calibrate(classifier, found, classes, of, seed, names)
    if said := advice(calibration):
        run.note(said)
    counts = np.bincount(classes, minlength=len(names) + 1)[1:]
    notes = {
        "images": [str(i.path) for i in taught],
        "labels": [str(i.labels) for i in taught],
        "labelled_pixels": {name: int(n) for name, n in zip(names, counts, strict=True)},
        "calibration": calibration,
    }
    return _model(run, classifier, names, drawn[0].colors, channels, seed, notes)


def read_drawn(run: Batch, how: Labelling) -> tuple[list[BatchImage], list[Labels], int]:
    """Read the labels of a run, with one numbering of the classes.

    Returns:
        The images that have labels, these labels, and the number of channels that the images have.
    """
    run.watch.start("reading labels", sum(i.labels is not None for i in run.images))
    shapes: dict[Path, tuple[int, int, int]] = {}
    channels: dict[Path, int] = {}
    for image in [i for i in run.images if i.labels is not None]:
        try:
            micrograph = run.read(image.path)
        except (VispeError, OSError) as error:
            run.fail(image, error)
            continue
        shapes[image.path], channels[image.path] = micrograph.pages.shape[:3], micrograph.channels
        run.watch.step(1)
    taught = [i for i in run.images if i.labels is not None]
    if not taught:
        raise InputError("no labelled image could be read; see the reasons above.")
    if len(set(channels.values())) > 1:
        listed = ", ".join(f"{path.name}: {count}" for path, count in channels.items())
        raise InputError(f"labelled images differ in their channels ({listed}); choose some with --channel.")
    drawn = read_label_set(
        [i.labels for i in taught],
        [shapes[i.path] for i in taught],
        classes=how.classes,
        legend=how.legend,
        dense=how.dense,
        max_classes=how.max_classes,
        label_page=how.label_page,
    )
    for image, labels in zip(taught, drawn, strict=True):
        image.drawn = labels
        for text in labels.notes:
            run.note(text)
    return taught, drawn, next(iter(channels.values()))


def train_clusters(run: Batch, classifier: PixelClusters, seed: int) -> Model:
    """Fit clusters to pixels drawn at random from all images."""
    run.check_truth(None)
    random = np.random.default_rng(seed)
    masks: dict[Path, np.ndarray] = {}
    channels: dict[Path, int] = {}
    run.watch.start("reading images", len(run.images))
    share = max(SAMPLE // len(run.images), 1)
    for image in list(run.images):
        try:
            micrograph = run.read(image.path)
        except (VispeError, OSError) as error:
            run.fail(image, error)
            continue
        places = np.flatnonzero(micrograph.valid)
        mask = np.zeros(micrograph.valid.shape, bool)
        mask.ravel()[places[random.permutation(len(places))[:share]]] = True
        masks[image.path], channels[image.path] = mask, micrograph.channels
        run.watch.step(1)
    if not masks:
        raise InputError("no image could be read; see the reasons above.")
    if len(set(channels.values())) > 1:
        listed = ", ".join(f"{path.name}: {count}" for path, count in channels.items())
        raise InputError(f"images differ in their channels ({listed}); choose some with --channel.")
    grey: list[np.ndarray] = []
    found, _ = _gather(run, list(run.images), masks, grey)
    classifier.fit(found, np.concatenate(grey))
    names = tuple(f"cluster {k + 1}" for k in range(classifier.n_classes))
    notes = {"images": [str(p) for p in masks], "sampled_pixels": len(found)}
    return _model(run, classifier, names, None, next(iter(channels.values())), seed, notes)


def _gather(
    run: Batch,
    images: Iterable[BatchImage],
    masks: dict[Path, np.ndarray],
    grey: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[Path, np.ndarray]]:
    """Collect the features (n, f) of the chosen pixels of all images, and the masks without no-data pixels."""
    images = list(images)
    chosen: dict[Path, np.ndarray] = {}
    run.watch.start("computing features", len(images))
    if run.features.learns:
        within_memory(
            run.features, lambda: run.features.fit(list(_chosen_pages(run, images, masks))), run.note
        )
    parts: list[np.ndarray] = []
    for image in images:
        micrograph = run.read(image.path)
        pages, _ = run.pages(micrograph)
        stack = run.stack(micrograph, pages)
        mask = masks[image.path] & micrograph.valid
        lost = int(masks[image.path].sum() - mask.sum())
        if lost:
            run.note(f"{lost} labelled pixels of {image.path.name} hold no data and are not used.")
        chosen[image.path] = mask
        for number, (page, valid, wanted) in enumerate(zip(pages, micrograph.valid, mask, strict=True)):
            if wanted.any():
                parts.append(
                    within_memory(
                        run.features,
                        lambda p=page, v=valid, w=wanted, s=stack, n=number: (
                            run.features.within(s, n).prepare(p, v).gather(w)
                        ),
                        run.note,
                    )
                )
                if grey is not None:
                    grey.append(page[wanted].mean(-1))
        run.watch.step(1)
    if not parts:
        raise InputError("all labelled pixels hold no data; draw labels on pixels with data.")
    return np.concatenate(parts), chosen


def _chosen_pages(
    run: Batch, images: Iterable[BatchImage], masks: dict[Path, np.ndarray]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield each page that has chosen pixels, with its pixels that hold data."""
    for image in images:
        micrograph = run.read(image.path)
        pages, _ = run.pages(micrograph)
        for page, valid, wanted in zip(pages, micrograph.valid, masks[image.path], strict=True):
            if wanted.any():
                yield page, valid


def _model(
    run: Batch,
    classifier: PixelClassifier | PixelClusters,
    names: tuple[str, ...],
    colors: tuple[tuple[int, int, int], ...] | None,
    channels: int,
    seed: int,
    notes: dict[str, Any],
) -> Model:
    return Model(
        features=run.features.config,
        classifier=classifier,
        names=names,
        colors=colors,
        normalize=run.reading.normalize,
        clip=run.reading.clip,
        channels=channels,
        seed=seed,
        basis=run.features.basis,
        notes=notes,
    )
