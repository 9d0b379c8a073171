"""Training on scribbles of out-of-core images: only tiles with labelled pixels are read."""

import numpy as np

from vispe.errors import InputError
from vispe.segment.classify.calibration import calibration_note, concatenate_ids, label_scribbles
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.pixel_classifier import import_early
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.features.tiles import Region
from vispe.segment.model.model_file import Model
from vispe.segment.out_of_core.block_engine import prepare_page
from vispe.segment.out_of_core.image_source import OutOfCoreImage
from vispe.segment.out_of_core.intensity_limits import Limits
from vispe.segment.out_of_core.lazy_page import LazyValid, Window
from vispe.segment.out_of_core.scribbles import read_scribbles
from vispe.segment.out_of_core.store_run import OutOfCoreRun
from vispe.segment.run.out_of_distribution import summarize_pages
from vispe.segment.run.run_state import common_channel_count


def train(run: OutOfCoreRun, features: Features) -> Model:
    """Fit one classifier to the labelled pixels of all images, as `vispe.segment.run.train` does.

    Raises:
        InputError: images with different channels, no labelled pixel with data, or fewer than two classes.
    """
    request = run.request
    paths = [path for path in run.images if path in run.labels_of]
    files, images = [run.labels_of[path] for path in paths], [run.images[path] for path in paths]
    scribbles_of_images, names, colors, notes = read_scribbles(files, images, request.labelling)
    limits = [run.limits(path, run.reading)[0] for path in paths]
    import_early(request.classifier)
    channels = common_channel_count({image.path: image.channels for image in images}, "labelled images")
    run.watch.start("computing features", len(images))
    gathered, classes, scribble_ids = [], [], []
    labelled_pages: list[tuple[OutOfCoreImage, int, Limits]] = []
    for image, scribbles, grey_limits in zip(images, scribbles_of_images, limits, strict=True):
        pixels, n_without_data = image.shape[0] * image.shape[1], 0
        for page in range(image.n_pages):
            page_slice = slice(*np.searchsorted(scribbles.indices, (page * pixels, (page + 1) * pixels)))
            indices, page_classes = (
                scribbles.indices[page_slice] - page * pixels,
                scribbles.classes[page_slice],
            )
            if len(indices):
                window = Window(image, page, grey_limits[page])
                has_data = _with_data(LazyValid(window), indices, image.chunk)
                n_without_data += int((~has_data).sum())
                indices, page_classes = indices[has_data], page_classes[has_data]
            if len(indices):
                labelled_pages.append((image, page, grey_limits[page]))
                gathered.append(prepare_page(features, window).gather_indices(indices))
                classes.append(page_classes)
                scribble_ids.append(label_scribbles(indices, page_classes, image.shape))
        if n_without_data:
            notes.append(
                f"{n_without_data} labelled pixels of {image.path.name} have no data and are ignored."
            )
        run.watch.step(1)
    if not gathered:
        raise InputError("all labelled pixels have no data. Label pixels with data.")
    training_data = np.concatenate(gathered), np.concatenate(classes)
    scale = features.filter_scale(channels)
    classifier, facts = learn(
        request.classifier, names, *training_data, concatenate_ids(scribble_ids), request.seed, scale
    )
    if text := calibration_note(facts["calibration"]):
        notes.append(text)
    for text in notes:
        run.note(text)
    file_names = {"images": [str(image.path) for image in images], "labels": [str(path) for path in files]}
    fields = {"classifier": classifier, "names": names, "colors": colors, "channels": channels}

    def sample_page(page: tuple[OutOfCoreImage, int, Limits], most: int) -> Sample | None:
        window = Window(*page)
        return sample(prepare_page(features, window), LazyValid(window), most)

    fields |= {"domain": summarize_pages(labelled_pages, sample_page)}
    return Model.of(features, run.reading, **fields, seed=request.seed, notes={**file_names, **facts})


def _with_data(valid: LazyValid, indices: np.ndarray, chunk: tuple[int, int]) -> np.ndarray:
    """Return which pixels (n,) of a page have data, as (n,) bool, reading only the stored chunks that contain them."""
    if valid.window.image.dtype.kind != "f":
        return np.ones(len(indices), bool)
    height, width = valid.shape
    y, x = np.divmod(indices, width)
    chunk_ids = y // chunk[0] * (-(-width // chunk[1])) + x // chunk[1]
    out = np.empty(len(indices), bool)
    for chunk_id in np.unique(chunk_ids):
        in_chunk = np.flatnonzero(chunk_ids == chunk_id)
        top, left = int(y[in_chunk[0]]) // chunk[0] * chunk[0], int(x[in_chunk[0]]) // chunk[1] * chunk[1]
        region = Region(top, min(top + chunk[0], height), left, min(left + chunk[1], width))
        out[in_chunk] = valid[region.slices][y[in_chunk] - top, x[in_chunk] - left]
    return out
