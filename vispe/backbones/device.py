"""Which device computes."""

from __future__ import annotations

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
