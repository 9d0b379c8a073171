"""Annotation files of other programs, whichever they are: one list of shapes."""

from functools import lru_cache
from pathlib import Path

from vispe.errors import InputError
from vispe.images.annotations.coco import annotated, is_coco, read_coco
from vispe.images.annotations.geojson import features_of, read_features
from vispe.images.annotations.imagej_rois import read_rois
from vispe.images.annotations.shapes import Shape
from vispe.images.labels.class_values import load_json
from vispe.images.orientation import Frame

ENDINGS = (".geojson", ".roi", "roiset.zip")
"""Endings of names, in lower case, that are looked for in folders of labels; other files are named by themselves."""


def holds_shapes(path: Path) -> bool:
    """Tell whether a file is one of annotations: by its ending, and a `.json` file by its content."""
    ending = path.suffix.lower()
    if path.is_dir():
        return False
    if ending == ".json":
        content = _parsed(path)
        return is_coco(content) or features_of(content) is not None
    return ending in (".geojson", ".roi", ".zip")


def images_in(path: Path) -> tuple[str, ...]:
    """Return the names of the images that a file has annotations of; () where it names none."""
    if path.suffix.lower() != ".json":
        return ()
    content = _parsed(path)
    return annotated(path, content) if is_coco(content) else ()


def read_shapes(
    path: Path, size: tuple[int, int], image: Path | None = None, frame: Frame | None = None
) -> list[Shape]:
    """Read the shapes of one image.

    Args:
        path: GeoJSON, regions of ImageJ (`.roi`, `.zip`) or COCO JSON.
        size: height and width of the image.
        image: the image, for files that hold annotations of several.
        frame: of the image, for files that give its size.

    Raises:
        InputError: not such a file, or damaged.
        MissingExtra: a library is not installed.
    """
    if path.suffix.lower() in (".roi", ".zip"):
        return read_rois(path)
    content = _parsed(path)
    if is_coco(content):
        return read_coco(path, content, image, size, frame)
    features = features_of(content)
    if features is None:
        raise InputError(
            f"{path} holds no GeoJSON features; export the annotations again (File > Export objects)."
        )
    return read_features(path, features)


def _parsed(path: Path) -> object:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return load_json(path)  # which says what is wrong
    return _kept(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2)
def _kept(path: Path, changed: int, size: int) -> object:
    """Parse a file; kept for the next question about it, while it has not changed."""
    return load_json(path)
