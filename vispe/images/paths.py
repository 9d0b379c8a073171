"""File names as written by users: expansion of `~`, and checks that a path is a regular file."""

import glob
import os
import stat
from pathlib import Path

from vispe.errors import InputError
from vispe.images.remote import StoreURL, is_url

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def expanded(name: str | Path) -> Path:
    """Return the path of a file name, or a `StoreURL`; `~` is expanded unless a file with exactly this name exists.

    Raises:
        InputError: an empty name; neither a file of this name nor a home folder exists.
    """
    if is_url(name):
        return StoreURL(str(name))
    path = Path(name)
    if not str(name):
        raise InputError("file names must not be empty, got ''. Check that shell variables are set.")
    if not str(path).startswith("~") or os.path.lexists(path):
        return path
    try:
        return path.expanduser()
    except RuntimeError as error:
        if os.path.lexists(path.parts[0]) or glob.has_magic(str(path)):
            return path
        user = path.parts[0][1:]
        what = f"there is no user {user!r}" if user else "the home folder is unknown"
        raise InputError(f"{path} does not exist, and {what}. Check the name.") from error


def absolute(name: str | Path) -> str:
    """Return the absolute path of a file name or wildcard, with `~` expanded; URLs are unchanged.

    Raises:
        InputError: see `expanded`.
    """
    path = expanded(name)
    return str(path) if isinstance(path, StoreURL) else os.path.abspath(path)  # noqa: PTH100 - normalises `..`


def check_file(path: Path, hint: str = "check the name") -> None:
    """Raise unless a path is a regular file.

    Args:
        path: the path.
        hint: remedy in the message if the path does not exist.

    Raises:
        InputError: the path does not exist, is a folder, pipe, device or broken link, or is not accessible.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{path} {_missing(path, error)}. {hint[:1].upper()}{hint[1:]}.") from error
    except ValueError as error:
        raise InputError(
            f"{str(path)!r} is not a file name ({error}). {hint[:1].upper()}{hint[1:]}."
        ) from error
    if stat.S_ISREG(mode):
        return
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise InputError(f"{path} is not a file but {name}. Save its contents to a file and pass that.")
    raise InputError(f"{path} is not a file but a folder. Pass a file.")


def _missing(path: Path, error: OSError) -> str:
    """Return the reason why a path cannot be opened."""
    link = os.path.islink(path)  # noqa: PTH114 - never raises, unlike Path.is_symlink
    if isinstance(error, FileNotFoundError) and link:
        return f"is a link to {path.readlink()}, which does not exist"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "does not exist"
    if link and not isinstance(error, PermissionError):
        return "is a cyclic link"
    return f"is not accessible ({error.strerror})"
