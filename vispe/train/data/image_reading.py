"""Reading of files and bytes as images for models: the reader of `vispe segment`, with 1 or 3 channels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, require
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph, read_image
from vispe.utils.options import Options

STACKS = (".tif", ".tiff")  # suffixes of files that can contain several pages


@dataclass(frozen=True)
class Reading(Options):
    """Reading options: conversion of images to (3, h, w) float32 in [0, 1].

    >>> Reading().array(np.array([[0, 51]], np.uint8), "two pixels").ravel()
    array([0. , 0.2], dtype=float32)

    Grey is expanded to three channels, palettes are converted to colours, and an alpha channel is dropped.

    Attributes:
        normalize: 'auto' divides 8-bit values by 255 and uses 'stack' for other dtypes; 'stack', 'image' and 'none' as
            in `vispe segment`: percentiles over all pages of a file, or over each page, or division of integers by the
            maximum of their dtype.
        channel: channels to read, by number or name, for files that do not have 1 or 3.

    Raises:
        OptionError: unknown `normalize`.
    """

    normalize: Literal["auto", "stack", "image", "none"] = "auto"
    channel: int | str | Sequence[int | str] | None = None

    def file(self, path: Path, label: str | None = None) -> np.ndarray:
        """Return all pages of a file as (z, h, w, 1 or 3) float32 in [0, 1].

        Args:
            path: path of the file.
            label: name in messages; default the path.

        Raises:
            InputError: the file is missing, damaged or without data, or has neither 1 nor 3 channels.
        """
        try:
            return self.scaled(read_image(path, channel=self.channel))
        except InputError as error:
            if label is None:
                raise
            raise InputError(str(error).replace(str(path), label).replace(path.name, label)) from error

    def content(self, data: bytes, label: str) -> np.ndarray:
        """Return all pages of the contents of a file; see `file`."""
        with as_file(data, "image") as path:
            return self.file(path, label)

    def array(self, values: np.ndarray, label: str) -> np.ndarray:
        """Return an array (h, w) or (h, w, c) as one page; see `file`.

        Raises:
            InputError: another shape, or no pixels.
        """
        if values.ndim not in (2, 3) or values.size == 0:
            raise InputError(f"{label}: arrays must have the shape (h, w) or (h, w, c), got {values.shape}.")
        page = values.reshape(1, *values.shape[:2], -1)
        page = page.astype(np.uint8) * 255 if page.dtype == bool else page
        return self.scaled(Micrograph(Path(label), page))

    def scaled(self, image: Micrograph) -> np.ndarray:
        """Return the pages of a micrograph scaled to [0, 1], (z, h, w, 1 or 3) float32.

        Raises:
            InputError: neither 1 nor 3 channels.
        """
        if image.channels not in (1, 3):
            raise InputError(
                f"{image.path}: images must have 1 or 3 channels, got {image.channels}. Set `channel`, such as 0 or "
                "'0,1,2'."
            )
        # equal to 'none', without the checks for NaN and range, which uint8 does not need
        if self.normalize in ("auto", "none") and image.pages.dtype == np.uint8:
            return image.pages / np.float32(255)
        return normalize(image, "stack" if self.normalize == "auto" else self.normalize)[0]

    def describe(self) -> dict[str, Any]:
        """Return the reading options as JSON."""
        plain = isinstance(self.channel, int | str | None)
        return {"normalize": self.normalize, "channel": self.channel if plain else list(self.channel)}


@contextmanager
def as_file(data: bytes, name: str) -> Iterator[Path]:
    """Yield the path of a temporary file with these contents."""
    with tempfile.TemporaryDirectory(prefix="vispe-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def as_tensor(page: np.ndarray) -> Tensor:
    """Return a page (h, w, 1 or 3) as a tensor (3, h, w); grey pages are expanded without copying."""
    return torch.from_numpy(np.ascontiguousarray(page.transpose(2, 0, 1))).expand(3, -1, -1)


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the type of the error if it is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def count_pages(path: Path, label: str | None = None) -> int:
    """Return the number of pages of a file from its header; only TIFF files can have several.

    Raises:
        InputError: the header is damaged.
        MissingExtra: tifffile is not installed.
    """
    if path.suffix.lower() not in STACKS:
        return 1
    require("tifffile", "cli", f"reading {path.name} (TIFF)")
    from vispe.images.formats.decoded_image import BROKEN
    from vispe.images.formats.tiff_metadata import checked_tiff

    try:
        with checked_tiff(path) as stack:
            first = stack.series[0]
            sizes = [n for a, n in zip(first.axes, first.shape, strict=True) if a not in "YXCS"]
    except BROKEN as error:
        raise InputError(
            f"{label or path} is truncated or damaged ({first_line(error)}). Copy or export it again."
        ) from error
    return int(np.prod(sizes, dtype=np.int64))
