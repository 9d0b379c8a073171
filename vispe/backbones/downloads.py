"""Whether weights may come over the network: a model file from elsewhere must not contact a server by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vispe.errors import InputError

_ALLOWED: ContextVar[bool] = ContextVar("downloads_allowed", default=True)


@contextmanager
def downloads(allowed: bool) -> Iterator[None]:
    """Allow downloads inside, or use what is on this disk alone: then even a check for newer files is left out."""
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


def check_allowed(what: str) -> None:
    """Raise InputError where something would have to be downloaded and must not be."""
    if not _ALLOWED.get():
        raise InputError(
            f"{what} not on this disk, and a model file alone does not make vispe contact a server; add "
            "--allow-download to vispe apply if you trust the file, or give the checkpoint with --weights FILE."
        )
