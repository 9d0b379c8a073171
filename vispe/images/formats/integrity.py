"""Detection of damage in PNG and JPEG files that decoders do not report."""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from pathlib import Path

from vispe.errors import InputError

PNG_CHANNELS = {2: 3, 4: 2, 6: 4}
"""Channels by PNG colour type: RGB, grey with alpha, RGB with alpha; all other types have one."""

# passes of Adam7 interlacing: first column and row, steps between columns and rows
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_damage(path: Path) -> list[str]:
    """Check the CRC of every chunk of a PNG file, and the length of its pixel data; the decoder checks neither.

    Returns:
        A note if the file is truncated, or an ancillary chunk is damaged.

    Raises:
        InputError: a critical chunk is damaged, or there are fewer or more pixels than in the header.
    """
    header, inflate, pixels, end = b"", zlib.decompressobj(), 0, None
    limit = 0
    with path.open("rb") as stream:
        stream.seek(8)
        while end is None:
            length, kind = struct.unpack(">I4s", stream.read(8).ljust(8, b"\0"))
            checksum, remaining = zlib.crc32(kind), length
            while remaining and (block := stream.read(min(remaining, 1 << 16))):
                checksum, remaining = zlib.crc32(block, checksum), remaining - len(block)
                if kind == b"IHDR":
                    header, limit = block, _png_bytes(block)
                while kind == b"IDAT" and block and pixels <= limit and not inflate.eof:
                    pixels += len(inflate.decompress(block, 1 << 20))
                    block = inflate.unconsumed_tail
            stored = stream.read(4)
            name = kind.decode("latin-1") if kind.isalpha() else kind.hex()
            if remaining or len(stored) < 4:
                end = "is truncated: the end chunk is missing"
            elif stored != struct.pack(">I", checksum):
                end = f"is damaged: the chunk {name} does not match its checksum"
                if not kind[0] & 32 or kind == b"tRNS":  # upper case: a critical chunk
                    raise InputError(f"{path} {end}. Copy or export it again.")
            elif kind == b"IEND":
                end = ""
    if pixels <= limit and not inflate.eof:
        pixels += len(inflate.flush())  # bytes that remain in the decompressor
    if header and pixels != limit and not (end and pixels < limit):
        what = "fewer" if pixels < limit else "more"
        raise InputError(f"{path} is truncated or damaged: it has {what} pixels than its header declares.")
    return [f"{path.name} {end}. Copy it again."] if end else []


def _png_bytes(header: bytes) -> int:
    """Return the number of bytes of all rows, each with its filter byte, of a PNG file with this IHDR."""
    w, h, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header[:13].ljust(13, b"\0"))
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    total = 0
    for x, y, dx, dy in passes:
        columns, rows = -(-(w - x) // dx), -(-(h - y) // dy)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * bits * PNG_CHANNELS.get(colour, 1) // 8))
    return total


def jpeg_damage(path: Path) -> list[str]:
    """Detect damage of the marker structure of a JPEG file, which has no checksums; decoders ignore such damage.

    Damage inside the compressed data that preserves the structure is not detected.

    Returns:
        A note if the structure is damaged.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        broken = _jpeg_break(data)
    return [f"{path.name} is damaged ({broken}): parts of the image may be wrong."] if broken else []


_MARK = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)

_RESTARTS = range(0xD0, 0xD8)


def _jpeg_break(data: mmap.mmap) -> str | None:
    at, frames, interval = 2, 0, 0
    while True:
        mark = _MARK.match(data, at)
        if mark is None:
            return "the end marker is missing" if at >= len(data) else f"unexpected byte {at}"
        kind, at = mark[1][0], mark.end()
        if kind == 0xD9:
            return None
        known = kind == 0xFE or kind >= 0xC0
        if not known or kind in _RESTARTS or 0xF0 <= kind <= 0xFD:
            return f"invalid marker at byte {at - 1}"
        length = int.from_bytes(data[at : at + 2], "big")
        if length < 2 or at + length > len(data):
            return f"the segment at byte {at} is truncated"
        frames += 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC)
        if frames > 1:
            return "two frame headers"
        if kind == 0xDD:
            interval = int.from_bytes(data[at + 2 : at + 4], "big")
        at += length
        if kind == 0xDA:
            order = 0xD0
            for mark in _MARK.finditer(data, at):
                at = mark.start()
                if mark[1][0] not in _RESTARTS:
                    break
                if not interval or mark[1][0] != order:
                    return "restart markers are out of order"
                order = 0xD0 + (order + 1) % 8
            else:
                return "the end marker is missing"
