"""The files of objects: instance maps and tables."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from vispe.errors import OptionError
from vispe.files import atomic_path, csv_cell
from vispe.images.annotations.object_files import ENDINGS as EXCHANGED
from vispe.images.annotations.object_files import write_objects
from vispe.images.annotations.shapes import Color
from vispe.images.read import Micrograph
from vispe.images.write import write_instances, write_png
from vispe.segment.objects.figure import outlined
from vispe.segment.objects.labelling import Found, find
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.sizes import of_image
from vispe.segment.objects.table import COLUMNS, Row
from vispe.segment.overlays import PALETTE
from vispe.segment.run.prediction import Prediction

ENDINGS = ("_objects.tif", "_objects.csv", "_objects.png")
TOGETHER = "objects.csv"


def objects_of(
    folder: Path,
    image: Micrograph,
    pages: np.ndarray,
    results: Sequence[Prediction],
    names: Sequence[str],
    colors: Sequence[Color] | None,
    options: ObjectOptions,
    force: bool,
) -> tuple[dict[str, Path], dict, list[str]]:
    """Find the objects of an image, and write their map, their table and, of the middle page, a figure.

    Args:
        folder: where the files go.
        image: as stored.
        pages: (z, h, w, c) float in [0, 1], what the figure shows.
        results: of its pages.
        names: of the classes.
        colors: (r, g, b) of the classes; None for the palette.
        options: what counts.
        force: overwrite.

    Returns:
        The files by kind, what the report says, and notes.
    """
    stem, volumes = image.path.stem, pages_together(image.axis_lengths)
    spacing = spacing_of(image.pixel_size, image.z_step, volumes)
    labels, prob = np.stack([r.labels for r in results]), np.stack([r.prob for r in results])
    found_map, found = find(labels, prob, image.pages, names, options, volumes=volumes, spacing=spacing)
    files = {"objects": folder / f"{stem}{ENDINGS[0]}", "objects_table": folder / f"{stem}{ENDINGS[1]}"}
    large = len(found.rows) > np.iinfo(np.uint16).max
    write_instances(files["objects"], found_map.astype(np.uint32 if large else np.uint16), image, force)
    write_table(files["objects_table"], str(image.path), found.rows, force)
    files["outlines"] = folder / f"{stem}{ENDINGS[2]}"
    shown = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else colors
    middle = len(results) // 2
    write_png(files["outlines"], outlined(pages[middle], found_map[middle], found.rows, names, shown), force)
    files |= _exchanged(folder, image, found_map, found.rows, names, colors, options, force)
    area = None if spacing is None else float((labels > 0).sum() * np.prod(spacing))
    record = of_image(found, options, names, area, volumes is not None)
    return files, record, notes(image.path.name, found, options, image.pixel_size, spacing)


def endings(options: ObjectOptions | None) -> tuple[str, ...]:
    """Return the ends of the names of files that the objects of an image go to."""
    return () if options is None else (*ENDINGS, *(EXCHANGED[kind] for kind in options.kinds))


def _exchanged(
    folder: Path,
    image: Micrograph,
    instances: np.ndarray,
    rows: Sequence[Row],
    names: Sequence[str],
    colors: Sequence[Color] | None,
    options: ObjectOptions,
    force: bool,
) -> dict[str, Path]:
    """Write objects for other programs.

    Raises:
        OptionError: the image has several pages.
    """
    if not options.kinds:
        return {}
    if image.n_pages > 1:
        raise OptionError(
            f"objects_as={','.join(options.kinds)} is for one page, but {image.path.name} has {image.n_pages}; choose "
            "one with --z, or leave it out."
        )
    shown = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else list(colors)
    classes = [names.index(row["class"]) + 1 for row in rows]
    own = (instances[0], classes, names, shown, options.kinds, force)
    return dict(write_objects(folder, image.path.stem, *own, image=image.path.name))


def notes(
    name: str, found: Found, options: ObjectOptions, pixel: tuple[float, float] | None, spacing: object
) -> list[str]:
    """Say what was left out, and which units there are not."""
    out = []
    if found.small:
        out.append(
            f"{name}: objects of fewer than {options.min_area} pixels are left out ({found.small}); "
            "--object-min-area 0 keeps all."
        )
    if pixel is not None and spacing is None:
        out.append(f"{name} does not say how far its slices are apart: volumes are in voxels only.")
    return out


def pages_together(axes: dict[str, int]) -> int | None:
    """Return how many pages are a volume: the length of Z where it is the last of the axes that count pages."""
    return axes["Z"] if axes.get("Z", 1) > 1 and list(axes)[-1] == "Z" else None


def spacing_of(
    pixel: tuple[float, float] | None, step: float | None, volumes: int | None
) -> tuple[float, ...] | None:
    """Return microns per pixel along (y, x), or (z, y, x) of volumes; None where one of them is not known."""
    if pixel is None or volumes is None:
        return pixel
    return None if step is None else (step, *pixel)


def write_table(path: Path, image: str, rows: Iterable[Row], force: bool) -> None:
    """Write the table of an image; one without objects has a header alone."""
    with (
        atomic_path(path, force) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as stream,
    ):
        writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: csv_cell(v) for k, v in {"image": image, **row}.items()} for row in rows)


def write_together(out: Path, tables: Sequence[str]) -> None:
    """Write the tables of all images one after the other, in place of an earlier file of this run."""
    if not tables:
        return
    with atomic_path(out / TOGETHER, True) as temporary, temporary.open("wb") as stream:
        for number, table in enumerate(tables):
            with Path(table).open("rb") as part:
                head = part.readline()
                stream.write(b"" if number else head)
                for line in part:
                    stream.write(line)
