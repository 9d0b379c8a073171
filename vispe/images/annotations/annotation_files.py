"""Reading of annotation files of other programs (GeoJSON, ImageJ, COCO) as shapes."""

from functools import lru_cache
from pathlib import Path

from vispe.errors import InputError
from vispe.images.annotations.coco import annotated, is_coco, read_coco
from vispe.images.annotations.geojson import features_of, read_features
from vispe.images.annotations.imagej_rois import read_rois
from vispe.images.annotations.shapes import Shape
from vispe.images.labels.json_files import load_json
from vispe.images.orientation import Frame

ENDINGS = (".geojson", ".roi", "roiset.zip")
"""Lower-case suffixes that are searched for in label folders; other annotation files must be named individually."""


def holds_shapes(path: Path) -> bool:
    """Return whether a file contains annotations, by its suffix, or for `.json` by its contents."""
    ending = path.suffix.lower()
    if path.is_dir():
        return False
    if ending == ".json":
        content = _parsed(path)
        return is_coco(content) or features_of(content) is not None
    return ending in (".geojson", ".roi", ".zip")


def images_in(path: Path) -> tuple[str, ...]:
    """Return the names of the images with annotations in a file; () if the file does not name images."""
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
        image: the image file, for annotation files of several images.
        frame: frame of the image, for annotation files that contain the image size.

    Raises:
        InputError: the file is not an annotation file, or is damaged.
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
            f"{path} has no GeoJSON features. Export the annotations again (File > Export objects)."
        )
    return read_features(path, features)


def _parsed(path: Path) -> object:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return load_json(path)  # raises an error with the reason for rejection
    return _cached(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _cached(path: Path, changed: int, size: int) -> object:
    """Parse a file; the cache key includes its modification time and size."""
    return load_json(path)
