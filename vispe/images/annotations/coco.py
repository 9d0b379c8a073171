"""COCO JSON: polygons and run-length encodings of several images in one file, matched by `file_name`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from vispe.errors import InputError
from vispe.images.annotations.shapes import Shape, checked_points
from vispe.images.annotations.vectorize import Polygon
from vispe.images.formats.size_limits import check_size
from vispe.images.orientation import Frame, inverse_tag


def is_coco(content: object) -> bool:
    """Return whether parsed JSON is a COCO annotation file."""
    return isinstance(content, dict) and all(
        isinstance(content.get(k), list) for k in ("images", "annotations")
    )


def coco_images(path: Path, content: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the image entries of a COCO file by the last component of their `file_name`.

    Raises:
        InputError: an image has no name or id, or two have the same name.
    """
    entries: dict[str, dict[str, object]] = {}
    for number, entry in enumerate(_entries(content, "images")):
        name = entry.get("file_name")
        if not isinstance(name, str) or not name or "id" not in entry:
            raise InputError(f"{path}: image {number} has no file_name or no id. Export the file again.")
        name = PurePosixPath(name.replace("\\", "/")).name
        if name in entries:
            raise InputError(f"{path} has two images called {name}. Use one file per folder.")
        entries[name] = entry
    return entries


def annotated(path: Path, content: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the images of a COCO file that have annotations."""
    annotated_ids = {annotation.get("image_id") for annotation in _entries(content, "annotations")}
    return tuple(name for name, entry in coco_images(path, content).items() if entry["id"] in annotated_ids)


def coco_entry(path: Path, content: Mapping[str, object], image: Path | None) -> dict[str, object]:
    """Return the entry of an image: the entry with its name, or with its stem, or the only entry.

    Raises:
        InputError: no entry, or several entries, match.
    """
    entries = coco_images(path, content)
    if image is not None and image.name in entries:
        return entries[image.name]
    same_stem = [
        entry for name, entry in entries.items() if image is not None and Path(name).stem == image.stem
    ]
    candidates = same_stem or list(entries.values())
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(list(entries)[:5]) + (", ..." if len(entries) > 5 else "")
    raise InputError(
        f"{path} has no image called {image.name if image else '(no name)'}. Its images: {names or 'none'}."
    )


def read_coco(
    path: Path,
    content: Mapping[str, object],
    image: Path | None,
    size: tuple[int, int],
    frame: Frame | None = None,
) -> list[Shape]:
    """Convert the annotations of one image to shapes; the class is the name of the category.

    Args:
        path: the file.
        content: parsed contents of the file.
        image: image file whose annotations are read; a COCO file may contain several images.
        size: height and width of the image.
        frame: frame of the image; an entry with height and width exchanged is rotated by its orientation tag.

    Raises:
        InputError: the size differs from that of the image, or an annotation has no category or segmentation.
    """
    entry, frame = coco_entry(path, content, image), frame or Frame()
    declared = entry.get("height"), entry.get("width")
    if frame.tag >= 5 and declared == size[::-1] != size:
        tag = frame.tag if frame.applied else inverse_tag(frame.tag)
        shapes_as_stored = read_coco(path, content, image, size[::-1])
        return [shape if shape.empty else shape.oriented(size[::-1], tag) for shape in shapes_as_stored]
    if declared != (None, None) and declared != size:
        raise InputError(
            f"{path}: {entry['file_name']} must have the size of the image, {size[0]} x {size[1]} pixels (height x "
            f"width){frame.hint()}, got {declared[0]} x {declared[1]}. Annotations are never resized."
        )
    names = {c.get("id"): c.get("name") for c in _entries(content, "categories")}
    shapes = []
    for number, annotation in enumerate(_entries(content, "annotations")):
        if annotation.get("image_id") != entry["id"]:
            continue
        where = f"{path}: annotation {annotation.get('id', number)}"
        name = names.get(annotation.get("category_id"))
        if not isinstance(name, str) or not name.strip():
            raise InputError(
                f"{where}: unknown category, got category_id={annotation.get('category_id')!r}. Export the file again."
            )
        shapes.append(_shape(where, path, name.strip(), annotation, size))
    return shapes


def _shape(
    where: str, path: Path, name: str, annotation: Mapping[str, object], size: tuple[int, int]
) -> Shape:
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, list) and not any(part != [] for part in segmentation):
        return Shape(where, name)
    if isinstance(segmentation, dict):
        return Shape(where, name, mask=(0, 0, _mask(where, path, segmentation, size)))
    if (
        isinstance(segmentation, list)
        and segmentation
        and all(isinstance(p, list) and len(p) % 2 == 0 for p in segmentation)
    ):
        rings = [[flat[i : i + 2] for i in range(0, len(flat), 2)] for flat in segmentation if flat]
        return Shape(where, name, areas=tuple((checked_points(where, ring, 3),) for ring in rings))
    box = annotation.get("bbox")
    hint = " (a bounding box does not define pixels)" if box else ""
    raise InputError(f"{where}: no polygons or run lengths as segmentation{hint}. Export masks or polygons.")


def _mask(where: str, path: Path, segmentation: Mapping[str, object], size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths in column-major order, starting with a run of zeros -> (h, w) bool."""
    counts, declared = segmentation.get("counts"), segmentation.get("size")
    if declared != list(size):
        raise InputError(
            f"{where}: run lengths must have the size of the image, {list(size)}, got {declared}."
        )
    check_size(path, size, 8, trusted=True)
    if isinstance(counts, str):
        counts = _counts(where, counts)
    valid = isinstance(counts, list) and all(isinstance(n, int) and n >= 0 for n in counts)
    if not valid or sum(counts) != size[0] * size[1]:
        raise InputError(f"{where}: run lengths do not sum to {size[0]} x {size[1]} pixels. Export it again.")
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(size[1], size[0]).T


def _counts(where: str, text: str) -> list[int]:
    """Decode the compressed run lengths of pycocotools.

    The code of each character minus that of '0' has 5 bits of a number, least significant bits first, and a
    continuation bit. From the fourth number on, the stored value is the difference from the number two
    positions before.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise InputError(f"{where}: invalid character {character!a} in run lengths. Export it again.")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits >> 4 & 1) << shift  # two's complement: the highest bit is the sign
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts


def _entries(content: Mapping[str, object], key: str) -> list[dict[str, object]]:
    entries = content.get(key)
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def coco_text(
    instances: np.ndarray,
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    image: str,
) -> str:
    """Return objects as COCO JSON: polygons for objects without holes, otherwise run lengths.

    Args:
        instances: (h, w), 0 = no object.
        polygons: polygons of each object, from `vispe.images.annotations.vectorize.vectorize`.
        class_of: class (1..K) of each object.
        names: names of the K classes.
        image: name of the image file.
    """
    h, w = instances.shape
    areas = np.bincount(instances.ravel())
    annotations = []
    for number, parts in polygons.items():
        corners = np.concatenate([polygon[0] for polygon in parts])
        (left, top), (right, bottom) = corners.min(0).tolist(), corners.max(0).tolist()
        without_holes = all(len(polygon) == 1 for polygon in parts)
        annotations.append(
            {
                "id": number,
                "image_id": 1,
                "category_id": class_of[number],
                "segmentation": [p[0].ravel().tolist() for p in parts]
                if without_holes
                else _runs(instances, number, (left, top, right, bottom)),
                "area": int(areas[number]),
                "bbox": [left, top, right - left, bottom - top],
                "iscrowd": 0,
            }
        )
    content = {
        "images": [{"id": 1, "file_name": image, "height": h, "width": w}],
        "categories": [{"id": k, "name": name} for k, name in enumerate(names, 1)],
        "annotations": annotations,
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def _runs(instances: np.ndarray, number: int, box: tuple[int, int, int, int]) -> dict[str, object]:
    """Encode an object in a box as column-major run lengths of the full map, starting with zeros."""
    h, w = instances.shape
    left, top, right, bottom = box
    x, y = np.nonzero(number == instances[top:bottom, left:right].T)
    indices = (x + left) * h + y + top
    # a run ends where two consecutive indices are not adjacent
    breaks = np.flatnonzero(np.diff(indices) != 1)
    starts, ends = indices[np.r_[0, breaks + 1]], indices[np.r_[breaks, -1]] + 1
    counts = np.diff(np.r_[0, np.stack([starts, ends], 1).ravel(), h * w])
    # a final run of length 0 is omitted, as in pycocotools
    return {"counts": [int(n) for i, n in enumerate(counts) if n or i < len(counts) - 1], "size": [h, w]}
