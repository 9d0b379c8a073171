"""Pictures of tar files as webdataset stores them, read at random and without unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.images.paths import expanded
from vispe.train.data.dataset import digest
from vispe.train.data.image_reading import Reading
from vispe.train.data.paged_files import PageSource, hinted
from vispe.train.data.tar_index import Member, content, expand, indexed


class TarSource(PageSource):
    """Every picture of one or several uncompressed tar files, in stored order; pages of TIFF stacks one by one.

    Where each picture lies is found once and kept in a JSON file beside each tar file, or in a folder of one's own.

    Args:
        tar: path, glob or brace pattern such as `shards/train-{000..146}.tar`, or several of them.
        extensions: which files of a sample are pictures, by what follows the first dot of their names, such as `jpg` or
            `rgb.png`; None takes every PNG, JPEG, TIFF, BMP and WebP, if no sample has two of them.
        cache: folder for the indices; None keeps them beside the tar files.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: which channels to keep, by number or name, where a file has other than 1 or 3.
        skip_damaged: read every picture once and leave out what cannot be read, with one warning that names the files;
            the result is kept in the index. Otherwise such a file is an error when it is read.
        licence: what a card says of it.

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
        reading = Reading(normalize, channel)
        chosen = [extensions] if isinstance(extensions, str) else extensions
        self.extensions = None if chosen is None else tuple(e.lower().lstrip(".") for e in chosen)
        folder = None if cache is None else expanded(cache)
        self._members: list[tuple[Path, Member]] = []
        damaged: list[tuple[str, str]] = []
        for path in self.tars:
            members = indexed(path, folder, reading if skip_damaged else None)
            for member in _chosen(members, path, self.extensions):
                if member.damage and skip_damaged:
                    damaged.append((f"{path}: {member.name}", member.damage))
                    continue
                if member.damage and not member.pages:
                    raise hinted(InputError(member.damage))
                self._members.append((path, member))
        self.damaged = tuple(label for label, _ in damaged)
        pages = [member.pages for _, member in self._members]
        super().__init__("tar", self.tars, reading, licence, pages, damaged)

    def _label(self, k: int) -> str:
        path, member = self._members[k]
        return f"{path}: {member.name}"

    def _pages(self, k: int) -> np.ndarray:
        return self.reading.content(content(*self._members[k]), self._label(k))

    def describe(self) -> dict[str, Any]:
        """Return what every source of files does, and the extensions."""
        return super().describe() | {"extensions": None if self.extensions is None else list(self.extensions)}

    def fingerprint(self) -> str:
        """Return a sha256 over names of tar files, names and sizes of pictures, and how they are read."""
        members = [(path.name, member.name, member.size) for path, member in self._members]
        return digest("tar", members, *self.reading.describe().values())


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
