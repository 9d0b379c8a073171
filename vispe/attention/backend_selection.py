"""Which backend the user names: for one call, for a block of code, or for the whole process.

What a call names wins over `use_backend`, and that over the environment variable ``VISPE_BACKEND``, which is read once,
when vispe is imported. A compiled model is compiled anew for another choice; what `torch.export` and tracers write down
keeps the choice of that moment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, cast, get_args

import torch

from vispe.errors import UnknownName, did_you_mean

Backend = Literal["auto", "reference", "sdpa", "lowrank", "triton", "flex"]
VARIABLE = "VISPE_BACKEND"
_ENVIRONMENT = os.environ.get(VARIABLE, "").strip()
_CHOSEN: ContextVar[str | None] = ContextVar("vispe backend", default=None)


class _Seen(threading.local):
    """The choice of this thread, for compilers that cannot read a `ContextVar`."""

    def __init__(self) -> None:
        self.name: str | None = None


_SEEN = _Seen()
# Compilers of older versions cannot read a ContextVar; with them, the tasks of one thread share a choice.
_READABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


class Selected(NamedTuple):
    """A backend and who named it.

    Attributes:
        backend: 'auto' or the name of a backend.
        by: in words, '' where nobody named one.
    """

    backend: str
    by: str


def use_backend(backend: Backend) -> AbstractContextManager[None]:
    """Return a context in which attention takes the named backend wherever a call names none.

    `vispe.attention`, `vispe.Attention` and converted models obey it, compiled or not. A call that the backend cannot
    serve is an error with the reason. Contexts nest; threads (those of DataParallel, too) and asynchronous tasks have
    their own. 'auto' undoes an outer choice, that of the environment variable ``VISPE_BACKEND`` included. A model whose
    fused attention is switched off (timm's `fused_attn`, 'eager' of transformers) has named plain products itself.

    Under checkpointing a converted model is computed again with the choice of its forward pass; attention of your own
    with that of the backward pass, for which torch has threads of its own on CUDA: name the backend in the call there.

    Args:
        backend: 'reference', 'sdpa', 'lowrank', 'triton', 'flex', or 'auto' for the fastest that serves a call.

    Raises:
        UnknownName: there is no such backend.

    Example:
        >>> import torch, vispe
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with vispe.use_backend("reference"):
        ...     print(vispe.explain(q, q, q).backend)
        reference
    """
    check(backend)
    return _chosen(backend)


@contextmanager
def _chosen(backend: str) -> Generator[None]:
    token, before = _CHOSEN.set(backend), _SEEN.name
    _SEEN.name = backend
    try:
        yield
    finally:
        _CHOSEN.reset(token)
        _SEEN.name = before


def selected(backend: str | Selected = "auto") -> Selected:
    """Return the backend that a call takes, or 'auto', and who named it.

    Args:
        backend: what the call names, or what was returned before.

    Raises:
        UnknownName: there is no such backend.
    """
    if isinstance(backend, Selected):
        return backend
    if backend != "auto":
        check(backend)
        return Selected(backend, "name")
    chosen = _SEEN.name if not _READABLE and torch.compiler.is_dynamo_compiling() else _CHOSEN.get()
    if chosen is not None:
        return Selected(chosen, "vispe.use_backend" if chosen != "auto" else "")
    name = environment()
    return Selected(name, VARIABLE if name != "auto" else "")


def environment() -> str:
    """Return the backend that the environment names, or 'auto'.

    Raises:
        UnknownName: there is no such backend.
    """
    names = get_args(Backend)
    if _ENVIRONMENT and _ENVIRONMENT not in names:
        raise UnknownName(
            f"The environment variable {VARIABLE}={_ENVIRONMENT!r} names no backend."
            f"{did_you_mean(_ENVIRONMENT, names)} Choose {', '.join(names)}, or unset it."
        )
    return _ENVIRONMENT or "auto"


def check(backend: str) -> Backend:
    """Return the name of a backend, or raise UnknownName."""
    names = get_args(Backend)
    if backend not in names:
        raise UnknownName(
            f"There is no backend {backend!r}.{did_you_mean(str(backend), names)} Choose {', '.join(names)}."
        )
    return cast("Backend", backend)
