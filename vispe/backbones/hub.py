"""Pretrained weights on this disk or from a hub, and what files from elsewhere may do: download, run Python code."""

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

_PATIENCE = 3.0  # seconds to wait for the hub before saying that it cannot be reached
_ALLOWED: ContextVar[bool] = ContextVar("downloads_allowed", default=True)
_GRANTED: ContextVar[bool] = ContextVar("downloads_granted", default=False)
_COMMAND: ContextVar[tuple[str, ...] | None] = ContextVar("trusted_words", default=None)


@contextmanager
def downloads(allowed: bool) -> Iterator[None]:
    """Allow downloads inside, or use what is on this disk alone: then even a check for newer files is skipped.

    A model file, a card or a recipe from elsewhere must not make vispe contact a server by itself. Permission that
    an outer context refuses stays refused.
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
    """Tell inside whether the command line lets files from elsewhere download what they name."""
    token = _GRANTED.set(by_command)
    try:
        yield
    finally:
        _GRANTED.reset(token)


@contextmanager
def named_by_file(allow_download: bool = False) -> Iterator[None]:
    """Build inside what a model file or card names; it is fetched only if the caller or the command line says so."""
    with downloads(allow_download or _GRANTED.get()):
        yield


@contextmanager
def code_named_by(words: Sequence[str] | None) -> Iterator[None]:
    """Let only the words of a command line name Python code inside; None, the default, allows all code.

    A recipe from elsewhere must not run a Python file or module by itself.
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
        InputError: it comes from a recipe, not from the command line.
    """
    words = _COMMAND.get()
    if words is not None and not any(text == word or word.endswith(f"={text}") for word in words):
        raise InputError(
            f"model={text} names Python code, and a recipe alone does not run code; add --allow-code if you trust it, "
            "or name the model on the command line."
        )


def check_download(what: str) -> None:
    """Check that a server may be contacted.

    Args:
        what: is missing, with its verb: "the weights of X are".

    Raises:
        InputError: a file from elsewhere asks for it, and the command line does not allow it.
    """
    if not _ALLOWED.get():
        raise InputError(
            f"{what} not on this disk, and a model file, card or recipe alone does not make vispe contact a server; "
            "add --allow-download if you trust the file, or give the checkpoint with --weights FILE."
        )


def cached(repo: str, *files: str) -> Path | None:
    """Return the first of some files of a repository of the Hugging Face hub that is on this disk, or None."""
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(repo, file) for file in files)
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def with_safe(file: str) -> tuple[str, str]:
    """Return the names under which a hub keeps a checkpoint: as safetensors, which is read first, and as named.

    >>> with_safe("open_clip_pytorch_model.bin")
    ('open_clip_model.safetensors', 'open_clip_pytorch_model.bin')
    """
    return str(Path(file.replace("pytorch_model", "model")).with_suffix(".safetensors")), file


def downloaded(url: str | None, folder: Path) -> Path | None:
    """Return the file in a folder of downloads that came from an address, or None."""
    path = folder / Path(url or "").name
    return path if url and path.is_file() else None


def check_reach(what: str, on_disk: Callable[[], Sequence[str]]) -> None:
    """Raise InputError at once where something is not on this disk and cannot be fetched either.

    Args:
        what: is missing, with its verb: "the weights of X are".
        on_disk: names what could be taken instead.
    """
    from huggingface_hub import constants

    check_download(what)
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if reason is not None:
        raise InputError(
            f"{what} not on this disk and {reason}; the weights on this disk are: {listed(on_disk())}. Choose one of "
            "them, or give a checkpoint file with --weights FILE, or --weights random for a trial."
        )


def unreachable(address: str) -> str | None:
    """Ask an address for a sign of life; return the reason when there is none within `_PATIENCE` seconds."""
    reasons = [f"no answer within {_PATIENCE:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE).close()
            reasons.clear()
        except urllib.error.HTTPError:
            reasons.clear()  # it answered
        except OSError as error:
            reasons[0] = str(getattr(error, "reason", error))

    # in a thread, since looking up a name in a broken network cannot be given a time limit
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return f"{address} cannot be reached ({reasons[0]})" if reasons else None


def repositories() -> list[Any]:
    """Return what huggingface_hub knows of each repository on this disk, by name."""
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


def short(error: BaseException) -> str:
    """Return the text of an error on one line, as part of a sentence."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
