"""Names of files as people give them: what a name stands for, and what is there in place of a file."""

import glob
import os
import stat
from pathlib import Path

from vispe.errors import InputError

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def expanded(name: str | Path) -> Path:
    """Return the path that a name stands for: the name itself where it exists, else with `~` as a home folder.

    Raises:
        InputError: an empty name; neither a file of this name nor a user whose home folder could be meant.
    """
    path = Path(name)
    if not str(name):
        raise InputError("an empty name was given for a file; perhaps a variable is not set.")
    if not str(path).startswith("~") or os.path.lexists(path):
        return path
    try:
        return path.expanduser()
    except RuntimeError as error:
        if os.path.lexists(path.parts[0]) or glob.has_magic(str(path)):
            return path
        user = path.parts[0][1:]
        whose = f"there is no user {user!r} whose home folder" if user else "there is no home folder that"
        raise InputError(f"{path} does not exist, and {whose} it could mean; check the name.") from error


def check_file(path: Path, hint: str = "check the name") -> None:
    """Refuse what is no file, and say what it is.

    Args:
        path: what should be a file.
        hint: what to do where nothing has this name.

    Raises:
        InputError: nothing there, a folder, a pipe, a device, a link that leads nowhere, or no right to look.
    """
    try:
        found = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{path} {_missing(path, error)}; {hint}.") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not the name of a file ({error}); {hint}.") from error
    if stat.S_ISREG(found):
        return
    for is_kind, name in _KINDS:
        if is_kind(found):
            raise InputError(f"{path} is not a file but {name}; save what it gives to a file and name that.")
    raise InputError(f"{path} is not a file but a folder; name a file.")


def _missing(path: Path, error: OSError) -> str:
    """Say why nothing can be found under a name."""
    link = os.path.islink(path)  # noqa: PTH114 - never raises, unlike Path.is_symlink
    if isinstance(error, FileNotFoundError) and link:
        return f"is a link to {path.readlink()}, which does not exist"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "does not exist"
    if link and not isinstance(error, PermissionError):
        return "is a link that leads in a circle"
    return f"cannot be looked at ({error.strerror})"
