"""Selection of the attention backend: per call, per block of code, or per process.

The `backend` argument of a call takes precedence over `use_backend`, which takes precedence over the environment
variable ``VISPE_BACKEND`` (read once, when vispe is imported). Selecting another backend recompiles a compiled model;
programs captured by `torch.export` or a tracer keep the backend that was selected at capture time.
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


class _ThreadSelection(threading.local):
    """The backend selected in this thread, for compilers that cannot read a `ContextVar`."""

    def __init__(self) -> None:
        self.name: str | None = None


_THREAD_SELECTION = _ThreadSelection()
# Dynamo cannot read a ContextVar before torch 2.15; there, all asyncio tasks of one thread share a selection.
_CONTEXTVAR_READABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


class Selected(NamedTuple):
    """A backend and the source of the selection.

    Attributes:
        backend: 'auto' or the name of a backend.
        by: human-readable source of the selection ('name' for the call itself), '' for the default.
    """

    backend: str
    by: str


def use_backend(backend: Backend) -> AbstractContextManager[None]:
    """Return a context manager that selects the backend of all calls that do not name one.

    It applies to `vispe.attention`, `vispe.Attention` and converted models, compiled or not. If the backend does not
    support a call, `BackendUnavailable` is raised with the reason. Contexts nest and are local to a thread (including
    those of DataParallel) and to an asyncio task. 'auto' cancels an outer selection, including the environment variable
    ``VISPE_BACKEND``. A model whose fused attention is disabled (timm's `fused_attn`, 'eager' in transformers) selects
    plain matrix products itself.

    With activation checkpointing, converted models recompute with the backend of their forward pass. Direct calls
    recompute with the backend selected during the backward pass, which torch runs in other threads on CUDA: pass
    `backend` to the call there.

    Args:
        backend: 'reference', 'sdpa', 'lowrank', 'triton', 'flex', or 'auto' for the fastest backend that supports a
            call.

    Raises:
        UnknownName: `backend` is not the name of a backend.

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
    # set both, as compiled code reads the thread-local selection
    token, previous = _CHOSEN.set(backend), _THREAD_SELECTION.name
    _THREAD_SELECTION.name = backend
    try:
        yield
    finally:
        _CHOSEN.reset(token)
        _THREAD_SELECTION.name = previous


def selected(backend: str | Selected = "auto") -> Selected:
    """Return the selected backend, or 'auto', and the source of the selection.

    Args:
        backend: the `backend` argument of a call, or the result of an earlier call of this function.

    Raises:
        UnknownName: `backend` or ``VISPE_BACKEND`` is not the name of a backend.
    """
    if isinstance(backend, Selected):
        return backend
    if backend != "auto":
        check(backend)
        return Selected(backend, "name")
    chosen = (
        _THREAD_SELECTION.name
        if not _CONTEXTVAR_READABLE and torch.compiler.is_dynamo_compiling()
        else _CHOSEN.get()
    )
    if chosen is not None:
        return Selected(chosen, "vispe.use_backend" if chosen != "auto" else "")
    name = environment()
    return Selected(name, VARIABLE if name != "auto" else "")


def environment() -> str:
    """Return the backend named by the environment variable ``VISPE_BACKEND``, or 'auto'.

    Raises:
        UnknownName: its value is not the name of a backend.
    """
    names = get_args(Backend)
    if _ENVIRONMENT and _ENVIRONMENT not in names:
        raise UnknownName(
            f"The environment variable {VARIABLE}={_ENVIRONMENT!r} is not the name of a backend."
            f"{did_you_mean(_ENVIRONMENT, names)} Use one of {', '.join(names)}, or unset it."
        )
    return _ENVIRONMENT or "auto"


def check(backend: str) -> Backend:
    """Return the name of a backend, or raise UnknownName."""
    names = get_args(Backend)
    if backend not in names:
        raise UnknownName(
            f"Unknown backend {backend!r}.{did_you_mean(str(backend), names)} Use one of {', '.join(names)}."
        )
    return cast("Backend", backend)
