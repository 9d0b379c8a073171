"""Which device computes, and what the CPU does with numbers that are nearly 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vispe.errors import OptionError


def choose_device(device: str) -> str:
    """Turn `'auto'` into `'cuda'` or `'cpu'`, and check any other name.

    Raises:
        OptionError: not a device of this machine.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device={device!r} cannot be used here ({reason}); use auto or cpu.") from error
    return device


@contextmanager
def flushed() -> Iterator[None]:
    """Take denormal numbers for 0 in this thread: they slow arithmetic of a CPU down several times.

    Threads that torch starts meanwhile do the same, so a program that opens this before its first product of tensors
    has them flushed everywhere.

    >>> with flushed():
    ...     float(torch.tensor(1e-40) * 1)
    0.0
    """
    before = float(torch.tensor(1e-40) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
