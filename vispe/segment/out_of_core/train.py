"""Training on scribbles of images larger than memory: only tiles with labelled pixels are read."""

import numpy as np

from vispe.errors import InputError
from vispe.segment.classify.calibration import advice, joined, strokes
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.pixel_classifier import import_early
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.features.tiles import Region
from vispe.segment.model.model_file import Model
from vispe.segment.out_of_core.block_engine import prepare_page
from vispe.segment.out_of_core.image_source import BigImage
from vispe.segment.out_of_core.intensity_limits import Limits
from vispe.segment.out_of_core.lazy_page import LazyValid, Window
from vispe.segment.out_of_core.scribbles import read_scribbles
from vispe.segment.out_of_core.store_run import BigRun
from vispe.segment.run.out_of_distribution import learn_pages
from vispe.segment.run.run_state import one_channel_count


def train(run: BigRun, features: Features) -> Model:
    """Fit one classifier to the labelled pixels of all images, as `vispe.segment.run.train` does.

    Raises:
        InputError: images that differ in their channels; no labelled pixel with data; fewer than two classes.
    """
    asked = run.asked
    paths = [path for path in run.images if path in run.labels_of]
    files, images = [run.labels_of[path] for path in paths], [run.images[path] for path in paths]
    drawn, names, colors, notes = read_scribbles(files, images, asked.labelling)
    limits = [run.limits(path, run.reading)[0] for path in paths]
    import_early(asked.classifier)
    channels = one_channel_count({image.path: image.channels for image in images}, "labelled images")
    run.watch.start("computing features", len(images))
    gathered, classes, of = [], [], []
    seen: list[tuple[BigImage, int, Limits]] = []
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
                seen.append((image, page, cuts[page]))
                gathered.append(prepare_page(features, window).gather_places(places))
                classes.append(wanted)
                of.append(strokes(places, wanted, image.shape))
        if lost:
            notes.append(f"{lost} labelled pixels of {image.path.name} hold no data and are not used.")
        run.watch.step(1)
    if not gathered:
        raise InputError("all labelled pixels hold no data; draw labels on pixels with data.")
    together = np.concatenate(gathered), np.concatenate(classes)
    classifier, facts = learn(asked.classifier, names, *together, joined(of), asked.seed)
    if text := advice(facts["calibration"]):
        notes.append(text)
    for text in notes:
        run.note(text)
    named = {"images": [str(image.path) for image in images], "labels": [str(path) for path in files]}
    learnt = {"classifier": classifier, "names": names, "colors": colors, "channels": channels}

    def one(page: tuple[BigImage, int, Limits], most: int) -> Sample | None:
        window = Window(*page)
        return sample(prepare_page(features, window), LazyValid(window), most)

    learnt |= {"domain": learn_pages(seen, one)}
    return Model.of(features, run.reading, **learnt, seed=asked.seed, notes={**named, **facts})


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
