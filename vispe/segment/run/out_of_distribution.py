"""Out-of-distribution check of a run: a summary of the training images, and a score for each image."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import counted
from vispe.images.read import Micrograph
from vispe.images.write import write_png
from vispe.segment.classify.out_of_distribution import FeatureDistribution, fit_distribution
from vispe.segment.features.sample_grid import PAGES, PATCH, PIECES, Sample
from vispe.segment.model.model_file import Model
from vispe.segment.types import Prediction

MAP = "_domain.png"

_RATIO = 1.3  # ratio of pixel sizes above which structures look different to the features


def summarize_pages(
    pages: Sequence[Any], samples: Callable[[Any, int], Sample | None]
) -> FeatureDistribution | None:
    """Summarise training pages: all pieces of a few pages, or some pieces of many.

    Args:
        pages: arguments of `samples`.
        samples: function that samples a page at up to a number of its pieces.
    """
    from threadpoolctl import threadpool_limits

    chosen = np.unique(np.linspace(0, len(pages) - 1, min(len(pages), PAGES)).round().astype(int)).tolist()
    most = max(PIECES // max(len(chosen), 1), 1)
    page_samples = [samples(pages[number], most) for number in chosen]
    # matrices have a few dozen columns: with more threads, synchronisation takes longer than the work
    with threadpool_limits(1):
        return fit_distribution([page_sample for page_sample in page_samples if page_sample is not None])


def compare_with_training(
    folder: Path, image: Micrograph, results: Sequence[Prediction], model: Model, force: bool
) -> tuple[dict[str, Any] | None, dict[str, Path], list[str]]:
    """Compare an image with the training images of a model, by its features and its pixel size.

    Args:
        folder: destination of the map, which is written if the image differs.
        image: the image.
        results: results of its pages.
        model: the model.
        force: overwrite.

    Returns:
        The out-of-distribution record of the image, the map file by kind, and notes.
    """
    name, grids = image.path.name, [r.feature_grid for r in results]
    record = ood_record(model, [None if grid is None else grid.sums() for grid in grids])
    files = {}
    if record is not None and record["differs"]:
        files["domain"] = write_ood_map(folder, image.path, image, grids, record, force)
    shown = files["domain"].name if files else None
    notes = ood_warning(name, record, shown) + pixel_size_warning(name, model, image.pixel_size)
    return record, files, notes


def ood_record(model: Model, sums: Sequence[np.ndarray | None]) -> dict[str, Any] | None:
    """Return the out-of-distribution record of an image from the sums of its pages; None without a reference.

    Returns:
        'score': the largest score of the pages, with limit 1; 'differs': whether it exceeds 1; 'pages': the
        score of each, None for a page without data.
    """
    if model.domain is None or any(page_sums is None for page_sums in sums):
        return None
    scores = [model.domain.score(page_sums) for page_sums in sums if page_sums is not None]
    known = [score for score in scores if score is not None]
    if not known:
        return None
    return {"score": max(known), "differs": max(known) > 1, "pages": scores}


def ood_warning(name: str, record: dict[str, Any] | None, shown: str | None) -> list[str]:
    """Return a note about an image that differs from the training images.

    Args:
        name: name of the image.
        record: its out-of-distribution record.
        shown: name of the map file; None without one.
    """
    if record is None or not record["differs"]:
        return []
    flagged = [n for n, score in enumerate(record["pages"]) if score is not None and score > 1]
    what = f"{name} differs"
    if len(record["pages"]) > 1:
        listed = ", ".join(map(str, flagged[:5])) + (", ..." if len(flagged) > 5 else "")
        what = f"{len(flagged)} of the {counted(len(record['pages']), 'page')} of {name} (from 0: {listed}) differ"
    hint = "no map is available for images processed in blocks" if shown is None else f"see {shown}"
    return [
        f"{what} from the training images: score {record['score']:.2g}, limit 1 ({hint}). Its classes may be wrong. "
        "Check the overlay, add a few scribbles to this image, and train again with all of them."
    ]


def pixel_size_range(sizes: Sequence[tuple[float, float] | None]) -> list[float] | None:
    """Return the smallest and the largest pixel size of images in microns; None if one is unknown.

    The size of a pixel (y, x) is the side of a square of equal area.
    """
    sides = [None if size is None else math.sqrt(size[0] * size[1]) for size in sizes]
    known = [side for side in sides if side is not None]
    return [min(known), max(known)] if known and len(known) == len(sides) else None


def pixel_size_warning(name: str, model: Model, pixel_size: tuple[float, float] | None) -> list[str]:
    """Return a note about an image whose pixel size differs from that of the training images.

    Args:
        name: name of the image.
        model: the model; its notes contain the range of `pixel_size_range`, if known.
        pixel_size: microns per pixel (y, x) of the image, or None if unknown.
    """
    trained = model.notes.get("pixel_size_um")
    size = pixel_size_range([pixel_size])
    if size is None or not _is_range(trained) or trained[0] / _RATIO <= size[0] <= trained[1] * _RATIO:
        return []
    first, last = (f"{side:.3g}" for side in trained)
    of_training = first if first == last else f"{first} to {last}"
    return [
        f"{name} has pixels of {size[0]:.3g} microns, the training images of {of_training} microns. Features are "
        "computed in pixels, so its classes may be wrong. Rescale the image to the pixel size of the training images, "
        "or add scribbles to it and train again."
    ]


def _is_range(value: object) -> bool:
    """Return whether the entry of a model file is a pair of positive numbers in ascending order."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int | float) for v in value):
        return False
    return 0 < value[0] <= value[1] < math.inf


def write_ood_map(
    folder: Path,
    path: Path,
    micrograph: Micrograph,
    feature_grids: Sequence[Any],
    record: dict[str, Any],
    force: bool,
) -> Path:
    """Write the map of the most deviating page, 8 bit: 128 is the limit of a patch, 255 twice the limit or more.

    Args:
        folder: destination.
        path: image file, for the name.
        micrograph: the image.
        feature_grids: summary of the features of each page.
        record: out-of-distribution record of the image.
        force: overwrite.
    """
    scores = [-1.0 if score is None else score for score in record["pages"]]
    score_map = feature_grids[int(np.argmax(scores))].map()
    grey = np.rint(np.clip(np.nan_to_num(score_map), 0, 2) * 127.5).astype(np.uint8)
    height, width = micrograph.pages.shape[1:3]
    # pixels beyond the last grid point belong to the last patch
    rows, columns = (
        np.minimum(np.arange(n) // PATCH, m - 1) for n, m in zip((height, width), grey.shape, strict=True)
    )
    target = folder / f"{path.stem}{MAP}"
    write_png(target, grey[np.ix_(rows, columns)], force, micrograph=micrograph)
    return target
