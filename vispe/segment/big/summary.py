"""What is said about a finished image: its record in the report, and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.write import write_png
from vispe.segment.big import stem, store
from vispe.segment.big.job import Job
from vispe.segment.big.source import BigImage
from vispe.segment.draw import overlay
from vispe.segment.features.tiles import Region
from vispe.segment.model.file import Model
from vispe.segment.run.predict import Areas
from vispe.segment.run.report import fractions, record_of


def summary(
    image: BigImage,
    model: Model,
    added: Mapping[str, Any],
    areas: Sequence[Areas] | None,
    data: int,
    labels: Path | None,
) -> dict[str, Any]:
    """Return the numbers of a record of the report, as of any other image.

    Args:
        image: the image.
        model: what it was segmented with.
        added: the sums of all chunks, from `vispe.segment.big.progress.sums`.
        areas: of each page; None where nothing was weighed.
        data: number of pixels with data.
        labels: the label file of the image.
    """
    total, together = int(added["counts"][1:].sum()), None if areas is None else sum(areas[1:], areas[0])
    return record_of(
        image,
        labels,
        fractions(added["counts"], together, model.names, model.classifier.kind),
        no_data=float(1 - data / (image.n_pages * image.shape[0] * image.shape[1])),
        uncertainty=added["unsure"] / total if total else 0.0,
        overlap=added["overlap"],
        disagreeing=added["disagreeing"],
    )


def draw(
    target: Path,
    image: BigImage,
    model: Model,
    job: Job,
    counts: np.ndarray,
    areas: Sequence[Areas] | None = None,
) -> None:
    """Draw the overlay of one page from reduced grey levels and every n-th label.

    Args:
        target: PNG file.
        image: the image.
        model: with names and colours of the classes.
        job: what was computed.
        counts: (K + 1,) pixels of each label in the whole image.
        areas: of each page; None where nothing was weighed.
    """
    import zarr

    work, step = Path(job.work), job.reduction
    picture = np.asarray(zarr.open_array(str(work / "picture"), mode="r")[:])
    array = zarr.open_group(str(work / "store"), mode="r")[f"labels/{store.LABELS}"]
    level = step.bit_length() - 1
    while str(level) not in array:
        level -= 1
    found = array[str(level)]
    whole = Region(0, found.shape[-2], 0, found.shape[-1])
    labels = np.asarray(found[store.place(image, job.picture, whole, False)])
    stride = step >> level
    name = stem(image.path)
    shown = counts if image.n_pages == 1 else None
    if areas is not None:
        page = areas[job.picture].pixels
        shown = np.append(image.shape[0] * image.shape[1] - round(page.sum()), page)
    drawn = overlay(
        picture,
        labels[::stride, ::stride],
        model.names,
        model.colors,
        pixel_size=image.pixel_size,
        title=name if image.n_pages == 1 else f"{name}, page {job.picture}",
        step=step,
        counts=shown,
    )
    write_png(target, drawn, True)
