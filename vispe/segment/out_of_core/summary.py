"""What is said about a finished image: its record in the report, its picture, and its objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.files import remove
from vispe.images.write import write_png
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.model.model_file import Model
from vispe.segment.objects.object_files import notes, pages_together, spacing_of, write_table
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.out_of_core_objects import Source, find_in_blocks
from vispe.segment.objects.sizes import of_image
from vispe.segment.out_of_core import stem, zarr_store
from vispe.segment.out_of_core.image_source import BigImage
from vispe.segment.out_of_core.job import Job
from vispe.segment.overlays import overlay
from vispe.segment.run.prediction import Areas
from vispe.segment.run.run_report import fractions, record_of

_BYTES = 80  # per pixel of a block that is labelled, roughly


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
        added: the sums of all chunks, from `vispe.segment.out_of_core.progress.sums`.
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
) -> None:
    """Draw the overlay of one page from reduced grey levels and every n-th label.

    Args:
        target: PNG file.
        image: the image.
        model: with names and colours of the classes.
        job: what was computed.
        counts: (K + 1,) pixels of each label on the page that is drawn.
    """
    import zarr

    work, step = Path(job.work), job.reduction
    picture = np.asarray(zarr.open_array(str(work / "picture"), mode="r")[:])
    array = zarr.open_group(str(work / "store"), mode="r")[f"labels/{zarr_store.LABELS}"]
    level = step.bit_length() - 1
    while str(level) not in array:
        level -= 1
    found = array[str(level)]
    whole = Region(0, found.shape[-2], 0, found.shape[-1])
    labels = np.asarray(found[zarr_store.place(image, job.picture, whole, False)])
    stride = step >> level
    name = stem(image.path)
    drawn = overlay(
        picture,
        labels[::stride, ::stride],
        model.names,
        model.colors,
        pixel_size=image.pixel_size,
        title=name if image.n_pages == 1 else f"{name}, page {job.picture}",
        step=step,
        counts=counts,
    )
    write_png(target, drawn, True)


def objects_of_store(
    image: BigImage, job: Job, model: Model, options: ObjectOptions, memory: int, data: int, table: Path
) -> tuple[dict[str, Any], list[str]]:
    """Find the objects of a settled result, and write them: labels in the store, and the table.

    Args:
        image: the image.
        job: what was computed.
        model: with the names of the classes.
        options: what counts.
        memory: bytes that may be used.
        data: number of pixels with data.
        table: CSV file; one that is there is replaced.

    Returns:
        What the report says, and notes.

    Raises:
        InputError: a patch that is larger than memory.
    """
    import zarr

    work, shape = Path(job.work), (image.n_pages, *image.shape)
    root = zarr.open_group(str(work / "store"), mode="r+")
    classes, out = root[f"labels/{zarr_store.LABELS}/0"], zarr_store.create_objects(root, image, job.chunk)
    chunks = (1, job.chunk, job.chunk)
    marks = zarr.create_array(
        store=str(work / "marks"), shape=shape, chunks=chunks, dtype=np.int64, fill_value=0, overwrite=True
    )

    def prob(page: int, region: Region, number: int) -> np.ndarray:
        return np.asarray(root["0"][zarr_store.place(image, page, region, number - 1)])

    def paint(page: int, region: Region, mask: np.ndarray, number: int) -> None:
        place = zarr_store.place(image, page, region, False)
        found = np.asarray(out[place])
        found[mask] = number
        out[place] = found

    def read(page: int, region: Region) -> np.ndarray:
        return np.asarray(classes[zarr_store.place(image, page, region, False)])

    source = Source(shape, read, prob, image.read, marks, paint)
    volumes = pages_together(image.axis_lengths)
    spacing = spacing_of(image.pixel_size, image.z_step, volumes)
    # whole chunks, as large as memory allows
    side = max(int((memory / _BYTES) ** 0.5) // job.chunk, 1) * job.chunk
    found = find_in_blocks(
        source,
        blocks(*image.shape, side),
        model.names,
        options,
        volumes=volumes,
        spacing=spacing,
        memory=memory,
    )
    remove(work / "marks", work)
    write_table(table, str(image.path), found.rows, True)
    area = None if spacing is None else float(data * np.prod(spacing))
    record = of_image(found, options, model.names, area, volumes is not None)
    return record, notes(image.path.name, found, options, image.pixel_size, spacing)
