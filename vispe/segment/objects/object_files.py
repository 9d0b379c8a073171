"""Files of objects: instance maps, tables and figures."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vispe.errors import OptionError, counted
from vispe.images.annotations.object_files import ANNOTATION_ENDINGS, write_objects
from vispe.images.annotations.shapes import Color
from vispe.images.read import Micrograph
from vispe.images.write import write_instances, write_png
from vispe.segment.objects.figure import draw_outlines
from vispe.segment.objects.labelling import ObjectList, find
from vispe.segment.objects.object_classes import CLASS_COLUMNS, ObjectClassifier
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.sizes import summarize_image
from vispe.segment.objects.table import COLUMNS, Row
from vispe.segment.overlays import PALETTE, overlay
from vispe.segment.types import Prediction
from vispe.utils.files import atomic_path, csv_cell

ENDINGS = ("_objects.tif", "_objects.csv", "_objects.png")
CLASSES = "_object_classes.png"
"""Suffix of the figure of object classes."""

COMBINED = "objects.csv"
UNKNOWN_AXES = ("I", "Q")
"""Letters that tifffile gives the pages of files without axis metadata."""


def find_image_objects(
    image: Micrograph, results: Sequence[Prediction], names: Sequence[str], options: ObjectOptions
) -> tuple[np.ndarray, ObjectList]:
    """Find the objects of an image: on each page, or in volumes along Z; arguments as in `write_image_objects`.

    Returns:
        A map (z, h, w) uint32 of object numbers, 0 = none, and the objects.
    """
    volumes, order = pages_per_volume(image.axis_lengths), page_order(image.axis_lengths, len(results))
    spacing = spacing_of(image.pixel_size, image.z_step, volumes)
    ordered = [results[page] for page in order]
    labels, prob = np.stack([r.labels for r in ordered]), np.stack([r.prob for r in ordered])
    grey = image.pages if order == sorted(order) else image.pages[order]
    ordered_instances, objects = find(labels, prob, grey, names, options, volumes=volumes, spacing=spacing)
    instances = np.empty_like(ordered_instances)
    instances[order] = ordered_instances
    for row in objects.rows:
        row["page"] = order[row["page"]]
    return instances, objects


def write_image_objects(
    folder: Path,
    image: Micrograph,
    pages: np.ndarray,
    results: Sequence[Prediction],
    names: Sequence[str],
    colors: Sequence[Color] | None,
    options: ObjectOptions,
    force: bool,
    classifier: ObjectClassifier | None = None,
) -> tuple[dict[str, Path], dict, list[str]]:
    """Find the objects of an image, and write their map, their table and a figure of the middle page.

    Args:
        folder: destination.
        image: the image as stored.
        pages: (z, h, w, c) float in [0, 1], shown in the figure.
        results: results of its pages.
        names: class names.
        colors: (r, g, b) of the classes; None for the default palette.
        options: definition of objects.
        force: overwrite.
        classifier: classifier of objects; also writes a figure of their classes.

    Returns:
        The files by kind, the record for the report, and notes.
    """
    stem, volumes = image.path.stem, pages_per_volume(image.axis_lengths)
    spacing = spacing_of(image.pixel_size, image.z_step, volumes)
    instances, objects = find_image_objects(image, results, names, options)
    class_notes = [] if classifier is None else classifier.classify(image.path.name, objects.rows, options)
    files = {"objects": folder / f"{stem}{ENDINGS[0]}", "objects_table": folder / f"{stem}{ENDINGS[1]}"}
    large = len(objects.rows) > np.iinfo(np.uint16).max
    write_instances(files["objects"], instances.astype(np.uint32 if large else np.uint16), image, force)
    columns = COLUMNS if classifier is None else (*COLUMNS, *CLASS_COLUMNS)
    write_table(files["objects_table"], str(image.path), objects.rows, force, columns)
    files["outlines"] = folder / f"{stem}{ENDINGS[2]}"
    palette = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else colors
    middle = len(results) // 2
    write_png(
        files["outlines"],
        draw_outlines(pages[middle], instances[middle], objects.rows, names, palette),
        force,
    )
    files |= _exchanged(folder, image, instances, objects.rows, names, colors, options, force, classifier)
    n_pixels = sum(int((r.labels > 0).sum()) for r in results)
    area = None if spacing is None else float(n_pixels * np.prod(spacing))
    record = summarize_image(objects, options, names, area, volumes is not None)
    if classifier is not None:
        record["object_classes"] = {"counts": classifier.counts(objects.rows), **classifier.facts}
        files["object_classes"] = folder / f"{stem}{CLASSES}"
        figure = overlay(
            pages[middle],
            classifier.numbers(objects.rows)[instances[middle]],
            classifier.names,
            pixel_size=image.pixel_size,
            title=f"{stem}: object classes",
            legend=[str(count) for count in record["object_classes"]["counts"].values()],
        )
        write_png(files["object_classes"], figure, force)
    facts = image.axis_lengths, image.pixel_size, spacing
    return files, record, notes(image.path.name, objects, options, *facts) + class_notes


def file_suffixes(options: ObjectOptions | None) -> tuple[str, ...]:
    """Return the suffixes of the files that the objects of an image may be written to."""
    if options is None:
        return ()
    return (*ENDINGS, CLASSES, *(ANNOTATION_ENDINGS[kind] for kind in options.kinds))


def _exchanged(
    folder: Path,
    image: Micrograph,
    instances: np.ndarray,
    rows: Sequence[Row],
    names: Sequence[str],
    colors: Sequence[Color] | None,
    options: ObjectOptions,
    force: bool,
    classifier: ObjectClassifier | None,
) -> dict[str, Path]:
    """Write objects in exchange formats, with their object classes if all of them have one.

    Raises:
        OptionError: the image has several pages.
    """
    if not options.kinds:
        return {}
    if image.n_pages > 1:
        raise OptionError(
            f"objects_as={','.join(options.kinds)} needs a single page, but {image.path.name} has {image.n_pages}. "
            "Select one with z, or omit objects_as."
        )
    column = "class"
    if classifier is not None and all(row[CLASS_COLUMNS[0]] is not None for row in rows):
        column, names, colors = CLASS_COLUMNS[0], classifier.names, None
    palette = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else list(colors)
    classes = [names.index(row[column]) + 1 for row in rows]
    arguments = (instances[0], classes, names, palette, options.kinds, force)
    where = {"plane": image.frame.plane(0), "hyperstack": len(image.frame.axes) > 1 or image.multichannel}
    return dict(write_objects(folder, image.path.stem, *arguments, image=image.path.name, **where))


def notes(
    name: str,
    objects: ObjectList,
    options: ObjectOptions,
    axes: dict[str, int],
    pixel: tuple[float, float] | None,
    spacing: object,
) -> list[str]:
    """Return notes on unknown axes, excluded objects and missing units."""
    out = []
    if list(axes) in [[letter] for letter in UNKNOWN_AXES]:
        out.append(
            f"the pages of {name} are interpreted as slices along Z, and its objects as volumes. For a time series, "
            "use axes=TYX."
        )
    if objects.small:
        out.append(
            f"{name}: {counted(objects.small, 'object')} of fewer than {counted(options.min_area, 'pixel')} "
            f"{'was' if objects.small == 1 else 'were'} excluded. Use object_min_area=0 to include all."
        )
    if pixel is not None and spacing is None:
        out.append(f"the slice distance of {name} is unknown: volumes are in voxels only.")
    return out


def pages_per_volume(axes: dict[str, int]) -> int | None:
    """Return the pages per volume: the length of Z; None without it.

    A single page axis of unknown kind (`UNKNOWN_AXES`) counts as Z, as in label maps and 3D filters.
    """
    if list(axes) in [[letter] for letter in UNKNOWN_AXES]:
        return sum(axes.values())
    return axes["Z"] if axes.get("Z", 1) > 1 else None


def page_order(axes: Mapping[str, int], count: int) -> list[int]:
    """Return the numbers of `count` pages, those of a volume together: Z becomes the innermost axis.

    Example:
        >>> page_order({"Z": 2, "T": 3}, 6)
        [0, 3, 1, 4, 2, 5]
    """
    if "Z" not in axes:
        return list(range(count))
    numbers = np.arange(count).reshape(tuple(axes.values()))
    return np.moveaxis(numbers, list(axes).index("Z"), -1).ravel().tolist()


def spacing_of(
    pixel: tuple[float, float] | None, step: float | None, volumes: int | None
) -> tuple[float, ...] | None:
    """Return microns per pixel along (y, x), or (z, y, x) of volumes; None if one of them is unknown."""
    if pixel is None or volumes is None:
        return pixel
    return None if step is None else (step, *pixel)


def write_table(
    path: Path, image: str, rows: Iterable[Row], force: bool, columns: Sequence[str] = COLUMNS
) -> None:
    """Write the table of an image; without objects it has only a header."""
    with (
        atomic_path(path, force) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as stream,
    ):
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: csv_cell(v) for k, v in {"image": image, **row}.items()} for row in rows)


def write_combined(out: Path, tables: Sequence[str]) -> None:
    """Concatenate the tables of all images, replacing an earlier file of this run."""
    if not tables:
        return
    with atomic_path(out / COMBINED, True) as temporary, temporary.open("wb") as stream:
        for number, table in enumerate(tables):
            with Path(table).open("rb") as part:
                head = part.readline()
                stream.write(b"" if number else head)
                for line in part:
                    stream.write(line)
