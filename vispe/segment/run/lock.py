"""A folder of results belongs to one process at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vispe.errors import InputError

LOCK = ".vispe.lock"
"""Name of the file that the process at work in a folder holds; the file is free as soon as the process ends."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes of vispe out of a folder; it is made if needed, and gone again if nothing is written.

    Raises:
        InputError: another process is at work there.
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
                f"another vispe is at work in {path.parent}; wait until it has finished, or choose another folder."
            ) from error
        except OSError:  # no locks on this file system
            return handle
        try:
            if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        handle.close()  # the holder before has removed this file


def _open(path: Path) -> IO[bytes]:
    """Open the lock file, never what a link of its name points to."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "ab")
    except OSError as error:
        if path.is_symlink():
            raise InputError(
                f"{path} is a link, and vispe writes its own files only; remove the link."
            ) from error
        raise


def _lock(handle: IO[bytes]) -> None:
    """Take the lock of an open file; BlockingIOError where another process has it."""
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
        path.unlink(missing_ok=True)  # before the lock is free: who waits for it finds a new file
        handle.close()
        return
    handle.close()
    with suppress(OSError):  # another process has opened it meanwhile
        path.unlink(missing_ok=True)
