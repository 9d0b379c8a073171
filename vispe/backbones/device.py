"""Selection of the device, and flushing of denormal numbers on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vispe.errors import OptionError


def choose_device(device: str) -> str:
    """Resolve `'auto'` to `'cuda'` or `'cpu'`, and check any other name.

    Raises:
        OptionError: the name is not that of a device of this machine.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device={device!r} is not available ({reason}). Use auto or cpu.") from error
    return device


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Flush denormal numbers to 0 in this thread; they slow down CPU arithmetic several times.

    Threads that torch starts inside the ``with`` statement inherit the setting, so enter it before the first tensor
    operation to cover all threads.

    >>> with flush_denormals():
    ...     float(torch.tensor(1e-40) * 1)
    0.0
    """
    before = float(torch.tensor(1e-40) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
