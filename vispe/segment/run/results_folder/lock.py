"""Lock file that reserves a results folder for one process."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vispe.errors import InputError

LOCK = ".vispe.lock"
"""Name of the locked file; the operating system releases the lock when the process ends."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; it is created if needed, and removed again if nothing was written.

    Raises:
        InputError: another process has locked it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = None
    try:
        lock = _acquired(folder / LOCK)
        yield
    finally:
        if lock is not None:
            _release(folder / LOCK, lock)
        for path in missing:
            try:
                path.rmdir()
            except OSError:  # something was written
                break


def _acquired(path: Path) -> FileLock:
    if path.is_symlink():
        raise InputError(f"{path} is a link, but vispe writes regular files only. Remove the link.")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"{path.parent} is in use by another vispe process. Wait until it has finished, or choose another "
            "folder."
        ) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
    return lock


def _release(path: Path, lock: FileLock) -> None:
    # POSIX: removed while locked, so that a process that opens the path later gets a new file
    if os.name == "posix":
        path.unlink(missing_ok=True)
    lock.release()
    with suppress(OSError):  # another process has opened it
        if os.name != "posix":
            path.unlink(missing_ok=True)
