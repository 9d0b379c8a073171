"""Parameters of a module, also in the replicas of `torch.nn.DataParallel`."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module, or in a replica its copies of them.

    `torch.nn.DataParallel` does not register the copies, so `module.parameters()` is empty in its replicas. Code that
    compares parameters to decide whether a cached tensor is still valid has to compare the copies.

    Example:
        >>> len(parameters_of(nn.Linear(2, 3)))
        2
    """
    if not getattr(module, "_is_replica", False):
        return list(module.parameters())
    copies: list[Tensor] = []
    for part in module.modules():
        copies += cast("dict[str, Tensor]", part._former_parameters).values()
    return copies
