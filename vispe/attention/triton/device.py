"""Where the kernels can run; nothing of Triton is imported to find out."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

_INSTALLED = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, slowly, for tests


def no_device(x: Tensor) -> str | None:
    """Return why kernels cannot run where `x` is, or None."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not x.is_cuda:
        return None if _INTERPRETED and x.device.type == "cpu" else f"Triton kernels do not run on {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None
