"""Export of instance maps for QuPath (GeoJSON), ImageJ (RoiSet.zip) and COCO."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vispe.errors import InputError, OptionError, did_you_mean
from vispe.images.annotations.coco import coco_text
from vispe.images.annotations.geojson import geojson_text
from vispe.images.annotations.roi_writer import roiset_bytes
from vispe.images.annotations.shapes import Color
from vispe.images.annotations.vectorize import checked_instances, vectorize
from vispe.utils.files import atomic_path, check_writable

ObjectKind = Literal["geojson", "rois", "coco"]

ANNOTATION_ENDINGS: dict[str, str] = {
    "geojson": "_objects.geojson",
    "rois": "_RoiSet.zip",
    "coco": "_coco.json",
}
"""Suffix of the file name, after the stem of the image, for each kind of file."""


def write_objects(
    folder: str | Path,
    stem: str,
    instances: np.ndarray,
    classes: Mapping[int, int] | Sequence[int] | np.ndarray,
    names: Sequence[str],
    colors: Sequence[Color] | np.ndarray,
    kinds: Sequence[ObjectKind] = ("geojson", "rois", "coco"),
    force: bool = False,
    *,
    image: str | None = None,
    plane: tuple[int, int] | None = None,
    hyperstack: bool = True,
) -> dict[str, Path]:
    """Write the objects of an image for other programs; the round trip through each format is exact.

    Args:
        folder: output folder.
        stem: stem of the image, the first part of the file names.
        instances: (h, w) integers, 0 = no object; object numbers need not be consecutive.
        classes: class (1..K) of each object by its number, or a list that starts with object 1.
        names: names of the K classes.
        colors: (r, g, b) in 0..255 of the K classes.
        kinds: `'geojson'` (QuPath), `'rois'` (ImageJ) and `'coco'`.
        force: overwrite existing files.
        image: file name of the image, which is stored in COCO files; default `stem`.
        plane: slice and time (z, t) of the map in the file of the image, from 0, which QuPath and ImageJ read; None for
            an image of one page. COCO has no such numbers.
        hyperstack: whether the file is a hyperstack in ImageJ (several axes of pages, or channels), whose regions have
            slice and time. In other stacks, regions have the number of the page.

    Returns:
        The path of each kind.

    Raises:
        ShapeError: the instance map is not two-dimensional.
        InputError: non-integer or negative values, an object without a class, or existing files.
        OptionError: an unknown or repeated kind; different numbers of names and colours.
        MissingExtra: `'rois'` without roifile.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> files = write_objects(folder, "a", np.array([[1, 0, 2]]), [1, 1], ["pore"], [(0, 0, 0)], ["geojson"])
        >>> files["geojson"].name
        'a_objects.geojson'
    """
    checked_kinds(kinds)
    if len(names) != len(colors):
        raise OptionError(
            f"write_objects: names and colors must have equal length, got {len(names)} and {len(colors)}."
        )
    checked = checked_instances(instances)
    class_of = _classes(checked, classes, len(names))
    targets = {kind: Path(folder) / f"{stem}{ANNOTATION_ENDINGS[kind]}" for kind in kinds}
    check_writable(list(targets.values()), force)
    polygons = vectorize(checked)
    plain = [(int(r), int(g), int(b)) for r, g, b in np.asarray(colors).tolist()]
    encoders: dict[str, Callable[[], bytes]] = {
        "geojson": lambda: geojson_text(polygons, class_of, names, plain, stem, plane).encode(),
        "rois": lambda: roiset_bytes(polygons, class_of, names, plain, plane, hyperstack),
        "coco": lambda: coco_text(checked, polygons, class_of, names, image or stem).encode(),
    }
    for kind, path in targets.items():
        content = encoders[kind]()
        with atomic_path(path, force) as temporary:
            temporary.write_bytes(content)
    return targets


def checked_kinds(kinds: Sequence[str]) -> None:
    """Raise OptionError for an unknown or repeated kind of file."""
    for kind in kinds:
        if kind not in ANNOTATION_ENDINGS:
            raise OptionError(
                f"objects_as must be one of {', '.join(ANNOTATION_ENDINGS)}, got "
                f"{kind!r}.{did_you_mean(kind, ANNOTATION_ENDINGS)}"
            )
    if len(set(kinds)) < len(kinds):
        raise OptionError(f"objects_as has repeated kinds, got {','.join(kinds)}. Write each kind once.")


def _classes(
    instances: np.ndarray, classes: Mapping[int, int] | Sequence[int] | np.ndarray, count: int
) -> dict[int, int]:
    """Return the class of each object of the instance map."""
    by_number = classes if isinstance(classes, Mapping) else dict(enumerate(classes, 1))
    class_of = {int(n): int(by_number.get(int(n), 0)) for n in np.unique(instances) if n}
    for number, k in class_of.items():
        if not 1 <= k <= count:
            raise InputError(f"object {number}: the class must be 1 to {count}, got {k or 'no class'}.")
    return class_of
