"""Image source of folders, searched recursively in natural order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.file_search import natural
from vispe.images.formats.decoded_image import SUFFIXES
from vispe.images.paths import expanded
from vispe.train.data.dataset import digest
from vispe.train.data.image_reading import Reading, count_pages
from vispe.train.data.paged_files import PageSource, check_page_count


class FolderSource(PageSource):
    """All images of one or several folders: PNG, JPEG, TIFF, BMP and WebP of any bit depth; stacks page by page.

    Files are in natural order of their paths (2 before 10), hidden files and folders are skipped, and symbolic links
    are followed. Headers of TIFF files are read during construction to count pages, pixels on access. Accessing a page
    reads its complete file (the last stack is cached), so large stacks should be stored as single pages.

    Args:
        folder: a folder, an image file, or several of them.
        recursive: search subfolders.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: channels to read, by number or name, for files that do not have 1 or 3.
        skip_damaged: read every file once during construction and skip unreadable ones, with one warning; otherwise
            an unreadable file is an error on access.
        licence: licence in the model card.

    Attributes:
        files: paths of the images.
        damaged: paths of the skipped files.

    Raises:
        InputError: the folder does not exist or has no images, or the header of a TIFF file is damaged.
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
        self.roots = tuple(map(expanded, [folder] if isinstance(folder, str | Path) else folder))
        reading = Reading(normalize, channel)
        readable: list[tuple[str, Path, int]] = []
        damaged: list[tuple[Path, str]] = []
        for root in self.roots:
            for path in _below(root, recursive):
                try:
                    pages = count_pages(path)
                    if skip_damaged:
                        check_page_count(reading.file(path), pages, str(path))
                except InputError as error:
                    if not skip_damaged:
                        raise
                    damaged.append((path, str(error)))
                else:
                    name = path.relative_to(root).as_posix() if root.is_dir() else path.name
                    readable.append((name, path, pages))
        self.damaged = tuple(path for path, _ in damaged)
        self.files = tuple(path for _, path, _ in readable)
        self._names = tuple(name for name, _, _ in readable)
        reasons = [(str(path), reason) for path, reason in damaged]
        super().__init__("folder", self.roots, reading, licence, [pages for *_, pages in readable], reasons)

    def _label(self, k: int) -> str:
        return str(self.files[k])

    def _pages(self, k: int) -> np.ndarray:
        return self.reading.file(self.files[k])

    def fingerprint(self) -> str:
        """Return a sha256 of relative names, sizes in bytes, and the reading options."""
        sizes = [path.stat().st_size for path in self.files]
        return digest("folder", self._names, sizes, *self.reading.describe().values())


def _below(root: Path, recursive: bool) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"the folder {root} does not exist. Check the name.")
    images: list[Path] = []
    visited: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        # a link to a parent folder
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if recursive and not name.startswith("."))
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        images += [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not images:
        raise InputError(f"the folder {root} contains no image with {' '.join(SUFFIXES)}.")
    return sorted(images, key=lambda path: (natural(path.relative_to(root)), str(path)))
