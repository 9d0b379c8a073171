"""What the metadata of a file claims, checked before memory is asked for; and the scale of PNG files."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from vispe.errors import InputError
from vispe.images.formats.units import microns

PLANES = 1_000_000
"""Planes that OME metadata may speak of."""

_SIGNS = {"Image", "Pixels", "TiffData", "ModuloAlongZ", "ModuloAlongT", "ModuloAlongC"}


def check_page_list(path: Path) -> list[str]:
    """Follow the list of pages of a TIFF file once, since readers may follow a circle for ever.

    Returns:
        One sentence when entries of the pages point beyond the end of the file.

    Raises:
        InputError: the list leads back to a page that it has passed.
    """
    length, lost = path.stat().st_size, 0
    with path.open("rb") as stream:
        order = "<" if stream.read(2) == b"II" else ">"
        big = struct.unpack(order + "H", stream.read(2))[0] == 43
        stream.seek(8 if big else 4)
        count, entry, offset = (order + kind for kind in (("Q", "HHQQ", "Q") if big else ("H", "HHII", "I")))
        size = struct.calcsize(entry)
        seen: set[int] = set()
        while at := _number(stream.read(struct.calcsize(offset)), offset):
            if at in seen:
                raise InputError(f"{path} is damaged: its page list is cyclic after {len(seen)} pages.")
            seen.add(at)
            stream.seek(at)
            entries = _number(stream.read(struct.calcsize(count)), count)
            if not 0 < entries < 1 << 16:
                break  # the reader says what is wrong
            body = stream.read(entries * size)
            for _, kind, n, value in struct.iter_unpack(entry, body[: len(body) // size * size]):
                held = n * _VALUE_BYTES.get(kind, 0)
                lost += held > (8 if big else 4) and value + held > length
    note = f"{path.name} is cut short: {lost} of its entries lie beyond its end; copy it again."
    return [note] if lost else []


_VALUE_BYTES = {**dict.fromkeys((1, 2, 6, 7), 1), 3: 2, 8: 2, **dict.fromkeys((4, 9, 11, 13), 4)}
_VALUE_BYTES |= dict.fromkeys((5, 10, 12, 16, 17, 18), 8)


def _number(data: bytes, kind: str) -> int:
    return struct.unpack(kind, data)[0] if len(data) == struct.calcsize(kind) else 0


def scale_chunk(size: tuple[float, float]) -> bytes:
    """Return a chunk sCAL of PNG, the size of a pixel in metres, for microns (y, x)."""
    y, x = (f"{1e-6 * length:.9g}".encode() for length in size)
    content = b"\1" + x + b"\0" + y
    return (
        struct.pack(">I", len(content)) + b"sCAL" + content + struct.pack(">I", zlib.crc32(b"sCAL" + content))
    )


def png_scale(path: Path) -> tuple[float, float] | None:
    """Return microns per pixel (y, x) by the chunk sCAL of a PNG file; None where it has none in metres."""
    with path.open("rb") as stream:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"IDAT":
                return None
            if kind != b"sCAL":
                stream.seek(length + 4, 1)
                continue
            content = stream.read(min(length, 256))
            x, _, y = content[1:].decode("latin-1").partition("\0")
            sizes = (microns(y, "m"), microns(x, "m")) if content[:1] == b"\1" else (None, None)
            return (sizes[0], sizes[1]) if all(sizes) else None
    return None


def check_metadata(path: Path, text: str) -> None:
    """Refuse XML metadata of a TIFF file that would cost memory or lead to other places.

    Raises:
        InputError: XML entities, more than `PLANES` planes, or planes in files outside the folder.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("<"):
        return
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{path} was refused: its metadata defines XML entities, which no microscope needs.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return  # the reader says so and does without
    for element in root.iter():
        tag = str(element.tag).rpartition("}")[2]
        if tag in _SIGNS:
            planes = max(_planes(element.attrib), default=0)
            if planes > PLANES:
                raise InputError(
                    f"{path} was refused: its OME metadata speaks of {planes:.4g} planes, more than {PLANES}; export "
                    "it again."
                )
        name = element.attrib.get("FileName") if tag == "UUID" else None
        if name is not None and not _beside(path, name):
            raise InputError(
                f"{path} was refused: its OME metadata names the file {name!r}, which does not lie in the folder of "
                "the image; put all files of the data set into one folder."
            )


def _planes(given: dict[str, str]) -> Iterator[float]:
    """Give the numbers of planes that the attributes of an OME element speak of."""
    yield _float(given.get("SizeZ", "0")) * _float(given.get("SizeC", "1")) * _float(given.get("SizeT", "1"))
    for key in ("IFD", "PlaneCount", "NumPlanes", "FirstZ", "FirstC", "FirstT"):
        yield _float(given.get(key, "0"))
    step = _float(given.get("Step", "1")) or 1.0
    yield abs((_float(given.get("End", "0")) - _float(given.get("Start", "0"))) / step)


def _float(text: str) -> float:
    try:
        return abs(float(text))
    except ValueError:
        return 0.0


def _beside(path: Path, name: str) -> bool:
    plain = name and not re.search(r"[/\\:\0]", name) and name not in (".", "..")
    other = path.parent / name if plain else None
    return other is not None and (other.is_file() or not other.exists())
