"""What a file claims, checked before it is believed: its size, its list of pages, its checksums.

Decoders trust headers. A few bytes can claim terabytes, or a list of pages that bites its own tail; and some damage
changes pixels without a word from the decoder. These checks read the structure only, never the pixels.
"""

import mmap
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from vispe.errors import InputError

LARGE = 1 << 30
"""Bytes of pixels that any file may hold, however small it is."""

RATIO = 200
"""Above `LARGE`, bytes of pixels per byte of the file at most; micrographs compress 2 to 50 times."""

PLANES = 1_000_000
"""Planes that OME metadata may speak of."""

_SIGNS = {"Image", "Pixels", "TiffData", "ModuloAlongZ", "ModuloAlongT", "ModuloAlongC"}


def check_size(
    path: Path,
    shape: tuple[int, ...],
    bits: int,
    *,
    stored: int | None = None,
    free: int = LARGE,
    trusted: bool = False,
) -> None:
    """Refuse pixels that cannot be meant, or that do not fit into memory.

    Args:
        path: the file.
        shape: of the array that it claims to hold, samples included.
        bits: of each sample.
        stored: bytes on disk, of all files together; None asks `path`.
        free: bytes of pixels up to which the size of the file does not matter.
        trusted: the size is one that is asked for anyway, such as labels of the size of their image, which may
            compress far better than a picture.

    Raises:
        InputError: more than `free` bytes of pixels and more than `RATIO` times the size of the file; or more than
            half of the memory of the machine.
    """
    count = 1
    for n in shape:
        count *= int(n)
    raw, held = count * bits // 8, count * max(bits, 8) // 8
    stored = path.stat().st_size if stored is None else stored
    size = " x ".join(map(str, shape))
    if raw > max(free, RATIO * stored) and not trusted:
        raise InputError(
            f"{path} was refused: it claims {size} values, {amount(raw)}, in a file of {amount(stored)}, which looks "
            f"like a decompression bomb (limit {RATIO} to 1 above {amount(free)}); if it is genuine, save it "
            "uncompressed or in parts."
        )
    memory = machine_memory()
    if memory is not None and held > memory // 2:
        raise InputError(
            f"{path} holds {size} values, {amount(held)}, but only half of the {amount(memory)} of memory here can "
            "be used for an image; cut it into parts, or convert it to OME-Zarr, which is read piece by piece."
        )


@contextmanager
def enough_memory(path: Path) -> Iterator[None]:
    """Turn a lack of memory inside into an InputError that names the file."""
    try:
        yield
    except MemoryError as error:
        raise InputError(
            f"{path} needs more memory than there is ({' '.join(str(error).split()) or 'no size given'}); cut it into "
            "parts, or convert it to OME-Zarr, which is read piece by piece."
        ) from error


def machine_memory() -> int | None:
    """Return the bytes of memory that this process may use, by the machine and its limits; None if unknown."""
    found = []
    if sys.platform == "win32":
        found += _windows_memory()
    else:
        import os
        import resource

        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        found += [limit] if limit != resource.RLIM_INFINITY else []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdecimal() else []  # 'max' is no limit
    return min((n for n in found if n > 0), default=None)


def _windows_memory() -> list[int]:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("sizes", ctypes.c_ulonglong * 7)]

    status = Status(ctypes.sizeof(Status))
    known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return [int(status.sizes[0])] if known else []


def png_damage(path: Path) -> list[str]:
    """Compare the checksum of every chunk of a PNG file, and the length of its pixels, which Pillow does not do.

    Returns:
        One sentence for a file that is cut short, or has a damaged chunk that is no part of the picture.

    Raises:
        InputError: a chunk that decides the pixels is damaged, or there are fewer or more pixels than it says.
    """
    header, inflate, pixels, end = b"", zlib.decompressobj(), 0, None
    limit = 0
    with path.open("rb") as stream:
        stream.seek(8)
        while end is None:
            length, kind = struct.unpack(">I4s", stream.read(8).ljust(8, b"\0"))
            found, left = zlib.crc32(kind), length
            while left and (block := stream.read(min(left, 1 << 16))):
                found, left = zlib.crc32(block, found), left - len(block)
                if kind == b"IHDR":
                    header, limit = block, _png_bytes(block)
                while kind == b"IDAT" and block and pixels <= limit and not inflate.eof:
                    pixels += len(inflate.decompress(block, 1 << 20))
                    block = inflate.unconsumed_tail
            stored = stream.read(4)
            name = kind.decode("latin-1") if kind.isalpha() else kind.hex()
            if left or len(stored) < 4:
                end = "is cut short: it ends without its end mark"
            elif stored != struct.pack(">I", found):
                end = f"is damaged: its part {name} does not match its checksum"
                if not kind[0] & 32 or kind == b"tRNS":  # upper case: needed for the picture
                    raise InputError(f"{path} {end}; copy or export it again.")
            elif kind == b"IEND":
                end = ""
    if pixels <= limit and not inflate.eof:
        pixels += len(inflate.flush())  # the few bytes that are left where the input ended
    if header and pixels != limit and not (end and pixels < limit):
        what = "fewer" if pixels < limit else "more"
        raise InputError(
            f"{path} is truncated or damaged: it holds {what} pixels than its header says; export it again."
        )
    return [f"{path.name} {end}; copy it again."] if end else []


def _png_bytes(header: bytes) -> int:
    """Return the bytes of all rows, each with its filter byte, of a PNG file with this IHDR."""
    w, h, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header[:13].ljust(13, b"\0"))
    passes = [(0, 0, 1, 1)]
    if interlaced:  # Adam7: first column and row, steps between columns and rows
        passes = [
            (0, 0, 8, 8),
            (4, 0, 8, 8),
            (0, 4, 4, 8),
            (2, 0, 4, 4),
            (0, 2, 2, 4),
            (1, 0, 2, 2),
            (0, 1, 1, 2),
        ]
    total = 0
    for x, y, dx, dy in passes:
        columns, rows = -(-(w - x) // dx), -(-(h - y) // dy)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * bits * {2: 3, 4: 2, 6: 4}.get(colour, 1) // 8))
    return total


def jpeg_damage(path: Path) -> list[str]:
    """Look for breaks in the structure of a JPEG file, which has no checksums and over which decoders pass silently.

    Damage inside the compressed data that keeps its structure cannot be found.

    Returns:
        One sentence for a file with such a break.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        broken = _jpeg_break(data)
    return [f"{path.name} is damaged ({broken}): parts of the picture may be wrong."] if broken else []


_MARK = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)
_RESTARTS = range(0xD0, 0xD8)


def _jpeg_break(data: mmap.mmap) -> str | None:
    at, frames, interval = 2, 0, 0
    while True:
        mark = _MARK.match(data, at)
        if mark is None:
            return "it has no end mark" if at >= len(data) else f"byte {at} belongs to nothing"
        kind, at = mark[1][0], mark.end()
        if kind == 0xD9:
            return None
        known = kind == 0xFE or kind >= 0xC0
        if not known or kind in _RESTARTS or 0xF0 <= kind <= 0xFD:
            return f"byte {at - 1} is no part of a picture"
        length = int.from_bytes(data[at : at + 2], "big")
        if length < 2 or at + length > len(data):
            return f"the part at byte {at} is cut short"
        frames += 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC)
        if frames > 1:
            return "it holds two headers"
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
                    return "its restart marks are out of order"
                order = 0xD0 + (order + 1) % 8
            else:
                return "it has no end mark"


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
                raise InputError(
                    f"{path} is damaged: its list of pages runs in a circle after {len(seen)}; copy it again."
                )
            seen.add(at)
            stream.seek(at)
            entries = _number(stream.read(struct.calcsize(count)), count)
            if not 0 < entries < 1 << 16:
                break  # the reader says what is wrong
            body = stream.read(entries * size)
            for _, kind, n, value in struct.iter_unpack(entry, body[: len(body) // size * size]):
                held = n * _VALUE_BYTES.get(kind, 0)
                lost += held > (8 if big else 4) and value + held > length
    return (
        [f"{path.name} is cut short: {lost} of its entries lie beyond its end; copy it again."]
        if lost
        else []
    )


_VALUE_BYTES = {**dict.fromkeys((1, 2, 6, 7), 1), 3: 2, 8: 2, **dict.fromkeys((4, 9, 11, 13), 4)}
_VALUE_BYTES |= dict.fromkeys((5, 10, 12, 16, 17, 18), 8)


def _number(data: bytes, kind: str) -> int:
    return struct.unpack(kind, data)[0] if len(data) == struct.calcsize(kind) else 0


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


def amount(size: int) -> str:
    """Write a number of bytes for a message."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.4g} {unit}"
        size /= 1000
    return ""
