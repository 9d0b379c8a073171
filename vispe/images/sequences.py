"""Lazy sequences of images and masks, read from files or rendered as synthetic textures on access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.images.file_search import match_files
from vispe.images.labels.truth_files import MaskConvention, joint_convention, read_truth
from vispe.images.labels.unlabelled_values import counts_up, void_level
from vispe.images.normalize import normalize
from vispe.images.orientation import AS_STORED
from vispe.images.read import read_image

_SINGLE = (".png", ".jpg", ".jpeg", ".bmp")


class FileImages(Sequence[Tensor]):
    """Sequence of all pages of image files as tensors; only the last file is cached.

    Args:
        paths: image files.
        tensor: converts a page (H, W, c) in [0, 1] to an image (c, H, W).
        mode: unit of the grey limits: 'stack', 'image' or 'none'.
        clip: percentiles that are mapped to 0 and 1.

    Attributes:
        names: names of the pages; files with one name have that of their folder too.
        pages: file and page of each image.
        notes: notes of the files that were read, without duplicates.

    Raises:
        InputError: a file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tensor: Callable[[np.ndarray], Tensor],
        mode: str = "stack",
        clip: tuple[float, float] = (0.5, 99.5),
    ) -> None:
        self._tensor, self._mode, self._clip = tensor, mode, clip
        self._last: tuple[Path, np.ndarray] | None = None
        self.frame = AS_STORED  # of the last file
        self.notes: list[str] = []
        self.pages = [(p, z) for p in paths for z in range(self._count(p))]
        multipage = {p for p, z in self.pages if z}
        label = _unique_names(dict.fromkeys(paths))
        self.names = tuple(f"{label[p]} page {z}" if p in multipage else label[p] for p, z in self.pages)

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.pages)

    def __getitem__(self, number: int) -> Tensor:
        """Return one image (c, H, W)."""
        path, page = self.pages[number]
        return self._tensor(self._pages(path)[page])

    def shape(self, path: Path) -> tuple[int, int, int]:
        """Return pages, height and width of a file."""
        z, h, w = self._pages(path).shape[:3]
        return z, h, w

    def _count(self, path: Path) -> int:
        return 1 if path.suffix.lower() in _SINGLE else len(self._pages(path))

    def _pages(self, path: Path) -> np.ndarray:
        if self._last is None or self._last[0] != path:
            image = read_image(path, orientation="stored")
            pages, notes = normalize(image, self._mode, self._clip)
            self.notes += [n for n in (*image.notes, *notes) if n not in self.notes]
            self._last, self.frame = (path, pages), image.frame
        return self._last[1]


def _unique_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the names of files; for files with one name also their folder, or the complete path."""
    names = {path: path.name for path in paths}
    for longer in (lambda path: f"{path.parent.name}/{path.name}", str):
        count = Counter(names.values())
        names = {path: longer(path) if count[name] > 1 else name for path, name in names.items()}
    return names


class FileMasks(Sequence[np.ndarray]):
    """Sequence of the masks of a `FileImages`, 1..K and 0 for ignored pixels.

    Args:
        images: the images.
        files: mask files, matched to the image files by name (a.png with a.png or a_mask.png), or by order if no
            name matches and the numbers are equal.
        zero: whether the value 0 is the first class ('class') or ignored ('ignore').
        n_classes: K, or None to infer it from the masks.
        others: further masks with the same classes, such as those of validation images; grey levels are counted in
            all of them.

    Attributes:
        n_classes: K.
        notes: notes for the user.

    Raises:
        InputError: a mask is missing, does not match its image, or contains no classes.
    """

    def __init__(
        self,
        images: FileImages,
        files: Sequence[Path],
        zero: Literal["class", "ignore"] = "class",
        n_classes: int | None = None,
        others: Sequence[Path] = (),
    ) -> None:
        self._images, self._zero = images, zero
        self._last: tuple[Path, np.ndarray] | None = None
        # class of each value of a mask, and the first file with it
        self._classes: dict[int, tuple[int, Path]] = {}
        self.notes: list[str] = []
        self._files = self._match(list(dict.fromkeys(p for p, _ in images.pages)), files)
        self.n_classes = n_classes
        self._convention = MaskConvention()
        every = dict.fromkeys((*self._files.values(), *others))
        if n_classes is None:
            self.n_classes = self._count_classes(every)
        self._convention = joint_convention(every, self.n_classes, zero)
        for reason in self._convention.conflicts.values():
            raise InputError(reason)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return one mask (H, W)."""
        path, page = self._images.pages[number]
        return self._read(path)[page]

    def compare(self, other: FileMasks) -> None:
        """Compare the masks that are read from now on with those that `other` read: equal values must be one class."""
        self._classes = other._classes | self._classes

    def _read(self, image: Path) -> np.ndarray:
        if self._last is None or self._last[0] != image:
            shape = self._images.shape(image)
            file = self._files[image]
            mask = read_truth(
                file,
                shape,
                zero_is="ignore" if file in self._convention.from_one else self._zero,
                n_classes=self.n_classes,
                levels=self._convention.levels,
                note=self._note,
                frame=self._images.frame,
                on_values=lambda values: self._check_values(file, values),
            )
            self._last = image, mask
        return self._last[1]

    def _check_values(self, file: Path, values: Mapping[int, int]) -> None:
        """Raise `InputError` if a value is another class, or a class another value, than in an earlier mask."""
        for value, number in values.items():
            for earlier, (known, other) in self._classes.items():
                # masks of 0 and 1 and masks of 0 and 255 have the same two classes
                markers = [v for v in (value, earlier) if v != 1 and void_level([(v,)]) is None]
                if number and known == number and earlier != value and markers:
                    raise InputError(
                        f"{file}: class {number} is {value}, but it is {earlier} in {other}. Use one value for each "
                        "class in all masks."
                    )
            known, other = self._classes.setdefault(value, (number, file))
            if known != number:
                current, earlier = (f"class {n}" if n else "ignored" for n in (number, known))
                raise InputError(
                    f"{file}: the value {value} is {current}, but it is {earlier} in {other}. Use one value for each "
                    "class in all masks."
                )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _count_classes(self, files: Iterable[Path]) -> int:
        """Return the number of classes: from class numbers, otherwise the number of distinct grey levels."""
        try:
            return max(int(self._read(image).max()) for image in self._files)
        except InputError:
            levels: set[int] = set()
            for file in files:
                levels |= {int(v) for v in np.unique(read_image(file).pages)}
            levels -= {0} if self._zero == "ignore" else set()
            if len(levels) > 20:
                raise
            self._last, self._classes = None, {}
            *numbers, last = sorted(levels) or [0]
            if counts_up([(v,) for v in numbers]) and void_level([(last,)]):
                return numbers[-1] + (self._zero == "class")
            listed = ", ".join(map(str, sorted(levels)))
            self.notes.append(
                f"The masks contain the grey levels {listed}, which are the classes 1 to {len(levels)}."
            )
            return len(levels)

    def _match(self, images: list[Path], files: Sequence[Path]) -> dict[Path, Path]:
        matched, unmatched = match_files(images, files, "masks")
        if not matched and len(images) == len(files):
            self.notes.append("No mask has the name of an image; masks were matched to images by order.")
            return dict(zip(images, files, strict=True))
        missing = next((path for path in images if path not in matched), None)
        if missing is not None:
            raise InputError(
                f"{missing} has no mask, got {counted(len(files), 'mask file')}. Name it {missing.stem}_mask.png, or "
                "pass as many masks as images."
            )
        if unmatched:
            names = ", ".join(path.name for path in unmatched[:5])
            self.notes.append(f"Skipped {counted(len(unmatched), 'mask')} without an image: {names}.")
        return matched
