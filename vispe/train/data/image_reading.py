"""Files and bytes to pictures: the reader of `vispe segment`, in full depth, with colours as models want them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, did_you_mean, require
from vispe.images.normalize import MODES, normalize
from vispe.images.read import Micrograph, read_image

STACKS = (".tif", ".tiff")  # endings of files that can hold several pages


@dataclass(frozen=True)
class Reading:
    """How pictures become (3, h, w) float32 in [0, 1].

    >>> Reading().array(np.array([[0, 51]], np.uint8), "two pixels").ravel()
    array([0. , 0.2], dtype=float32)

    Grey is repeated to three channels, palettes become colours, and an alpha channel is dropped.

    Attributes:
        normalize: 'auto' divides 8-bit values by 255 and stretches deeper ones and floats as 'stack' does; 'stack',
            'image' and 'none' are those of `vispe segment`: percentiles over all pages of a file, or over each page, or
            division of integers by the largest value of their type.
        channel: which channels to keep, by number or name, where a file has other than 1 or 3.
    """

    normalize: str = "auto"
    channel: int | str | Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        if self.normalize not in (known := ("auto", *MODES)):
            hint = did_you_mean(str(self.normalize), known)
            raise OptionError(f"normalize={self.normalize!r} is not one of {', '.join(known)}.{hint}")

    def file(self, path: Path, label: str | None = None) -> np.ndarray:
        """Return all pages of a file as (z, h, w, 1 or 3) float32 in [0, 1].

        Args:
            path: of the file.
            label: what messages call it, if not by its path.

        Raises:
            InputError: missing, damaged, without data, or neither 1 nor 3 channels.
        """
        try:
            return self.scaled(read_image(path, channel=self.channel))
        except InputError as error:
            if label is None:
                raise
            raise InputError(str(error).replace(str(path), label).replace(path.name, label)) from error

    def content(self, data: bytes, label: str) -> np.ndarray:
        """Return all pages of the content of a file as `file` does."""
        with as_file(data, "picture") as path:
            return self.file(path, label)

    def array(self, values: np.ndarray, label: str) -> np.ndarray:
        """Return an array (h, w) or (h, w, c) as one page, as `file` does."""
        if values.ndim not in (2, 3) or values.size == 0:
            raise InputError(f"{label} is an array of shape {values.shape}; give (h, w) or (h, w, c).")
        page = values.reshape(1, *values.shape[:2], -1)
        page = page.astype(np.uint8) * 255 if page.dtype == bool else page
        return self.scaled(Micrograph(Path(label), page))

    def scaled(self, image: Micrograph) -> np.ndarray:
        """Return the pages of a micrograph scaled to [0, 1], (z, h, w, 1 or 3) float32."""
        if image.channels not in (1, 3):
            raise InputError(
                f"{image.path} has {image.channels} channels, and 1 or 3 are needed; choose them by channel=, such as "
                "0 or '0,1,2'."
            )
        # what 'none' gives, without looking for what 8 bits cannot hold
        if self.normalize in ("auto", "none") and image.pages.dtype == np.uint8:
            return image.pages / np.float32(255)
        return normalize(image, "stack" if self.normalize == "auto" else self.normalize)[0]

    def describe(self) -> dict[str, Any]:
        """Return how pictures are read, as JSON."""
        plain = isinstance(self.channel, int | str | None)
        return {"normalize": self.normalize, "channel": self.channel if plain else list(self.channel)}


@contextmanager
def as_file(data: bytes, name: str) -> Iterator[Path]:
    """Yield the path of a temporary file with this content."""
    with tempfile.TemporaryDirectory(prefix="vispe-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def picture(page: np.ndarray) -> Tensor:
    """Return a page (h, w, 1 or 3) as (3, h, w); grey takes the memory of one channel."""
    return torch.from_numpy(np.ascontiguousarray(page.transpose(2, 0, 1))).expand(3, -1, -1)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def count_pages(path: Path, label: str | None = None) -> int:
    """Return how many pages `Reading.file` will find, from the head of a file; only TIFF can hold several.

    Raises:
        InputError: the head is damaged.
    """
    if path.suffix.lower() not in STACKS:
        return 1
    require("tifffile", "cli", f"reading {path.name} (TIFF)")
    import tifffile

    from vispe.images.formats.decoded_image import BROKEN

    try:
        with tifffile.TiffFile(path) as stack:
            first = stack.series[0]
            sizes = [n for a, n in zip(first.axes, first.shape, strict=True) if a not in "YXCS"]
    except BROKEN as error:
        raise InputError(
            f"{label or path} is truncated or damaged ({first_line(error)}); copy or export it again."
        ) from error
    return int(np.prod(sizes, dtype=np.int64))
