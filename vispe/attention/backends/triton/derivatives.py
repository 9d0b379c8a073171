"""Derivatives that the fused operators do not have: forward mode, and second derivatives.

`unsupported_reason` refuses calls within `torch.func` transforms and dual levels. A backward pass may be differentiated
again, or run within a dual level, after the kernels were selected, so that the operators have to raise.
"""

from __future__ import annotations

from typing import Any

from vispe.attention.precision import forward_mode
from vispe.errors import BackendUnavailable

_REMEDY = "Use backend='reference' or vispe.use_backend('reference') in the forward pass."


def check_backward() -> None:
    """Raise if a backward pass runs in forward mode, in which its kernels would ignore the tangents.

    Raises:
        BackendUnavailable: forward mode is active.
    """
    if forward_mode():
        raise BackendUnavailable(
            "attention: the fused kernels have no forward-mode derivative, got a backward pass in forward mode. "
            f"{_REMEDY}"
        )


def refuse_second_derivative(gradients: Any) -> None:
    """Register a derivative of an operator that returns gradients: an error of vispe instead of torch's.

    Args:
        gradients: the operator, from `torch.library.custom_op`.
    """

    def backward(ctx: Any, *grads: Any) -> None:
        del ctx, grads
        raise BackendUnavailable(
            "attention: the fused kernels have no second derivative, got a backward pass through their gradients. "
            f"{_REMEDY}"
        )

    gradients.register_autograd(backward)
