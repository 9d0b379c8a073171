"""Record, overlay and objects of a finished out-of-core image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.write import write_png
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.model.model_file import Model
from vispe.segment.objects.object_classes import CLASS_COLUMNS
from vispe.segment.objects.object_files import notes, page_order, pages_per_volume, spacing_of, write_table
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.out_of_core_objects import RegionSource, find_in_blocks
from vispe.segment.objects.sizes import summarize_image
from vispe.segment.objects.table import COLUMNS
from vispe.segment.out_of_core import output_stem, zarr_store
from vispe.segment.out_of_core.job import Job
from vispe.segment.out_of_core.lazy_page import PageWindow
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.overlays import overlay
from vispe.segment.run.reports.image_record import fractions, image_record
from vispe.segment.types import Areas, Prediction
from vispe.utils.files import remove

_BYTES = 80  # approximate bytes per pixel of a block during labelling


def summary(
    image: OutOfCoreImage,
    model: Model,
    added: Mapping[str, Any],
    areas: Sequence[Areas] | None,
    data: int,
    labels: Path | None,
) -> dict[str, Any]:
    """Return the numbers of a record of the report, as for images in memory.

    Args:
        image: the image.
        model: the model.
        added: the sums of all chunks, from `vispe.segment.out_of_core.progress.sum_records`.
        areas: areas of each page; None without reweighting.
        data: number of pixels with data.
        labels: the label file of the image.
    """
    total, total_areas = int(added["counts"][1:].sum()), None if areas is None else sum(areas[1:], areas[0])
    return image_record(
        image,
        labels,
        fractions(added["counts"], total_areas, model.names, model.classifier.kind),
        no_data=float(1 - data / (image.n_pages * image.shape[0] * image.shape[1])),
        uncertainty=added["unsure"] / total if total else 0.0,
        overlap=added["overlap"],
        disagreeing=added["disagreeing"],
    )


def stored_page(
    image: OutOfCoreImage, job: Job, number: int
) -> tuple[tuple[np.ndarray, np.ndarray], Prediction]:
    """Read a page that fits into memory: grey levels (h, w, c) with the mask (h, w) of data, and its final result."""
    import zarr

    full, root = Region(0, image.shape[0], 0, image.shape[1]), zarr.open_group(f"{job.work}/store", mode="r")
    prob, labels, uncertainty = (
        np.asarray(root[f"{prefix}0"][zarr_store.array_index(image, number, full, part == "prob")])
        for part, prefix in zarr_store.PARTS.items()
    )
    grey = PageWindow(image, number, job.limits[number]).cut(full)
    return grey, Prediction(prob, labels, uncertainty, 0, 0, ())


def draw(
    target: Path,
    image: OutOfCoreImage,
    model: Model,
    job: Job,
    counts: np.ndarray,
) -> None:
    """Draw the overlay of one page from downscaled grey levels and subsampled labels.

    Args:
        target: PNG file.
        image: the image.
        model: provides names and colours of the classes.
        job: the finished job.
        counts: (K + 1,) pixels of each label on the page.
    """
    import zarr

    work, step = Path(job.work), job.reduction
    grey = np.asarray(zarr.open_array(str(work / "picture"), mode="r")[:])
    array = zarr.open_group(str(work / "store"), mode="r")[f"labels/{zarr_store.LABELS}"]
    level = step.bit_length() - 1
    while str(level) not in array:
        level -= 1
    level_array = array[str(level)]
    full = Region(0, level_array.shape[-2], 0, level_array.shape[-1])
    labels = np.asarray(level_array[zarr_store.array_index(image, job.overlay_page, full, False)])
    stride = step >> level
    name = output_stem(image.path)
    figure = overlay(
        grey,
        labels[::stride, ::stride],
        model.names,
        model.colors,
        pixel_size=image.pixel_size,
        title=name if image.n_pages == 1 else f"{name}, page {job.overlay_page}",
        step=step,
        counts=counts,
    )
    write_png(target, figure, True)


def objects_of_store(
    image: OutOfCoreImage, job: Job, model: Model, options: ObjectOptions, memory: int, data: int, table: Path
) -> tuple[dict[str, Any], list[str]]:
    """Find the objects of a finished result, and write them: labels in the store, and the table.

    Args:
        image: the image.
        job: the finished job.
        model: provides the names of the classes.
        options: definition of objects.
        memory: limit in bytes.
        data: number of pixels with data.
        table: CSV file, overwritten.

    Returns:
        The record for the report, and notes.

    Raises:
        InputError: a connected component that exceeds the memory.
    """
    import zarr

    work, shape = Path(job.work), (image.n_pages, *image.shape)
    root = zarr.open_group(str(work / "store"), mode="r+")
    classes, out = root[f"labels/{zarr_store.LABELS}/0"], zarr_store.create_objects(root, image, job.chunk)
    chunks = (1, job.chunk, job.chunk)
    marks = zarr.create_array(
        store=str(work / "marks"), shape=shape, chunks=chunks, dtype=np.int64, fill_value=0, overwrite=True
    )

    volumes, order = pages_per_volume(image.axis_lengths), page_order(image.axis_lengths, image.n_pages)

    def prob(page: int, region: Region, number: int) -> np.ndarray:
        return np.asarray(root["0"][zarr_store.array_index(image, order[page], region, number - 1)])

    def paint(page: int, region: Region, mask: np.ndarray, number: int) -> None:
        index = zarr_store.array_index(image, order[page], region, False)
        objects = np.asarray(out[index])
        objects[mask] = number
        out[index] = objects

    def read(page: int, region: Region) -> np.ndarray:
        return np.asarray(classes[zarr_store.array_index(image, order[page], region, False)])

    def grey(page: int, region: Region) -> np.ndarray:
        return image.read(order[page], region)

    source = RegionSource(shape, read, prob, grey, marks, paint)
    spacing = spacing_of(image.pixel_size, image.z_step, volumes)
    # a multiple of the chunk size, as large as memory allows
    side = max(int((memory / _BYTES) ** 0.5) // job.chunk, 1) * job.chunk
    objects = find_in_blocks(
        source,
        blocks(*image.shape, side),
        model.names,
        options,
        volumes=volumes,
        spacing=spacing,
        memory=memory,
    )
    for row in objects.rows:
        row["page"] = order[row["page"]]
    remove(work / "marks", work)
    classifier, columns, class_notes = model.objects, COLUMNS, list[str]()
    if classifier is not None:
        class_notes = classifier.classify(image.path.name, objects.rows, options)
        columns = (*COLUMNS, *CLASS_COLUMNS)
    write_table(table, str(image.path), objects.rows, True, columns)
    area = None if spacing is None else float(data * np.prod(spacing))
    record = summarize_image(objects, options, model.names, area, volumes is not None)
    if classifier is not None:
        record["object_classes"] = {"counts": classifier.counts(objects.rows), **classifier.facts}
    facts = image.axis_lengths, image.pixel_size, spacing
    return record, notes(image.path.name, objects, options, *facts) + class_notes
