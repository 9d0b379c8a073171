"""Sources whose files hold one picture or, as TIFF stacks do, several pages."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import InputError
from vispe.train.data.dataset import Source, filled, index, some
from vispe.train.data.image_reading import Reading, picture


class PageSource(Source):
    """Pages of files by number; a page costs the reading of its file, and the last stack read is kept.

    Args:
        kind: what a description calls it.
        where: folders or files that were asked for.
        reading: how pictures are read.
        licence: what a card says of it.
        pages: number of pages of each file.
        damaged: files that were left out, with the reasons.

    Raises:
        InputError: no picture is left.
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
        # file k holds the pictures from the end of file k - 1 up to its own
        self._ends = np.cumsum(pages, dtype=np.int64)
        self._last: tuple[int, np.ndarray] | None = None
        if damaged:
            count = "1 damaged file is" if len(damaged) == 1 else f"{len(damaged)} damaged files are"
            names, reasons = zip(*damaged, strict=True)
            warnings.warn(f"{count} left out: {some(names)}; the first: {reasons[0]}", stacklevel=3)
        filled(len(self), some(self._where))

    @abstractmethod
    def _label(self, k: int) -> str:
        """Return what messages call file k."""

    @abstractmethod
    def _pages(self, k: int) -> np.ndarray:
        """Read all pages of file k, (n, h, w, 1 or 3)."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> Tensor:
        k, page, count = self._locate(i)
        if self._last is None or self._last[0] != k:
            try:
                pages = counted(self._pages(k), count, self._label(k))
            except InputError as error:
                raise hinted(error) from error
            if count == 1:
                return picture(pages[0])
            self._last = k, pages
        return picture(self._last[1][page])

    def name(self, i: int) -> str:
        """Return the file of picture i, and its page in a stack."""
        k, page, count = self._locate(i)
        return self._label(k) if count == 1 else f"page {page} of {self._label(k)}"

    def describe(self) -> dict[str, Any]:
        """Return kind, count, where, licence, how pictures are read, and how many files and damaged ones there are."""
        known = {"kind": self._kind, "count": len(self), "where": self._where, "licence": self.licence}
        return {**known, "files": len(self._ends), "damaged": self._lost, **self.reading.describe()}

    def _locate(self, i: int) -> tuple[int, int, int]:
        """Return the file of picture i, its page in there, and the number of pages."""
        i = index(i, len(self))
        k = int(np.searchsorted(self._ends, i, side="right"))
        first = int(self._ends[k - 1]) if k else 0
        return k, i - first, int(self._ends[k]) - first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def hinted(error: InputError) -> InputError:
    """Return the error of a damaged file with a word on what may be done about it."""
    return InputError(f"{str(error).removesuffix('.')}; or leave such files out by skip_damaged=true.")


def counted(pages: np.ndarray, count: int, label: str) -> np.ndarray:
    """Return the pages of a file, which were counted before.

    Raises:
        InputError: there are more or fewer.
    """
    if len(pages) != count:
        raise InputError(
            f"{label} holds {len(pages)} pages, and {count} were counted by its head and ending; give stacks the "
            "ending .tif."
        )
    return pages
