"""Checks of file metadata before memory is allocated, and the pixel size of PNG files."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from vispe.errors import InputError, counted
from vispe.images.formats.units import microns

PLANES = 1_000_000
"""Largest number of planes in OME metadata."""

_SIGNS = {"Image", "Pixels", "TiffData", "ModuloAlongZ", "ModuloAlongT", "ModuloAlongC"}


def check_page_list(path: Path) -> list[str]:
    """Traverse the page list (IFD chain) of a TIFF file once, since readers may loop forever on a cyclic list.

    Returns:
        A note if entries of the pages point beyond the end of the file.

    Raises:
        InputError: the list is cyclic.
    """
    length, lost = path.stat().st_size, 0
    with path.open("rb") as stream:
        order = "<" if stream.read(2) == b"II" else ">"
        big = struct.unpack(order + "H", stream.read(2))[0] == 43
        stream.seek(8 if big else 4)
        count, entry, offset = (order + kind for kind in (("Q", "HHQQ", "Q") if big else ("H", "HHII", "I")))
        size = struct.calcsize(entry)
        visited: set[int] = set()
        while page_offset := _number(stream.read(struct.calcsize(offset)), offset):
            if page_offset in visited:
                raise InputError(
                    f"{path} is damaged: its page list is cyclic after {counted(len(visited), 'page')}."
                )
            visited.add(page_offset)
            stream.seek(page_offset)
            entries = _number(stream.read(struct.calcsize(count)), count)
            if not 0 < entries < 1 << 16:
                break  # tifffile reports the error
            body = stream.read(entries * size)
            for _, kind, n, value in struct.iter_unpack(entry, body[: len(body) // size * size]):
                n_bytes = n * _VALUE_BYTES.get(kind, 0)
                lost += n_bytes > (8 if big else 4) and value + n_bytes > length
    note = f"{path.name} is truncated: {lost} of its entries are beyond its end. Copy it again."
    return [note] if lost else []


_VALUE_BYTES = {**dict.fromkeys((1, 2, 6, 7), 1), 3: 2, 8: 2, **dict.fromkeys((4, 9, 11, 13), 4)}
_VALUE_BYTES |= dict.fromkeys((5, 10, 12, 16, 17, 18), 8)


def _number(data: bytes, kind: str) -> int:
    return struct.unpack(kind, data)[0] if len(data) == struct.calcsize(kind) else 0


def scale_chunk(size: tuple[float, float]) -> bytes:
    """Return the PNG chunk sCAL (pixel size in metres) for microns (y, x)."""
    y, x = (f"{1e-6 * length:.9g}".encode() for length in size)
    content = b"\1" + x + b"\0" + y
    return (
        struct.pack(">I", len(content)) + b"sCAL" + content + struct.pack(">I", zlib.crc32(b"sCAL" + content))
    )


def png_scale(path: Path) -> tuple[float, float] | None:
    """Return microns per pixel (y, x) from the chunk sCAL of a PNG file; None if there is none in metres."""
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


def png_metadata_after_pixels(path: Path) -> bool:
    """Return whether EXIF or text chunks follow the pixels of a PNG file, where Pillow finds them by decoding."""
    after_pixels = False
    with path.open("rb") as stream:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if after_pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            after_pixels = after_pixels or kind == b"IDAT"
            stream.seek(length + 4, 1)
    return False


def check_metadata(path: Path, text: str) -> None:
    """Reject XML metadata of a TIFF file that would exhaust memory or refer to other folders.

    Raises:
        InputError: XML entities, more than `PLANES` planes, or planes in files outside the folder.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("<"):
        return
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InputError(f"{path}: XML entities in the metadata are not allowed. Export it again.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return  # tifffile ignores invalid XML with a warning
    for element in root.iter():
        tag = str(element.tag).rpartition("}")[2]
        if tag in _SIGNS:
            planes = max(_planes(element.attrib), default=0)
            if planes > PLANES:
                raise InputError(
                    f"{path}: the OME metadata may declare at most {PLANES} planes, got {planes:.4g}. Export it again."
                )
        name = element.attrib.get("FileName") if tag == "UUID" else None
        if name is not None and not _is_in_folder(path, name):
            raise InputError(
                f"{path}: files in the OME metadata must be in the folder of the image, got {name!r}. Copy all files "
                "of the dataset into one folder."
            )


def _planes(attributes: dict[str, str]) -> Iterator[float]:
    """Yield the numbers of planes in the attributes of an OME element."""
    yield (
        _float(attributes.get("SizeZ", "0"))
        * _float(attributes.get("SizeC", "1"))
        * _float(attributes.get("SizeT", "1"))
    )
    for key in ("IFD", "PlaneCount", "NumPlanes", "FirstZ", "FirstC", "FirstT"):
        yield _float(attributes.get(key, "0"))
    step = _float(attributes.get("Step", "1")) or 1.0
    yield abs((_float(attributes.get("End", "0")) - _float(attributes.get("Start", "0"))) / step)


def _float(text: str) -> float:
    try:
        return abs(float(text))
    except ValueError:
        return 0.0


def _is_in_folder(path: Path, name: str) -> bool:
    is_plain = name and not re.search(r"[/\\:\0]", name) and name not in (".", "..")
    other = path.parent / name if is_plain else None
    return other is not None and (other.is_file() or not other.exists())
