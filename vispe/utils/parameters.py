"""Parameters of a module, also where a wrapper has replaced them by plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module, and the tensors that it has as plain attributes.

    Replicas of `torch.nn.DataParallel` and modules in `FullyShardedDataParallel` have their weights as plain tensors,
    so `module.parameters()` is empty. Code that compares parameters to decide whether a cached tensor is still valid
    has to compare these tensors.

    Example:
        >>> len(parameters_of(nn.Linear(2, 3)))
        2
    """
    registered: list[Tensor] = list(module.parameters())
    if torch.compiler.is_compiling():  # caches nothing
        return registered
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    return [*registered, *plain]
