"""Checks of the declared size of a file against its length and the available memory.

Decoders trust headers: a few bytes can declare terabytes (decompression bombs). The checks read the structure only,
never the pixels.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.errors import InputError

LARGE = 1 << 30
"""Bytes of pixels that are allowed regardless of the file size."""

RATIO = 200
"""Largest compression ratio above `LARGE`; micrographs compress 2 to 50 times."""


def check_size(
    path: Path,
    shape: tuple[int, ...],
    bits: int,
    *,
    stored: int | None = None,
    free: int = LARGE,
    trusted: bool = False,
) -> None:
    """Reject decompression bombs and images that do not fit into memory.

    Args:
        path: the file.
        shape: shape of the declared array, including samples.
        bits: bits per sample.
        stored: bytes on disk, of all files in total; None uses the size of `path`.
        free: bytes of pixels that are allowed regardless of the file size.
        trusted: skip the ratio check, for files of a known size, such as labels of the size of their image.
            Labels may compress much better than images.

    Raises:
        InputError: more than `free` bytes of pixels and more than `RATIO` times the size of the file; or more than
            half of the memory of the machine.
    """
    count = 1
    for n in shape:
        count *= int(n)
    raw, in_memory = count * bits // 8, count * max(bits, 8) // 8
    stored = path.stat().st_size if stored is None else stored
    size = " x ".join(map(str, shape))
    if raw > max(free, RATIO * stored) and not trusted:
        raise InputError(
            f"{path}: suspected decompression bomb, got {size} values ({amount(raw)}) in a file of {amount(stored)} "
            f"(limit {RATIO} to 1 above {amount(free)}). If it is genuine, save it uncompressed or in parts."
        )
    memory = machine_memory()
    if memory is not None and in_memory > memory // 2:
        raise InputError(
            f"{path}: an image may use at most half of the memory of {amount(memory)}, got {size} values "
            f"({amount(in_memory)}). Split it, or convert it to OME-Zarr, which is read in chunks."
        )


@contextmanager
def enough_memory(path: Path) -> Iterator[None]:
    """Convert a MemoryError within the context to an InputError that names the file."""
    try:
        yield
    except MemoryError as error:
        raise InputError(
            f"{path}: out of memory ({' '.join(str(error).split()) or 'unknown size'}). Split it, or convert it to "
            "OME-Zarr, which is read in chunks."
        ) from error


def machine_memory() -> int | None:
    """Return the memory limit of this process in bytes (physical memory, rlimit, cgroup); None if unknown."""
    limits = []
    if sys.platform == "win32":
        limits += _windows_memory()
    else:
        import os
        import resource

        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [limit] if limit != resource.RLIM_INFINITY else []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdecimal() else []  # 'max' means unlimited
    return min((n for n in limits if n > 0), default=None)


def _windows_memory() -> list[int]:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("sizes", ctypes.c_ulonglong * 7)]

    status = Status(ctypes.sizeof(Status))
    ok = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return [int(status.sizes[0])] if ok else []


def amount(size: int) -> str:
    """Format a number of bytes for a message."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.4g} {unit}"
        size /= 1000
    return ""
