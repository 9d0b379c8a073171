"""Examples of object classes: rows of a CSV file, or labelled pixels."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.labels.class_names import LONGEST, has_controls
from vispe.segment.objects.table import Row

_CLASS = "object_class"
_PREDICTED = "object_probability"  # filled by a classifier of object classes
_TOLERANCE = 1.5  # pixels between the centroids of an object in two runs
_FORMULA = "'"  # prefix by which tables mark cells that a spreadsheet would execute


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        where: file and line, for messages.
        image: name of the image; '' if the file has no column `image`.
        label: its object class.
        number: number of the object; None if it is given by `point`.
        point: (page, y, x), a pixel of the object; None if it is given by `number`.
        centroid: (y, x) in pixels of the numbered object, to detect another numbering; None if unknown.
    """

    where: str
    image: str
    label: str
    number: int | None = None
    point: tuple[int, int, int] | None = None
    centroid: tuple[float, float] | None = None

    def is_of(self, image: Path) -> bool:
        """Return whether the example is of an image, by its file name with or without extension."""
        return not self.image or Path(self.image).name in (image.name, image.stem)


def read_examples(path: Path) -> list[Example]:
    """Read examples of object classes from a CSV file.

    Columns: `object_class`, and either `object` (number in the map and table of an earlier run with the same options)
    or `x` and `y` (a pixel of the object, and `page`, from 0). `image`, the file name, is needed if there are several
    images. Rows with an empty `object_class` are skipped, so that `objects.csv` of an earlier run can be completed.
    Predicted classes, in rows with an `object_probability`, are not examples.

    Raises:
        InputError: the file is unreadable, or a column or value is missing, invalid, repeated or
            predicted.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}). Save it as a CSV file.") from error
    lines = text.splitlines()
    delimiter = ";" if lines and ";" in lines[0] and "," not in lines[0] else ","
    reader = csv.DictReader(lines, delimiter=delimiter)
    columns = reader.fieldnames or []
    by_number, by_point = "object" in columns, {"x", "y"} <= set(columns)
    if _CLASS not in columns or not (by_number or by_point):
        raise InputError(
            f"{path} must have the columns object_class and object, or object_class, x and y, got "
            f"{', '.join(columns) or 'no columns'}. Rename its columns."
        )
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        raise InputError(f"{path} has several columns {repeated[0]}. Delete all but one.")
    examples = []
    try:
        for row in reader:
            label = (row[_CLASS] or "").strip()
            if label:
                examples.append(_example(f"{path}, line {reader.line_num}", row, label, by_number))
    except csv.Error as error:
        raise InputError(
            f"{path}, line {reader.line_num}: invalid CSV ({error}). Export it again."
        ) from error
    if not examples:
        raise InputError(f"{path} has no row with an object_class. Fill this column for a few objects.")
    return examples


def _example(where: str, row: dict[str, str | None], label: str, by_number: bool) -> Example:
    if (row.get(_PREDICTED) or "").strip():
        raise InputError(
            f"{where}: the {_CLASS} was predicted, since {_PREDICTED} is filled. Clear the {_CLASS} of rows that you "
            f"did not check, and delete the column {_PREDICTED}."
        )
    label = label.removeprefix(_FORMULA)
    if len(label) > LONGEST or has_controls(label):
        raise InputError(
            f"{where}: object_class must be printable text of up to {LONGEST} characters, got {label[:80]!r}."
        )
    image = (row.get("image") or "").strip().removeprefix(_FORMULA)
    if by_number:
        centroid = [row.get(f"centroid_{axis}_px") for axis in "yx"]
        known = (float(_number(where, "centroid", c)) for c in centroid) if all(centroid) else None
        number = _integer(where, "object", row["object"], 1)
        return Example(where, image, label, number, None, None if known is None else tuple(known))
    point = _number(where, "y", row["y"]), _number(where, "x", row["x"])
    page = _integer(where, "page", row["page"], 0) if row.get("page") else 0
    return Example(where, image, label, None, (page, *(int(np.floor(v + 0.5)) for v in point)))


def _number(where: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise InputError(f"{where}: {name} must be a number, got {text!r}.")
    return value


def _integer(where: str, name: str, text: str | None, least: int) -> int:
    value = _number(where, name, text)
    if value != int(value) or value < least:
        raise InputError(f"{where}: {name} must be an integer of {least} or more, got {text!r}.")
    return int(value)


def classes_of_examples(
    examples: Sequence[Example], instances: np.ndarray, rows: Sequence[Row], image: Path
) -> dict[int, str]:
    """Return the object class of each example, by the number of its object.

    Args:
        examples: examples of this image.
        instances: (z, h, w) object numbers, 0 = none.
        rows: table of the objects, in the order of their numbers.
        image: the image, for messages.

    Raises:
        InputError: an object that does not exist, has another centroid, or has two classes; a point without object.
    """
    out: dict[int, str] = {}
    for example in examples:
        number = example.number
        if example.point is not None:
            number = _object_at(example, instances, image)
        elif number is None or number > len(rows):
            raise InputError(
                f"{example.where}: object {number} does not exist; {image.name} has {counted(len(rows), 'object')}. "
                "Use the numbers of a run with the same labels and options."
            )
        _check_centroid(example, rows[number - 1], image)
        if out.setdefault(number, example.label) != example.label:
            raise InputError(
                f"{example.where}: object {number} of {image.name} is both {out[number]!r} and {example.label!r}. "
                "Keep one of them."
            )
    return out


def _object_at(example: Example, instances: np.ndarray, image: Path) -> int:
    point = example.point or (0, 0, 0)
    inside = all(0 <= p < n for p, n in zip(point, instances.shape, strict=True))
    number = int(instances[point]) if inside else 0
    if not number:
        page, y, x = point
        reason = "there is no object" if inside else "the image ends"
        raise InputError(f"{example.where}: {reason} at x={x}, y={y}, page={page} of {image.name}.")
    return number


def _check_centroid(example: Example, row: Row, image: Path) -> None:
    if example.centroid is None:
        return
    centroid = row["centroid_y_px"], row["centroid_x_px"]
    if max(abs(a - b) for a, b in zip(centroid, example.centroid, strict=True)) > _TOLERANCE:
        stated, actual = (f"(x={c[1]:.1f}, y={c[0]:.1f})" for c in (example.centroid, centroid))
        raise InputError(
            f"{example.where}: object {row['object']} of {image.name} has its centroid at {actual}, but the file "
            f"states {stated}, so its numbers are of another run. Use points (x, y), or the table of a run with the "
            "same labels and options."
        )


def classes_of_labels(
    labels: np.ndarray, names: Sequence[str], instances: np.ndarray, image: Path
) -> tuple[dict[int, str], list[str]]:
    """Return the object class of each labelled object, and notes.

    Args:
        labels: (z, h, w) classes 1..K, 0 = unlabelled.
        names: names of the K object classes.
        instances: (z, h, w) object numbers, 0 = none.
        image: the image, for messages.

    Raises:
        InputError: an object with labels of two classes.
    """
    labelled = labels > 0
    outside = int((labelled & (instances == 0)).sum())
    pairs = np.unique(np.stack([instances[labelled], labels[labelled]]), axis=1).T
    pairs = pairs[pairs[:, 0] > 0]
    out: dict[int, str] = {}
    for number, value in pairs.tolist():
        name = names[value - 1]
        if out.setdefault(number, name) != name:
            raise InputError(
                f"object_classes: object {number} of {image.name} has labels of {out[number]!r} and {name!r}. Keep one "
                "of them, or split touching objects."
            )
    verb = "is" if outside == 1 else "are"
    note = f"{counted(outside, 'labelled pixel')} of the object classes of {image.name} {verb} outside of objects and "
    return out, [note + "ignored."] * bool(outside)
