"""Small constant tensors, copied to each device once.

A copy from the host to a GPU waits for all work of the GPU, and is an error while a CUDA graph is captured.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

Numbers = tuple[float, ...] | tuple[tuple[float, ...], ...]


def constant(numbers: Numbers, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return numbers as a tensor, which callers must not change. It is never dropped, since captured graphs read it.

    Args:
        numbers: one or two levels of tuples; symbols of a compiled program are allowed.
        dtype: dtype of the tensor.
        device: torch device; the default device if None.

    Example:
        >>> constant((1.0, 2.0), torch.float32)
        tensor([1., 2.])
    """
    device = torch.get_default_device() if device is None else device
    # compilers and tracers have constants of their own, and fake or wrapped tensors must not outlive them
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore
    if traced or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():  # pyright: ignore
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _constant(numbers, dtype, device)


@cache
def _constant(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    # inference tensors could not be used in later training
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)
