"""Pictures of folders, in depth and in an order that does not change."""

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
from vispe.train.data.paged_files import PageSource, counted


class FolderSource(PageSource):
    """Every picture below one or several folders, PNG, JPEG, TIFF, BMP and WebP of any depth; stacks page by page.

    Files are in natural order of their paths (2 before 10), hidden files and folders are passed over, and symbolic
    links are followed. The heads of TIFF files are read at once to count pages, everything else when it is asked for. A
    page costs the reading of its whole file (the last stack read is kept), so large stacks are better stored as single
    pages.

    Args:
        folder: a folder, an image file, or several of them.
        recursive: look into folders inside folders.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: which channels to keep, by number or name, where a file has other than 1 or 3.
        skip_damaged: read every file once, at once (as fast as training without workers reads them), and leave out what
            cannot be read, with one warning that names the files; otherwise such a file is an error when it is read.
        licence: what a card says of it.

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
        self.roots = tuple(map(expanded, [folder] if isinstance(folder, str | Path) else folder))
        reading = Reading(normalize, channel)
        kept: list[tuple[str, Path, int]] = []
        damaged: list[tuple[Path, str]] = []
        for root in self.roots:
            for path in _below(root, recursive):
                try:
                    pages = count_pages(path)
                    if skip_damaged:
                        counted(reading.file(path), pages, str(path))
                except InputError as error:
                    if not skip_damaged:
                        raise
                    damaged.append((path, str(error)))
                else:
                    name = path.relative_to(root).as_posix() if root.is_dir() else path.name
                    kept.append((name, path, pages))
        self.damaged = tuple(path for path, _ in damaged)
        self.files = tuple(path for _, path, _ in kept)
        self._names = tuple(name for name, _, _ in kept)
        lost = [(str(path), reason) for path, reason in damaged]
        super().__init__("folder", self.roots, reading, licence, [pages for *_, pages in kept], lost)

    def _label(self, k: int) -> str:
        return str(self.files[k])

    def _pages(self, k: int) -> np.ndarray:
        return self.reading.file(self.files[k])

    def fingerprint(self) -> str:
        """Return a sha256 over names below the folders, sizes in bytes, and how pictures are read."""
        sizes = [path.stat().st_size for path in self.files]
        return digest("folder", self._names, sizes, *self.reading.describe().values())


def _below(root: Path, recursive: bool) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"the folder {root} does not exist; check the name.")
    images: list[Path] = []
    seen: set[str] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        # a link to a folder that holds it
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if recursive and not name.startswith("."))
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        images += [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not images:
        raise InputError(f"the folder {root} holds no image; looked for {' '.join(SUFFIXES)}.")
    return sorted(images, key=lambda path: (natural(path.relative_to(root)), str(path)))
