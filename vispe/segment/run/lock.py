"""Lock file that reserves a results folder for one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vispe.errors import InputError

LOCK = ".vispe.lock"
"""Name of the locked file; the operating system releases the lock when the process ends."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; it is created if needed, and removed again if nothing was written.

    Raises:
        InputError: another process has locked it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = None
    try:
        handle = _locked(folder / LOCK)
        yield
    finally:
        if handle is not None:
            _release(folder / LOCK, handle)
        for path in missing:
            try:
                path.rmdir()
            except OSError:  # something was written
                break


def _locked(path: Path) -> IO[bytes]:
    while True:
        handle = _open(path)
        try:
            _lock(handle)
        except BlockingIOError as error:
            handle.close()
            raise InputError(
                f"{path.parent} is in use by another vispe process. Wait until it has finished, or choose another "
                "folder."
            ) from error
        except OSError:  # this file system has no locks
            return handle
        try:
            if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        handle.close()  # the previous process has removed this file: open the new one


def _open(path: Path) -> IO[bytes]:
    """Open the lock file without following symbolic links."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "ab")
    except OSError as error:
        if path.is_symlink():
            raise InputError(
                f"{path} is a link, but vispe writes regular files only. Remove the link."
            ) from error
        raise


def _lock(handle: IO[bytes]) -> None:
    """Lock an open file without waiting.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    try:
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError from error


def _release(path: Path, handle: IO[bytes]) -> None:
    if os.name == "posix":
        path.unlink(missing_ok=True)  # before unlocking: a waiting process then opens a new file
        handle.close()
        return
    handle.close()
    with suppress(OSError):  # another process has opened it
        path.unlink(missing_ok=True)
