"""PNG files with 16 bits in each of several channels, which Pillow would cut to 8 bits."""

import struct
import zlib
from pathlib import Path

import numpy as np

from vispe.errors import InputError

CHANNELS = {2: 3, 4: 2, 6: 4}
"""Channels by PNG colour type: RGB, grey and alpha, RGB and alpha."""


def decode_png16(path: Path) -> np.ndarray:
    """Decode a 16-bit colour PNG without loss.

    PNG (ISO/IEC 15948, section 9) stores each byte as the difference to a prediction from the bytes to the
    left, above and above left, in one of five ways for each row.  Pixels on one anti-diagonal do not depend
    on each other, so they are restored together.

    Returns:
        (h, w, c) uint16.

    Raises:
        InputError: interlaced, or damaged.
    """
    parts, header = [], b""
    data, at = path.read_bytes(), 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IHDR":
            header = data[at + 8 : at + 8 + length]
        elif kind == b"IDAT":
            parts.append(data[at + 8 : at + 8 + length])
        at += 12 + length
    w, h, _, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if interlaced:
        raise InputError(
            f"{path} is an interlaced 16-bit colour PNG; save it without interlacing, or as TIFF."
        )
    c = CHANNELS[colour]
    size = h * (1 + 2 * c * w)
    stored = np.frombuffer(zlib.decompressobj().decompress(b"".join(parts), size + 1), np.uint8)
    if stored.size != size:
        raise ValueError(f"{'more' if stored.size > size else 'fewer'} than the {size} bytes of its pixels")
    rows = stored.reshape(h, -1)
    restored = _restore(rows[:, 0], rows[:, 1:].reshape(h, w, 2 * c))
    return restored.view(">u2").astype(np.uint16)


def _restore(filters: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Undo the row filters 0..4 of (h, w, bytes per pixel) uint8."""
    if filters.max(initial=0) > 4:
        raise ValueError(f"there is no row filter {filters.max()}")
    h, w, size = stored.shape
    out = np.zeros((h + 1, w + 1, size), np.uint8)  # a row and a column of zeros before the first
    for step in range(h + w - 1):
        r = np.arange(max(0, step - w + 1), min(h, step + 1))
        column = step - r
        left, up, corner = (out[r + i, column + j].astype(np.int16) for i, j in ((1, 0), (0, 1), (0, 0)))
        to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
        nearest = np.where(to_up <= to_corner, up, corner)
        nearest = np.where((to_left <= to_up) & (to_left <= to_corner), left, nearest)
        kind = filters[r][:, None]
        guess = np.select(
            [kind == 1, kind == 2, kind == 3, kind == 4], [left, up, (left + up) >> 1, nearest], 0
        )
        out[r + 1, column + 1] = stored[r, column] + guess.astype(np.uint8)
    return np.ascontiguousarray(out[1:, 1:])
