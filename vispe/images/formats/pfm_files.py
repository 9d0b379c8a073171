"""Decoder of portable float maps (PFM), which need no library: a text header, then float32 rows from the bottom up."""

import math
import re
from pathlib import Path

import numpy as np

from vispe.images.formats.decoded_image import Decoded, check_pixels, count_axes, damaged, to_pages
from vispe.images.formats.size_limits import check_size

_HEADER = re.compile(rb"P[Ff]\s+(\d+)\s+(\d+)\s+([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s")


def is_pfm(head: bytes) -> bool:
    """Return whether a file is a portable float map, from its first bytes."""
    return head[:2] in (b"PF", b"Pf") and head[2:3].isspace()


def decode_pfm(path: Path, axes: str | None) -> Decoded:
    """Read a portable float map of one channel (``Pf``) or three channels (``PF``).

    The sign of the scale in the header is the byte order. Its magnitude is not applied: a note reports it unless it
    is 1. Format: https://netpbm.sourceforge.net/doc/pfm.html

    Args:
        path: the file.
        axes: axis of each dimension; None is YX for one channel and YXS for three.

    Raises:
        InputError: damaged, more or fewer pixels than the header declares, or too large for the memory.
    """
    with path.open("rb") as stream:
        head = stream.read(352)
        match = _HEADER.match(head)
        scale = float(match[3]) if match else 0.0
        if match is None or scale == 0 or not math.isfinite(scale):
            raise damaged(path, ValueError("the header must have a width, a height and a scale other than 0"))
        shape = (int(match[2]), int(match[1]), *((3,) if head[:2] == b"PF" else ()))
        check_pixels(path, shape)
        check_size(path, shape, 32)
        stored, expected = path.stat().st_size - match.end(), 4 * math.prod(shape)
        # also rejects lines that end with CR LF, which would shift all values by a byte
        if stored != expected:
            raise damaged(path, ValueError(f"{expected} bytes of pixels expected, got {stored}"))
        stream.seek(match.end())
        array = np.frombuffer(stream.read(expected), "<f4" if scale < 0 else ">f4").reshape(shape)[::-1]
    letters = "YXS"[: len(shape)]
    notes = (
        () if abs(scale) == 1 else (f"{path.name}: the scale {abs(scale):g} of the header is not applied.",)
    )
    return Decoded(
        pages=to_pages(path, array, letters, axes),
        format="PFM",
        notes=notes,
        page_axes=count_axes(letters, axes, shape),
    )
