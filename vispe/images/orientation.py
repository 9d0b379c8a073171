"""Orientation tag of image files (TIFF and EXIF tag 274), and conversion of labels between frames.

Web browsers and labelme apply the tag; Fiji, napari, ilastik and tifffile show the pixels as stored. Labels drawn in
one kind of program do not match the pixels shown by the other kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from vispe.errors import InputError, OptionError, counted, did_you_mean

Orientation = Literal["stored", "tag"]
"""Reading of files with a tag: pixels as stored, or rotated and mirrored by the tag."""

MEANING = {
    2: "mirrored left to right",
    3: "rotated by 180 degrees",
    4: "mirrored top to bottom",
    5: "transposed",
    6: "rotated by 90 degrees clockwise",
    7: "transposed along the other diagonal",
    8: "rotated by 90 degrees counter-clockwise",
}
_INVERSE = {6: 8, 8: 6}
_FLIPS = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}


def known_tag(value: object) -> int:
    """Return a stored tag as 1 to 8; 1 (identity) for invalid values."""
    return int(value) if isinstance(value, int) and value in MEANING else 1


def oriented(pages: np.ndarray, tag: int) -> np.ndarray:
    """Rotate and mirror pages (z, h, w, ...) by a tag; returns a view."""
    if tag >= 5:
        pages = pages.swapaxes(1, 2)
    return np.flip(pages, _FLIPS[tag]) if tag in _FLIPS else pages


def inverse_tag(tag: int) -> int:
    """Return the tag of the inverse transform."""
    return _INVERSE.get(tag, tag)


def as_stored(pages: np.ndarray, tag: int) -> np.ndarray:
    """Invert `oriented`; returns a view."""
    return oriented(pages, inverse_tag(tag))


def oriented_size(size: tuple | None, tag: int) -> tuple | None:
    """Swap the first two entries of a size or resolution if the tag transposes the image."""
    return (size[1], size[0], *size[2:]) if size is not None and tag >= 5 else size


def check_orientation(value: str) -> None:
    """Raise OptionError unless the value is 'stored' or 'tag'."""
    if value not in get_args(Orientation):
        hint = did_you_mean(str(value), get_args(Orientation))
        raise OptionError(f"orientation must be one of stored, tag, got {value!r}.{hint}")


@dataclass(frozen=True)
class Frame:
    """Frame in which the pixels of an image were read.

    Attributes:
        tag: orientation tag of the file, 1 if it has none.
        applied: whether the pixels were rotated and mirrored by the tag.
        planes: slice and time (z, t) of each page, from 0 in the file, if its pages are along several axes; else ().
        axes: letters of the page axes of the file, slowest first.
        selected: number of each page, from 0 in the file, if some pages are selected; () for all pages.
    """

    tag: int = 1
    applied: bool = False
    planes: tuple[tuple[int, int], ...] = ()
    axes: str = ""
    selected: tuple[int, ...] = ()

    def with_pages(self, axes: Sequence[tuple[str, int]], pages: Sequence[int] | np.ndarray) -> "Frame":
        """Return the frame of selected pages of a file with these page axes."""
        count = np.prod([n for _, n in axes], dtype=np.int64)
        selected = () if len(pages) == count else tuple(map(int, pages))
        letters = "".join(letter for letter, _ in axes)
        return replace(self, planes=planes_of(axes, pages), axes=letters, selected=selected)

    def plane(self, page: int) -> tuple[int, int] | None:
        """Return slice and time (z, t) of a page of the image, from 0 in the file; None for a file of one page."""
        if self.planes or not self.axes:
            return self.planes[page] if self.planes else None
        number = self.selected[page] if self.selected else page
        return (0, number) if self.axes == "T" else (number, 0)

    def note(self, name: str) -> str | None:
        """Return a note about the orientation tag of an image; None without a tag."""
        if self.tag == 1:
            return None
        what = f"the orientation tag {self.tag} ({MEANING[self.tag]})"
        if self.applied:
            return (
                f"{name} has {what}, which is applied: results match the file in programs that apply it (web browsers, "
                "labelme), not in Fiji, napari or ilastik."
            )
        return (
            f"{name} has {what}, which is not applied: pixels, labels and results are as stored, as in Fiji, napari "
            "and ilastik; for labels drawn in programs that apply the tag (web browsers, labelme), set "
            "`orientation=tag`."
        )

    def hint(self) -> str:
        """Return a clause about the tag for messages about sizes and positions; empty if there is no tag."""
        if self.tag == 1:
            return ""
        how = "applied" if self.applied else "not applied"
        return f" (it has the orientation tag {self.tag}, {MEANING[self.tag]}, which is {how}; see `orientation`)"

    def page_order(self, path: Path, planes: tuple[tuple[int, int], ...]) -> list[int] | None:
        """Return the pages of a label file in the order of the image, None if they are in this order.

        Fiji saves T before Z, also of images that store Z first. Slices and times of a selection count from 0 in the
        label file.

        Args:
            path: the label file.
            planes: slice and time of each page of the label file.

        Raises:
            InputError: the label file has as many pages as the image, but other slices and times.
        """
        ours, theirs = _ranked(self.planes), _ranked(planes)
        unique = len(set(ours)) == len(ours) == len(theirs) == len(set(theirs))
        if not unique or ours == theirs:
            return None
        if set(ours) != set(theirs):
            raise InputError(
                f"{path}: labels, truth and masks must have the slices and times of the image, got {_counts(theirs)} "
                f"for {_counts(ours)}. Save the file with the axes of the image, or as a stack with one axis of pages."
            )
        numbers = {plane: number for number, plane in enumerate(theirs)}
        return [numbers[plane] for plane in ours]

    def fitted(
        self, path: Path, pages: np.ndarray, label_tag: int, size: tuple[int, int]
    ) -> tuple[np.ndarray, list[str]]:
        """Convert label pages, as stored, to this frame.

        The tag of the label file takes precedence. Without a tag in the label file, the size selects the
        frame if the tag of the image swaps height and width; if both frames have the same size, labels are
        assumed to be in the frame of the image.

        Args:
            path: the label file.
            pages: (z, h, w, ...).
            label_tag: orientation tag of the label file.
            size: height and width of the image in this frame.

        Returns:
            The pages, in the size of the image if one of the frames has it, and notes.
        """
        if label_tag == self.tag == 1:
            return pages, []
        shown = pages if self.applied else as_stored(pages, self.tag)
        stored = oriented(pages, self.tag) if self.applied else pages
        if label_tag != 1:
            by_tag = oriented(pages, label_tag)
            by_tag = by_tag if self.applied else as_stored(by_tag, self.tag)
            fits = by_tag.shape[1:3] == size
            note = f"{path.name} has the orientation tag {label_tag} ({MEANING[label_tag]})"
            if label_tag == self.tag and not self.applied:
                return pages, []  # labels and image are stored in the same frame
            if not fits and pages.shape[1:3] == size:
                return pages, [
                    f"{note}, which is not applied: the labels have the size of the image as stored."
                ]
            return by_tag, [f"{note}, which is applied to the labels."]
        first, second = (shown, stored) if self.applied else (stored, shown)
        chosen = second if first.shape[1:3] != size and second.shape[1:3] == size else first
        if chosen is pages:
            return pages, []
        where = "the pixels as stored" if chosen is stored else "the image with its tag applied"
        return chosen, [
            f"{path.name} has the size of {where}: the labels are rotated with the orientation tag {self.tag} of the "
            "image."
        ]


def planes_of(
    axes: Sequence[tuple[str, int]], pages: Sequence[int] | np.ndarray
) -> tuple[tuple[int, int], ...]:
    """Return slice and time (z, t) of pages of a file, () unless it has several page axes.

    Example:
        >>> planes_of((("T", 2), ("Z", 3)), [0, 4])
        ((0, 0), (1, 1))
    """
    if len(axes) < 2:
        return ()
    numbers = dict(zip((a for a, _ in axes), np.unravel_index(pages, [n for _, n in axes]), strict=True))
    z, t = (numbers.get(letter, np.zeros(len(pages), int)).tolist() for letter in "ZT")
    return tuple(zip(z, t, strict=True))


def _ranked(planes: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return slices and times numbered from 0 without gaps."""
    slices, times = (sorted({plane[axis] for plane in planes}) for axis in (0, 1))
    return [(slices.index(z), times.index(t)) for z, t in planes]


def _counts(planes: Sequence[tuple[int, int]]) -> str:
    """Return the numbers of slices and times for a message."""
    slices, times = (len({plane[axis] for plane in planes}) for axis in (0, 1))
    return f"{counted(slices, 'slice')} at {counted(times, 'time')}"


AS_STORED = Frame()
"""Frame of an image without an orientation tag."""
