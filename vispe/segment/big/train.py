"""Training on scribbles of images larger than memory: only tiles with labelled pixels are read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.segment.big.engine import prepare_page
from vispe.segment.big.limits import Limits
from vispe.segment.big.page import LazyValid, Window
from vispe.segment.big.scribbles import Scribbles
from vispe.segment.big.source import BigImage
from vispe.segment.classify.calibrate import advice, calibrate, joined, strokes
from vispe.segment.classify.pixels import PixelClassifier, import_early
from vispe.segment.features.features import Features
from vispe.segment.features.tiles import Region
from vispe.segment.model.file import Model
from vispe.segment.run.report import Watcher


def train(
    images: Sequence[BigImage],
    labels: Sequence[Path],
    limits: Sequence[Sequence[Limits]],
    drawn: Sequence[Scribbles],
    names: tuple[str, ...],
    colors: tuple[tuple[int, int, int], ...] | None,
    features: Features,
    kind: str,
    normalize: str,
    clip: tuple[float, float],
    seed: int,
    watch: Watcher,
    notes: list[str],
) -> Model:
    """Fit one classifier to the labelled pixels of all images, as `vispe.segment.run.train` does.

    Args:
        images: labelled images, all with the same number of channels.
        labels: their label files.
        limits: grey limits of their pages.
        drawn: their labelled pixels.
        names: of the classes.
        colors: of the classes, or None.
        features: how features are computed.
        kind: of the classifier.
        normalize: how the limits were found.
        clip: likewise.
        seed: of all random numbers.
        watch: hears of progress.
        notes: what the user should know is added here.

    Raises:
        InputError: images that differ in their channels; no labelled pixel with data; fewer than two classes.
    """
    import_early(kind)
    channels = {image.channels for image in images}
    if len(channels) > 1:
        listed = ", ".join(f"{image.path.name}: {image.channels}" for image in images)
        raise InputError(f"labelled images differ in their channels ({listed}); choose some with --channel.")
    watch.start("computing features", len(images))
    found, classes, of = [], [], []
    for image, scribbles, cuts in zip(images, drawn, limits, strict=True):
        pixels, lost = image.shape[0] * image.shape[1], 0
        for page in range(image.n_pages):
            own = slice(*np.searchsorted(scribbles.places, (page * pixels, (page + 1) * pixels)))
            places, wanted = scribbles.places[own] - page * pixels, scribbles.classes[own]
            if len(places):
                window = Window(image, page, cuts[page])
                known = _with_data(LazyValid(window), places, image.chunk)
                lost += int((~known).sum())
                places, wanted = places[known], wanted[known]
            if len(places):
                found.append(prepare_page(features, window).gather_places(places))
                classes.append(wanted)
                of.append(strokes(places, wanted, image.shape))
        if lost:
            notes.append(f"{lost} labelled pixels of {image.path.name} hold no data and are not used.")
        watch.step(1)
    if not found:
        raise InputError("all labelled pixels hold no data; draw labels on pixels with data.")
    together = np.concatenate(classes)
    classifier = PixelClassifier(kind, len(names), seed=seed)
    gathered = np.concatenate(found)
    classifier.fit(gathered, together, names)
    calibration = calibrate(classifier, gathered, together, joined(of), seed, names)
    if said := advice(calibration):
        notes.append(said)
    counts = np.bincount(together, minlength=len(names) + 1)[1:]
    facts = {
        "images": [str(image.path) for image in images],
        "labels": [str(path) for path in labels],
        "labelled_pixels": {name: int(n) for name, n in zip(names, counts, strict=True)},
        "calibration": calibration,
    }
    return Model(
        *(
            features.config,
            classifier,
            names,
            colors,
            normalize,
            clip,
            channels.pop(),
            seed,
            features.basis,
            facts,
        )
    )


def _with_data(valid: LazyValid, places: np.ndarray, chunk: tuple[int, int]) -> np.ndarray:
    """Tell which places (n,) of a page hold data, reading the stored chunks that they lie in -> (n,) bool."""
    if valid.window.image.dtype.kind != "f":
        return np.ones(len(places), bool)
    height, width = valid.shape
    y, x = np.divmod(places, width)
    cells = y // chunk[0] * (-(-width // chunk[1])) + x // chunk[1]
    out = np.empty(len(places), bool)
    for cell in np.unique(cells):
        own = np.flatnonzero(cells == cell)
        top, left = int(y[own[0]]) // chunk[0] * chunk[0], int(x[own[0]]) // chunk[1] * chunk[1]
        region = Region(top, min(top + chunk[0], height), left, min(left + chunk[1], width))
        out[own] = valid[region.slices][y[own] - top, x[own] - left]
    return out
