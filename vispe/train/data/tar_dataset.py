"""Image source of tar files (webdataset), with random access and without unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.images.paths import expanded
from vispe.train.data.dataset import digest
from vispe.train.data.image_reading import Reading
from vispe.train.data.paged_files import PageSource, with_hint
from vispe.train.data.tar_index import Member, content, expand, load_index


class TarSource(PageSource):
    """All images of one or several uncompressed tar files, in stored order; pages of TIFF stacks individually.

    The offsets of the images are indexed once and stored in a JSON file next to each tar file, or in `cache`.

    Args:
        tar: path, glob or brace pattern such as `shards/train-{000..146}.tar`, or several of them.
        extensions: extensions of the images of a sample, after the first dot of their names, such as `jpg` or
            `rgb.png`; None selects all PNG, JPEG, TIFF, BMP and WebP, if each sample has one.
        cache: folder for the indices; None stores them next to the tar files.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: channels to read, by number or name, for files that do not have 1 or 3.
        skip_damaged: read every image once and skip unreadable ones, with one warning; the result is stored in the
            index. Otherwise an unreadable file is an error on access.
        licence: licence in the model card.

    Attributes:
        tars: the tar files.
        damaged: names of the skipped images.

    Raises:
        InputError: a file is missing or not an uncompressed tar file, there are no images, a sample has
            several images, or an index cannot be written.
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
        given_extensions = [extensions] if isinstance(extensions, str) else extensions
        self.extensions = (
            None if given_extensions is None else tuple(e.lower().lstrip(".") for e in given_extensions)
        )
        folder = None if cache is None else expanded(cache)
        self._members: list[tuple[Path, Member]] = []
        damaged: list[tuple[str, str]] = []
        for path in self.tars:
            members = load_index(path, folder, reading if skip_damaged else None)
            for member in _select(members, path, self.extensions):
                if member.damage and skip_damaged:
                    damaged.append((f"{path}: {member.name}", member.damage))
                    continue
                if member.damage and not member.pages:
                    raise with_hint(InputError(member.damage))
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
        """Return the description of `PageSource`, and the extensions."""
        return super().describe() | {"extensions": None if self.extensions is None else list(self.extensions)}

    def fingerprint(self) -> str:
        """Return a sha256 of names of tar files, names and sizes of images, and the reading options."""
        members = [(path.name, member.name, member.size) for path, member in self._members]
        return digest("tar", members, *self.reading.describe().values())


def _select(members: list[Member], path: Path, extensions: tuple[str, ...] | None) -> list[Member]:
    if extensions is not None:
        return [m for m in members if m.extension in extensions]
    by_sample: dict[str, Member] = {}
    for member in members:
        other = by_sample.setdefault(member.sample, member)
        if other is not member:
            raise InputError(
                f"the sample {member.sample} of {path} has several images ({other.extension} and "
                f"{member.extension}). Set `extensions`, such as {other.extension}."
            )
    return members
