"""What a file claims, checked before it is believed: its size, its list of pages, its checksums.

Decoders trust headers. A few bytes can claim terabytes, or a cyclic page list; and some damage
changes pixels without a word from the decoder. These checks read the structure only, never the pixels.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.errors import InputError

LARGE = 1 << 30
"""Bytes of pixels that any file may hold, however small it is."""

RATIO = 200
"""Above `LARGE`, bytes of pixels per byte of the file at most; micrographs compress 2 to 50 times."""


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


def amount(size: int) -> str:
    """Write a number of bytes for a message."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.4g} {unit}"
        size /= 1000
    return ""
