"""Pretrained weights on disk or from a hub, and permissions of foreign files: downloads and Python code."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vispe.errors import InputError

_PATIENCE = 3.0  # timeout in seconds for an answer of the hub
_ALLOWED: ContextVar[bool] = ContextVar("downloads_allowed", default=True)
_GRANTED: ContextVar[bool] = ContextVar("downloads_granted", default=False)
_COMMAND: ContextVar[tuple[str, ...] | None] = ContextVar("trusted_words", default=None)


@contextmanager
def downloads(allowed: bool) -> Iterator[None]:
    """Allow or forbid downloads inside; if forbidden, only files on disk are used, without checks for newer versions.

    A foreign model file, card or recipe must not make vispe contact a server without permission. An inner
    context cannot allow downloads that an outer context forbids.
    """
    if allowed:
        yield
        return
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)
        constants.HF_HUB_OFFLINE = before


@contextmanager
def downloads_granted(by_command: bool) -> Iterator[None]:
    """Set whether the command line allows downloads that foreign files request."""
    token = _GRANTED.set(by_command)
    try:
        yield
    finally:
        _GRANTED.reset(token)


@contextmanager
def named_by_file(allow_download: bool = False) -> Iterator[None]:
    """Context in which a model file or card is built; downloads need permission of the caller or the command line."""
    with downloads(allow_download or _GRANTED.get()):
        yield


@contextmanager
def code_named_by(words: Sequence[str] | None) -> Iterator[None]:
    """Restrict Python code to names in the arguments of a command line; None, the default, allows all code.

    A foreign recipe must not run a Python file or module without permission.
    """
    token = _COMMAND.set(None if words is None else tuple(words))
    try:
        yield
    finally:
        _COMMAND.reset(token)


def check_code(text: str) -> None:
    """Check that Python code may be imported.

    Args:
        text: the name of a callable, such as 'file.py:name'.

    Raises:
        InputError: the name comes from a recipe, not from the command line.
    """
    words = _COMMAND.get()
    if words is not None and not any(text == word or word.endswith(f"={text}") for word in words):
        raise InputError(
            f"model={text} is Python code, which a recipe alone may not run. Pass `allow_code` if you trust it, or "
            "name the model on the command line."
        )


def check_download(what: str) -> None:
    """Check that a server may be contacted.

    Args:
        what: subject and verb of the message: "the weights of X are".

    Raises:
        InputError: a foreign file requests the download, and neither caller nor command line allows it.
    """
    if not _ALLOWED.get():
        raise InputError(
            f"{what} not on this disk, and a model file, card or recipe alone may not contact a server. Pass "
            "`allow_download` if you trust the file, or pass a checkpoint file with `weights`."
        )


def cached(repo: str, *files: str) -> Path | None:
    """Return the first of some files of a Hugging Face repository in the cache on disk; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(repo, file) for file in files)
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def with_safe(file: str) -> tuple[str, str]:
    """Return file names of a checkpoint on a hub: first that of its safetensors version, then the name itself.

    >>> with_safe("open_clip_pytorch_model.bin")
    ('open_clip_model.safetensors', 'open_clip_pytorch_model.bin')
    """
    return str(Path(file.replace("pytorch_model", "model")).with_suffix(".safetensors")), file


def downloaded(url: str | None, folder: Path) -> Path | None:
    """Return the downloaded file of a URL in a folder; None if it does not exist."""
    path = folder / Path(url or "").name
    return path if url and path.is_file() else None


def check_reach(what: str, on_disk: Callable[[], Sequence[str]]) -> None:
    """Raise `InputError` if something is not on disk and cannot be downloaded.

    Args:
        what: subject and verb of the message: "the weights of X are".
        on_disk: function that returns the names of available alternatives.

    Raises:
        InputError: downloads are not allowed, or the hub does not answer.
    """
    from huggingface_hub import constants

    check_download(what)
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if reason is not None:
        names = on_disk()
        others = (
            f"the weights on this disk are: {listed(names)}" if names else "no other weights are on this disk"
        )
        advice = "Choose one of them, pass" if names else "Pass"
        raise InputError(
            f"{what} not on this disk and {reason}; {others}. {advice} a checkpoint file with `weights`, or "
            "use `weights=random` for a trial."
        )


def unreachable(address: str) -> str | None:
    """Check whether a URL is reachable; return the reason if there is no answer within `_PATIENCE` seconds."""
    reasons = [f"no answer within {_PATIENCE:g} s"]

    def request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE).close()
            reasons.clear()
        except urllib.error.HTTPError:
            reasons.clear()  # the hub is reachable even if it answers with an error status
        except OSError as error:
            reasons[0] = str(getattr(error, "reason", error))

    # in a thread, since name resolution in a broken network has no timeout
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return f"{address} cannot be reached ({reasons[0]})" if reasons else None


def repositories() -> list[Any]:
    """Return huggingface_hub's information on each repository in the cache on disk, sorted by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        with warnings.catch_warnings(action="ignore"):
            return sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return []


def listed(names: Sequence[str]) -> str:
    """Return names as text, at most twelve of them.

    >>> listed([]), listed(["a", "b"]), listed("abcdefghijklmn")
    ('none', 'a, b', 'a, b, c, d, e, f, g, h, i, j, k, l and 2 more')
    """
    rest = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(names[:12]) or "none") + rest
