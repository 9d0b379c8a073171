"""A full disk: noticed before or while results are written, and said with numbers."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.errors import InputError
from vispe.images.formats.size_limits import amount


class DiskFull(InputError):
    """There is no room for the results; what is complete stays, and the same command goes on."""


@contextmanager
def room(folder: Path, what: str, least: int = 0, most: int = 0) -> Iterator[None]:
    """Turn a lack of space on the disk of a folder into an error with numbers, before or during the work inside.

    Args:
        folder: that is written to; it exists.
        what: what is written, for the message.
        least: bytes that are certainly needed.
        most: bytes that may be needed.

    Raises:
        DiskFull: fewer than `least` bytes are free, or writing fails for lack of space.
    """
    if shutil.disk_usage(folder).free < least:
        raise _error(folder, what, least)
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise _error(folder, what, max(most, least)) from error


def is_full(error: OSError) -> bool:
    """Tell whether an error says that a disk is full, or the share of it that a user has."""
    if error.errno is None:  # NumPy writes what fits, and counts
        return re.search(r"requested and \d+ written", str(error)) is not None
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def _error(folder: Path, what: str, need: int) -> DiskFull:
    free = shutil.disk_usage(folder).free
    wanted = f"needs {amount(need)}" if need > free else "does not fit"
    return DiskFull(
        f"disk full: {what} {wanted}, {folder} has {amount(free)}; make room and repeat the command to go on, or "
        "choose another folder."
    )
