"""COCO JSON: polygons and run lengths for several images in one file, matched by `file_name`."""

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
    """Tell whether parsed JSON is a COCO file of annotations."""
    return isinstance(content, dict) and all(
        isinstance(content.get(k), list) for k in ("images", "annotations")
    )


def coco_images(path: Path, content: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the entries of the images of a COCO file, by the last part of their `file_name`.

    Raises:
        InputError: an image without a name or id, or two of one name.
    """
    found: dict[str, dict[str, object]] = {}
    for number, entry in enumerate(_entries(content, "images")):
        name = entry.get("file_name")
        if not isinstance(name, str) or not name or "id" not in entry:
            raise InputError(f"{path}: image {number} has no file_name or no id; export the file again.")
        name = PurePosixPath(name.replace("\\", "/")).name
        if name in found:
            raise InputError(f"{path} has two images called {name}; give a file for each folder.")
        found[name] = entry
    return found


def annotated(path: Path, content: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the images of a COCO file that have annotations."""
    drawn = {annotation.get("image_id") for annotation in _entries(content, "annotations")}
    return tuple(name for name, entry in coco_images(path, content).items() if entry["id"] in drawn)


def coco_entry(path: Path, content: Mapping[str, object], image: Path | None) -> dict[str, object]:
    """Return the entry of an image: that of its name, or of its name without the ending, or the only one.

    Raises:
        InputError: none, or several, would do.
    """
    entries = coco_images(path, content)
    if image is not None and image.name in entries:
        return entries[image.name]
    alike = [entry for name, entry in entries.items() if image is not None and Path(name).stem == image.stem]
    chosen = alike or list(entries.values())
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(list(entries)[:5]) + (", ..." if len(entries) > 5 else "")
    raise InputError(
        f"{path} holds no image called {image.name if image else '(no name given)'}; it has {names or 'none at all'}."
    )


def read_coco(
    path: Path,
    content: Mapping[str, object],
    image: Path | None,
    size: tuple[int, int],
    frame: Frame | None = None,
) -> list[Shape]:
    """Turn the annotations of one image into shapes; their class is the name of the category.

    Args:
        path: the file.
        content: what it holds.
        image: whose annotations; the file may hold those of several images.
        size: height and width of the image.
        frame: of the image; an entry with height and width exchanged is rotated as its orientation tag says.

    Raises:
        InputError: another size than the image has; an annotation without a category or segmentation.
    """
    entry, frame = coco_entry(path, content, image), frame or Frame()
    stated = entry.get("height"), entry.get("width")
    if frame.tag >= 5 and stated == size[::-1] != size:
        tag = frame.tag if frame.applied else inverse_tag(frame.tag)
        found = read_coco(path, content, image, size[::-1])
        return [shape if shape.empty else shape.oriented(size[::-1], tag) for shape in found]
    if stated != (None, None) and stated != size:
        raise InputError(
            f"{path}: {entry['file_name']} has {stated[0]} x {stated[1]} pixels (height x width), but the image is "
            f"{size[0]} x {size[1]}{frame.hint()}; they must have the same size and are never resized."
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
                f"{where} has category_id={annotation.get('category_id')!r}, which is not among the categories."
            )
        shapes.append(_shape(where, path, name.strip(), annotation, size))
    return shapes


def _shape(
    where: str, path: Path, name: str, annotation: Mapping[str, object], size: tuple[int, int]
) -> Shape:
    found = annotation.get("segmentation")
    if isinstance(found, list) and not any(part != [] for part in found):
        return Shape(where, name)
    if isinstance(found, dict):
        return Shape(where, name, mask=(0, 0, _mask(where, path, found, size)))
    if isinstance(found, list) and found and all(isinstance(p, list) and len(p) % 2 == 0 for p in found):
        rings = [[flat[i : i + 2] for i in range(0, len(flat), 2)] for flat in found if flat]
        return Shape(where, name, areas=tuple((checked_points(where, ring, 3),) for ring in rings))
    box = annotation.get("bbox")
    hint = "; a box alone says not which pixels" if box else ""
    raise InputError(
        f"{where} has no segmentation by polygons or run lengths{hint}; export masks or polygons."
    )


def _mask(where: str, path: Path, found: Mapping[str, object], size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths, down the columns, beginning with a run of zeros -> (h, w) bool."""
    counts, stated = found.get("counts"), found.get("size")
    if stated != list(size):
        raise InputError(f"{where} has run lengths for the size {stated}, but the image is {list(size)}.")
    check_size(path, size, 8, trusted=True)
    if isinstance(counts, str):
        counts = _counts(where, counts)
    good = isinstance(counts, list) and all(isinstance(n, int) and n >= 0 for n in counts)
    if not good or sum(counts) != size[0] * size[1]:
        raise InputError(f"{where} has run lengths that do not add up to {size[0]} x {size[1]} pixels.")
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(size[1], size[0]).T


def _counts(where: str, text: str) -> list[int]:
    """Decode the text of run lengths of pycocotools.

    Characters from '0' on hold 5 bits each, the lowest first, and a sixth bit that says whether the number goes on;
    a number is the difference to the last but one, from the fourth number on.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise InputError(f"{where} has run lengths with the character {character!a}; export it again.")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits >> 4 & 1) << shift  # the highest bit is the sign
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts


def _entries(content: Mapping[str, object], key: str) -> list[dict[str, object]]:
    found = content.get(key)
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


def coco_text(
    instances: np.ndarray,
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    image: str,
) -> str:
    """Write objects as COCO JSON: polygons where an object has no hole, else run lengths.

    Args:
        instances: (h, w), 0 = no object.
        polygons: of each object, as `vispe.images.annotations.vectorize.outlines` gives them.
        class_of: the class (1..K) of each object.
        names: of the K classes.
        image: the name of the image's file.
    """
    h, w = instances.shape
    areas = np.bincount(instances.ravel())
    annotations = []
    for number, parts in polygons.items():
        corners = np.concatenate([polygon[0] for polygon in parts])
        (left, top), (right, bottom) = corners.min(0).tolist(), corners.max(0).tolist()
        whole = all(len(polygon) == 1 for polygon in parts)
        annotations.append(
            {
                "id": number,
                "image_id": 1,
                "category_id": class_of[number],
                "segmentation": [p[0].ravel().tolist() for p in parts]
                if whole
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
    """Encode an object in a box as run lengths down the columns of the whole map, beginning with zeros."""
    h, w = instances.shape
    left, top, right, bottom = box
    x, y = np.nonzero(number == instances[top:bottom, left:right].T)
    places = (x + left) * h + y + top
    # a run of the object ends where the next place is not the following one
    breaks = np.flatnonzero(np.diff(places) != 1)
    starts, ends = places[np.r_[0, breaks + 1]], places[np.r_[breaks, -1]] + 1
    counts = np.diff(np.r_[0, np.stack([starts, ends], 1).ravel(), h * w])
    # a last run of no zeros is left away, as pycocotools does
    return {"counts": [int(n) for i, n in enumerate(counts) if n or i < len(counts) - 1], "size": [h, w]}
