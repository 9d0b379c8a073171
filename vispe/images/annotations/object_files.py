"""Objects out: an instance map as files that QuPath, ImageJ and programs for COCO open."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vispe.errors import InputError, OptionError, did_you_mean
from vispe.files import atomic_path, check_writable
from vispe.images.annotations.coco import coco_text
from vispe.images.annotations.geojson import geojson_text
from vispe.images.annotations.imagej_rois import roiset_bytes
from vispe.images.annotations.shapes import Color
from vispe.images.annotations.vectorize import checked_instances, outlines

ObjectKind = Literal["geojson", "rois", "coco"]

ENDINGS: dict[str, str] = {"geojson": "_objects.geojson", "rois": "_RoiSet.zip", "coco": "_coco.json"}
"""What follows the name of the image in the name of the file, by the kind of file."""


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
) -> dict[str, Path]:
    """Write the objects of an image for other programs; read back, each file gives the same map.

    Args:
        folder: of the results.
        stem: the name of the image without ending, with which the names of the files begin.
        instances: (h, w) whole numbers, 0 = no object; numbers may be missing.
        classes: the class (1..K) of each object by its number, or a list in which the first is that of object 1.
        names: of the K classes.
        colors: (r, g, b) in 0..255 of the K classes.
        kinds: `'geojson'` (QuPath), `'rois'` (ImageJ) and `'coco'`.
        force: replace files that exist.
        image: the name of the image's file, which COCO files name; if None, `stem`.

    Returns:
        The file of each kind.

    Raises:
        ShapeError: an instance map that has not two axes.
        InputError: fractions or negative numbers, an object without a class, files that exist.
        OptionError: an unknown kind, or one given twice; names and colours that differ in number.
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
            f"{len(names)} names and {len(colors)} colours of classes were given; give as many."
        )
    checked = checked_instances(instances)
    class_of = _classes(checked, classes, len(names))
    targets = {kind: Path(folder) / f"{stem}{ENDINGS[kind]}" for kind in kinds}
    check_writable(list(targets.values()), force)
    polygons = outlines(checked)
    plain = [(int(r), int(g), int(b)) for r, g, b in np.asarray(colors).tolist()]
    make: dict[str, Callable[[], bytes]] = {
        "geojson": lambda: geojson_text(polygons, class_of, names, plain, stem).encode(),
        "rois": lambda: roiset_bytes(polygons, class_of, names, plain),
        "coco": lambda: coco_text(checked, polygons, class_of, names, image or stem).encode(),
    }
    for kind, path in targets.items():
        content = make[kind]()
        with atomic_path(path, force) as temporary:
            temporary.write_bytes(content)
    return targets


def checked_kinds(kinds: Sequence[str]) -> None:
    """Raise OptionError for a kind of file that is not known, or given twice."""
    for kind in kinds:
        if kind not in ENDINGS:
            raise OptionError(
                f"objects_as={kind!r} is not one of {', '.join(ENDINGS)}.{did_you_mean(kind, ENDINGS)}"
            )
    if len(set(kinds)) < len(kinds):
        raise OptionError(f"objects_as={','.join(kinds)} names one kind twice; name each once.")


def _classes(
    instances: np.ndarray, classes: Mapping[int, int] | Sequence[int] | np.ndarray, count: int
) -> dict[int, int]:
    """Return the class of each object that is there."""
    given = classes if isinstance(classes, Mapping) else dict(enumerate(classes, 1))
    found = {int(n): int(given.get(int(n), 0)) for n in np.unique(instances) if n}
    for number, k in found.items():
        if not 1 <= k <= count:
            raise InputError(
                f"object {number} has {f'the class {k}' if k else 'no class'}; classes are 1 to {count}."
            )
    return found
