"""Pictures of folders, in depth and in an order that does not change."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import InputError
from vispe.images.find import natural
from vispe.images.formats.decoded import SUFFIXES
from vispe.images.paths import expanded
from vispe.train.data.reading import Reading, count_pages, picture
from vispe.train.data.source import Source, digest, filled, index, some


class FolderSource(Source):
    """Every picture below one or several folders: PNG, JPEG, TIFF and BMP of any depth; pages of stacks one by one.

    Files are in natural order of their paths (2 before 10), hidden files and folders are passed over, and symbolic
    links are followed. The heads of TIFF files are read at once to count pages, everything else when it is asked for. A
    page costs the reading of its whole file (the last stack read is kept), so large stacks are better stored as single
    pages.

    Args:
        folder: a folder, an image file, or several of them.
        recursive: look into folders inside folders.
        normalize: see `vispe.train.data.reading.Reading`.
        channel: see there.
        skip_damaged: read every file once, at once (as fast as training without workers reads them), and leave out what
            cannot be read, with one warning that names the files; otherwise such a file is an error when it is read.
        licence: what a card shall say of it.

    Attributes:
        files: the paths.
        damaged: paths that were left out.

    Raises:
        InputError: no such folder, no picture in it, or the head of a TIFF file is damaged.
    """

    def __init__(
        self,
        folder: str | Path | Sequence[str | Path],
        *,
        recursive: bool = True,
        normalize: str = "auto",
        channel: int | str | Sequence[int | str] | None = None,
        skip_damaged: bool = False,
        licence: str = "",
    ) -> None:
        roots = [folder] if isinstance(folder, str | Path) else list(folder)
        self.reading = Reading(normalize, channel)
        self.licence = licence
        self.roots = tuple(expanded(root) for root in roots)
        found = [(root, path) for root in self.roots for path in _below(root, recursive)]
        kept: list[tuple[str, Path, int]] = []
        damaged: list[tuple[Path, str]] = []
        for root, path in found:
            try:
                pages = count_pages(path)
                if skip_damaged:
                    self._checked(self.reading.file(path), path, pages)
            except InputError as error:
                if not skip_damaged:
                    raise
                damaged.append((path, str(error)))
                continue
            kept.append((path.relative_to(root).as_posix() if root.is_dir() else path.name, path, pages))
        self.damaged = tuple(path for path, _ in damaged)
        self.files = tuple(path for _, path, _ in kept)
        self._names = tuple(name for name, _, _ in kept)
        self._ends = np.cumsum([pages for _, _, pages in kept], dtype=np.int64)
        self._last: tuple[int, np.ndarray] | None = None
        warn_damaged([str(path) for path in self.damaged], [reason for _, reason in damaged])
        filled(len(self), some([str(root) for root in self.roots]))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _locate(self, i: int) -> tuple[int, int, int]:
        i = index(i, len(self))
        k = int(np.searchsorted(self._ends, i, side="right"))
        first = int(self._ends[k - 1]) if k else 0
        return k, i - first, int(self._ends[k]) - first

    def __getitem__(self, i: int) -> Tensor:
        k, page, count = self._locate(i)
        if self._last is not None and self._last[0] == k:
            return picture(self._last[1][page])
        try:
            pages = self._checked(self.reading.file(self.files[k]), self.files[k], count)
        except InputError as error:
            raise hinted(error) from error
        if count > 1:
            self._last = k, pages
        return picture(pages[page])

    @staticmethod
    def _checked(pages: np.ndarray, path: Path, count: int) -> np.ndarray:
        if len(pages) != count:
            raise InputError(
                f"{path} holds {len(pages)} pages, and {count} were counted by its head and ending; give stacks the "
                "ending .tif."
            )
        return pages

    def name(self, i: int) -> str:
        """Return the path of picture i, and its page in a stack."""
        k, page, count = self._locate(i)
        return str(self.files[k]) if count == 1 else f"page {page} of {self.files[k]}"

    def describe(self) -> dict[str, Any]:
        """Return kind, count, where, licence, how pictures are read, and how many files and damaged ones there are."""
        return {
            "kind": "folder",
            "count": len(self),
            "where": [str(root) for root in self.roots],
            "licence": self.licence,
            "files": len(self.files),
            "damaged": len(self.damaged),
            **self.reading.describe(),
        }

    def fingerprint(self) -> str:
        """Return a sha256 over names below the folders, sizes in bytes, and how pictures are read."""
        sizes = [path.stat().st_size for path in self.files]
        return digest("folder", self._names, sizes, *self.reading.describe().values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def hinted(error: InputError) -> InputError:
    """Return the error of a damaged file with a word on what may be done about it."""
    return InputError(f"{str(error).removesuffix('.')}; or leave such files out by skip_damaged=true.")


def warn_damaged(names: Sequence[str], reasons: Sequence[str]) -> None:
    """Warn once of files that are left out; the first reason stands for all."""
    if names:
        count = "1 damaged file is" if len(names) == 1 else f"{len(names)} damaged files are"
        warnings.warn(f"{count} left out: {some(names)}; the first: {reasons[0]}", stacklevel=3)


def _below(root: Path, recursive: bool) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"the folder {root} does not exist; check the name.")
    found: list[Path] = []
    seen: set[str] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder that holds it
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if recursive and not name.startswith("."))
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not found:
        raise InputError(f"the folder {root} holds no image; looked for {' '.join(SUFFIXES)}.")
    return sorted(found, key=lambda path: (natural(path.relative_to(root)), str(path)))
