"""Base class of file-based image sources, whose files contain one or several pages (TIFF stacks)."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.train.data.dataset import Source, check_not_empty, index, shorten
from vispe.train.data.image_reading import Reading, as_tensor


class PageSource(Source):
    """Pages of files by index; accessing a page reads its file, and the last stack is cached.

    Args:
        kind: name of the kind in descriptions.
        where: requested folders or files.
        reading: reading options.
        licence: licence in the model card.
        pages: number of pages of each file.
        damaged: skipped files, with the reasons.

    Raises:
        InputError: no images remain.
    """

    def __init__(
        self,
        kind: str,
        where: Sequence[str | Path],
        reading: Reading,
        licence: str,
        pages: Sequence[int],
        damaged: Sequence[tuple[str, str]],
    ) -> None:
        self.reading, self.licence = reading, licence
        self._kind, self._where, self._lost = kind, list(map(str, where)), len(damaged)
        # cumulative page counts: file k contains the images from _ends[k - 1] to _ends[k]
        self._ends = np.cumsum(pages, dtype=np.int64)
        self._last: tuple[int, np.ndarray] | None = None
        if damaged:
            count = f"{counted(len(damaged), 'damaged file')} {'is' if len(damaged) == 1 else 'are'}"
            names, reasons = zip(*damaged, strict=True)
            warnings.warn(f"{count} skipped: {shorten(names)}; the first: {reasons[0]}", stacklevel=3)
        check_not_empty(len(self), shorten(self._where))

    @abstractmethod
    def _label(self, k: int) -> str:
        """Return the name of file k in messages."""

    @abstractmethod
    def _pages(self, k: int) -> np.ndarray:
        """Read all pages of file k, (n, h, w, 1 or 3)."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> Tensor:
        k, page, count = self._locate(i)
        if self._last is None or self._last[0] != k:
            try:
                pages = check_page_count(self._pages(k), count, self._label(k))
            except InputError as error:
                raise with_hint(error) from error
            if count == 1:
                return as_tensor(pages[0])
            self._last = k, pages
        return as_tensor(self._last[1][page])

    def name(self, i: int) -> str:
        """Return the file of image i, and its page in a stack."""
        k, page, count = self._locate(i)
        return self._label(k) if count == 1 else f"page {page} of {self._label(k)}"

    def describe(self) -> dict[str, Any]:
        """Return kind, count, location, licence, reading options, and the numbers of files and damaged files."""
        facts = {"kind": self._kind, "count": len(self), "where": self._where, "licence": self.licence}
        return {**facts, "files": len(self._ends), "damaged": self._lost, **self.reading.describe()}

    def _locate(self, i: int) -> tuple[int, int, int]:
        """Return the file of image i, its page in the file, and the number of pages."""
        i = index(i, len(self))
        k = int(np.searchsorted(self._ends, i, side="right"))
        first = int(self._ends[k - 1]) if k else 0
        return k, i - first, int(self._ends[k]) - first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def with_hint(error: InputError) -> InputError:
    """Return the error of a damaged file with `skip_damaged` as an additional remedy."""
    return InputError(f"{str(error).removesuffix('.')}, or skip such files with skip_damaged=true.")


def check_page_count(pages: np.ndarray, count: int, label: str) -> np.ndarray:
    """Return the pages of a file after checking their number.

    Raises:
        InputError: the number differs from `count`.
    """
    if len(pages) != count:
        raise InputError(
            f"{label}: expected {counted(count, 'page')} from its header and suffix, got {len(pages)}. Use the "
            "suffix .tif for stacks."
        )
    return pages
