"""Fused operators in eager programs without the layers of torch.library, which take longer than the Python code here.

Compiled, exported and traced programs, tensor subclasses and dispatch modes need the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import is_eager


def eager_call(
    operator: Callable[..., Any],
    launch: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function of the positional arguments of an operator that launches its kernels directly, if possible.

    Args:
        operator: the operator, from `torch.library.custom_op`.
        launch: its implementation.
        setup_context: as registered with the operator; None if only the operator may record a gradient.
        backward: likewise.
    """

    class Direct(torch.autograd.Function):
        # without a separate setup_context, for which torch inspects the signature in each call
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = launch(*args)
            if setup_context is not None:
                setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None if backward is None else backward(ctx, *grads)

    def call(*args: Any) -> Any:
        if not is_eager(args[0]):
            return operator(*args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return operator(*args) if backward is None else Direct.apply(*args)
        return launch(*args)

    return call
