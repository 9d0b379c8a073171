"""Full disks, detected before or while results are written, with the required and the free space."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.errors import InputError
from vispe.images.formats.size_limits import amount


class DiskFull(InputError):
    """Not enough disk space for the results; complete files remain and the same command resumes the run."""


@contextmanager
def disk_space_guard(folder: Path, what: str, least: int = 0, most: int = 0) -> Iterator[None]:
    """Convert a lack of disk space into an error with numbers, before or inside the `with` block.

    Args:
        folder: existing destination folder.
        what: name of the data, for the message.
        least: lower bound of the required bytes.
        most: upper bound of the required bytes.

    Raises:
        DiskFull: fewer than `least` bytes are free, or writing fails for lack of space.
    """
    if shutil.disk_usage(folder).free < least:
        raise _error(folder, what, least)
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise _error(folder, what, max(most, least)) from error


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that a disk, or the user's quota, is full."""
    if error.errno is None:  # NumPy writes as much as fits and raises an OSError without errno
        return re.search(r"requested and \d+ written", str(error)) is not None
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def _error(folder: Path, what: str, need: int) -> DiskFull:
    free = shutil.disk_usage(folder).free
    problem = f"needs {amount(need)}" if need > free else "does not fit"
    return DiskFull(
        f"disk full: {what} {problem}, {folder} has {amount(free)}. Free some space and repeat the command to resume, "
        "or choose another folder."
    )
