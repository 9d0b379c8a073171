"""Whether autocast is active for a device, and a context that disables it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is active for tensors on `device`."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast on `device`."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()
