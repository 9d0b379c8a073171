"""Pictures of tar files as webdataset stores them, read at random and without unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import InputError
from vispe.images.paths import expanded
from vispe.train.data.folder import hinted, warn_damaged
from vispe.train.data.reading import Reading, picture
from vispe.train.data.source import Source, digest, filled, index, some
from vispe.train.data.tar_index import Member, content, expand, indexed


class TarSource(Source):
    """Every picture of one or several uncompressed tar files, in stored order; pages of TIFF stacks one by one.

    Where each picture lies is found once and kept in a JSON file beside each tar file, or in a folder of one's own.

    Args:
        tar: path, glob or brace pattern such as `shards/train-{000..146}.tar`, or several of them.
        extensions: which files of a sample are pictures, by what follows the first dot of their names, such as `jpg` or
            `rgb.png`; None takes every PNG, JPEG, TIFF and BMP, if no sample has two of them.
        cache: folder for the indices; None keeps them beside the tar files.
        normalize: see `vispe.train.data.reading.Reading`.
        channel: see there.
        skip_damaged: read every picture once and leave out what cannot be read, with one warning that names the files;
            the result is kept in the index. Otherwise such a file is an error when it is read.
        licence: what a card shall say of it.

    Attributes:
        tars: the tar files.
        damaged: pictures that were left out.

    Raises:
        InputError: no such file, not an uncompressed tar file, no picture in there, a sample with several pictures, or
            an index that cannot be written.
    """

    def __init__(
        self,
        tar: str | Path | Sequence[str | Path],
        *,
        extensions: str | Sequence[str] | None = None,
        cache: str | Path | None = None,
        normalize: str = "auto",
        channel: int | str | Sequence[int | str] | None = None,
        skip_damaged: bool = False,
        licence: str = "",
    ) -> None:
        self.tars = tuple(expand(tar))
        self.reading = Reading(normalize, channel)
        self.licence = licence
        chosen = [extensions] if isinstance(extensions, str) else extensions
        self.extensions = None if chosen is None else tuple(e.lower().lstrip(".") for e in chosen)
        folder = None if cache is None else expanded(cache)
        members = [
            (k, m)
            for k, path in enumerate(self.tars)
            for m in _chosen(
                indexed(path, folder, self.reading if skip_damaged else None), path, self.extensions
            )
        ]
        damaged = [(k, m) for k, m in members if m.damage]
        unread = next((m for _, m in damaged if not m.pages), None)
        if unread is not None and not skip_damaged:
            raise hinted(InputError(unread.damage))
        self._members = [(k, m) for k, m in members if not (skip_damaged and m.damage)]
        self.damaged = tuple(f"{self.tars[k]}: {m.name}" for k, m in damaged) if skip_damaged else ()
        self._ends = np.cumsum([m.pages for _, m in self._members], dtype=np.int64)
        self._last: tuple[int, np.ndarray] | None = None
        warn_damaged(self.damaged, [m.damage for _, m in damaged])
        filled(len(self), some([str(path) for path in self.tars]))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _locate(self, i: int) -> tuple[int, int]:
        i = index(i, len(self))
        k = int(np.searchsorted(self._ends, i, side="right"))
        return k, i - (int(self._ends[k - 1]) if k else 0)

    def __getitem__(self, i: int) -> Tensor:
        k, page = self._locate(i)
        if self._last is not None and self._last[0] == k:
            return picture(self._last[1][page])
        tar, member = self._members[k]
        label = f"{self.tars[tar]}: {member.name}"
        try:
            pages = self.reading.content(content(self.tars[tar], member), label)
            if len(pages) != member.pages:
                raise InputError(
                    f"{label} holds {len(pages)} pages, and {member.pages} were counted by its head and ending; give "
                    "stacks the ending .tif."
                )
        except InputError as error:
            raise hinted(error) from error
        if len(pages) > 1:
            self._last = k, pages
        return picture(pages[page])

    def name(self, i: int) -> str:
        """Return tar file and name of picture i, and its page in a stack."""
        k, page = self._locate(i)
        tar, member = self._members[k]
        label = f"{self.tars[tar]}: {member.name}"
        return label if member.pages == 1 else f"page {page} of {label}"

    def describe(self) -> dict[str, Any]:
        """Return kind, count, where, licence, how pictures are read, and how many files and damaged ones there are."""
        return {
            "kind": "tar",
            "count": len(self),
            "where": [str(path) for path in self.tars],
            "licence": self.licence,
            "files": len(self._members),
            "damaged": len(self.damaged),
            "extensions": None if self.extensions is None else list(self.extensions),
            **self.reading.describe(),
        }

    def fingerprint(self) -> str:
        """Return a sha256 over names of tar files, names and sizes of pictures, and how they are read."""
        members = [(self.tars[k].name, m.name, m.size) for k, m in self._members]
        return digest("tar", members, *self.reading.describe().values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def _chosen(members: list[Member], path: Path, extensions: tuple[str, ...] | None) -> list[Member]:
    if extensions is not None:
        return [m for m in members if m.extension in extensions]
    seen: dict[str, Member] = {}
    for member in members:
        other = seen.setdefault(member.sample, member)
        if other is not member:
            raise InputError(
                f"the sample {member.sample} of {path} has several pictures ({other.extension} and "
                f"{member.extension}); choose by extensions=, such as {other.extension}."
            )
    return members
