"""Files of a run: the images, and the labels, ground truth and mask of each."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vispe.errors import InputError, OptionError, counted
from vispe.images.annotations.annotation_files import ENDINGS
from vispe.images.file_search import find_images
from vispe.images.formats.decode import decode
from vispe.images.formats.headers import stored_planes, stored_shape
from vispe.images.labels.label_files import Labels
from vispe.images.paths import check_file, expanded
from vispe.images.sidecars import find_label_files, is_single_file, match_labels, split_sidecars
from vispe.segment.model.model_file import Model
from vispe.segment.types import Paths, ReadOptions

_NUMBERS = 20  # largest value of a label file that is interpreted as class numbers instead of colours


@dataclass(eq=False)
class BatchImage:
    """One input image with its labels, ground truth, mask, labels of object classes, and axes."""

    path: Path
    labels: Path | None = None
    truth: Path | None = None
    label_data: Labels | None = None
    mask: Path | None = None
    object_classes: Path | None = None
    axes: str | None = None


def as_list(patterns: Paths) -> list[str | Path]:
    """Return patterns as a list; a single one becomes a list of one."""
    return [patterns] if isinstance(patterns, str | Path) else list(patterns)


def find_files(patterns: Paths) -> list[Path]:
    """Expand files, folders and globs of labels or ground truth; no pattern matches no file."""
    patterns = as_list(patterns)
    return find_images(patterns, ENDINGS) if patterns else []


def expand_patterns(
    patterns: Sequence[str | Path], failed: Callable[[str, InputError], None]
) -> dict[Path, bool]:
    """Expand the image patterns; return each file, and whether it was named explicitly.

    In a batch, a pattern without matches is recorded as a failure.

    Args:
        patterns: files, folders and globs.
        failed: called with a pattern without matches and the error.

    Raises:
        InputError: no pattern has a match.
    """
    files: dict[Path, tuple[Path, bool]] = {}
    reasons = []
    for pattern in patterns or find_images(patterns):
        try:
            for path in find_images([pattern]):
                files.setdefault(path.resolve(), (path, is_single_file(pattern)))
        except InputError as error:
            if len(patterns) == 1:
                raise
            failed(str(pattern), error)
            reasons.append(" ".join(str(error).split()))
    if not files:
        raise InputError("; ".join(reasons))
    return dict(files.values())


def select_images(
    files: dict[Path, bool], labels: Sequence[Path], out: Path, note: Callable[[str], None]
) -> list[BatchImage]:
    """Exclude files that are not images by their names, with a note; the run's own results are excluded silently.

    Args:
        files: each file, and whether it was named explicitly.
        labels: label and ground-truth files.
        out: folder of the results.
        note: called with messages for the user.
    """
    results_folder = Path(os.path.realpath(out))  # unlike Path.resolve, never raises
    images, excluded = split_sidecars(files, labels, lambda path: path.resolve().parent == results_folder)
    if excluded:
        note(
            f"Skipped {counted(len(excluded), 'file')} with the name of labels, masks or results next to the images: "
            f"{_few(excluded)}. Pass such a file by its name to segment it."
        )
    return [BatchImage(path) for path in images]


def single_mask(reading: ReadOptions) -> Path | None:
    """Return the mask of a single image; None without one.

    Raises:
        OptionError: several masks.
    """
    files = find_files(reading.mask)
    if len(files) > 1:
        raise OptionError(
            f"mask matches {counted(len(files), 'file')}, but there is one image. Pass one mask."
        )
    return files[0] if files else None


def match_masks(images: Sequence[BatchImage], files: Sequence[Path], note: Callable[[str], None]) -> None:
    """Assign sample masks to images by name; a single mask applies to every image."""
    if len(files) == 1:
        for image in images:
            image.mask = files[0]
    elif files:
        match(images, "mask", files, note)
        unmasked = [image.path for image in images if image.mask is None]
        if unmasked:
            note(f"No mask for {counted(len(unmasked), 'image')}, used completely: {_few(unmasked)}.")


def match(
    images: Sequence[BatchImage],
    what: Literal["labels", "truth", "mask", "object_classes"],
    files: Sequence[Path],
    note: Callable[[str], None],
) -> None:
    """Assign label, ground-truth or mask files to images, by name.

    Args:
        images: images of the run; their fields are set.
        what: name of the field.
        files: files in any order.
        note: called with messages for the user.

    Raises:
        InputError: two files match one image, or no file matches.
    """
    matched, unmatched = match_labels([image.path for image in images], files, what)
    if unmatched and not matched:
        names = ", ".join(image.path.stem for image in images[:3])
        raise InputError(
            f"no {what} file matches an image by name: got {unmatched[0].name} for images such as {names}. "
            "Use matching names, for example a.png and a_labels.png."
        )
    for image in images:
        setattr(image, what, matched.get(image.path))
    if unmatched:
        note(f"Ignored {counted(len(unmatched), f'{what} file')} without an image: {_few(unmatched)}.")


def is_table(path: Path) -> bool:
    """Return whether a file of object classes is a CSV table; other files are labels."""
    return path.suffix.lower() == ".csv"


def example_files(patterns: Paths, images: Sequence[Path] | dict[Path, bool]) -> list[Path]:
    """Return the files with examples of object classes: CSV tables, or label files.

    Raises:
        InputError: a file does not exist.
        OptionError: tables and label files together.
    """
    tables = [expanded(pattern) for pattern in as_list(patterns) if is_table(Path(pattern))]
    others = [pattern for pattern in as_list(patterns) if not is_table(Path(pattern))]
    if tables and others:
        raise OptionError(
            f"object_classes has the table {tables[0]} and the label file {others[0]}. Pass one kind of files."
        )
    for path in tables:
        check_file(path, "pass a CSV file with the columns object and object_class")
    return tables or find_label_files(others, images)


def _few(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (" ..." if len(paths) > 5 else "")


def infer_axes(images: Sequence[BatchImage], reading: ReadOptions, note: Callable[[str], None]) -> None:
    """Read an image of 3 or 4 colour planes as a stack if its labels, ground truth or mask have as many pages.

    tifffile writes arrays of 3 or 4 slices as colour planes. Labels stored the same way are interpreted as pages if
    their values are too small for colours.
    """
    for image in images:
        planes = 0 if reading.axes is not None else stored_planes(image.path)
        for partner in (image.labels, image.truth, image.mask) if planes else ():
            if partner is None or partner.suffix.lower() not in (".tif", ".tiff"):
                continue
            shape = stored_shape(partner)
            if shape is None:
                continue
            if shape[0] == planes or (stored_planes(partner) == planes and _numbers(partner)):
                image.axes = "ZYX"
                note(
                    f"{image.path.name} is read as a stack of {counted(planes, 'slice')}, because {partner.name} has "
                    "as many pages. If its planes are colours, use axes=CYX."
                )
                break


def _numbers(path: Path) -> bool:
    """Return whether the values of a label file are class numbers instead of colours."""
    return decode(path).pages.max(initial=0) <= _NUMBERS


def common_channel_count(channels: dict[Path, int], what: str) -> int:
    """Return the common number of channels of several images.

    Args:
        channels: number of channels of each image.
        what: name of the images, for the message.

    Raises:
        InputError: the numbers differ.
    """
    if len(set(channels.values())) > 1:
        counts_by_image = ", ".join(f"{path.name}: {count}" for path, count in channels.items())
        raise InputError(
            f"{what} differ in their number of channels ({counts_by_image}). Select channels with channel."
        )
    return next(iter(channels.values()))


def check_channels(path: Path, channels: int, model: Model) -> None:
    """Raise InputError if an image and the training images of a model differ in their number of channels."""
    if model.channels not in (None, channels):
        raise InputError(
            f"{path} has {counted(channels, 'channel')}, but the model was trained with {model.channels}. Select "
            "channels with channel."
        )
