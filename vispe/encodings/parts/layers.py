"""Layers of encodings: linear maps, convolutions, norms and tables that compute in float32.

They are not subclasses of the layers of `torch.nn`, so tools that replace, wrap or re-initialise layers by class
(dynamic quantisation, torchao, peft with ``target_modules="all-linear"``, bitsandbytes, ``_init_weights`` of a model)
do not modify the weights of an encoding. Parameter names, initial values and random number consumption are those of
the corresponding layer of `torch.nn`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, exact_product
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast


class PreciseLinear(nn.Module):
    """``x W^T + b`` in float32 or better, for parameters of every dtype and under autocast.

    Args:
        in_features: channels of the input.
        out_features: channels of the output.
        bias: whether b is added.

    Shapes: x (..., in_features) -> (..., out_features).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        _add_bias(self, out_features if bias else 0)
        self.reset_parameters()

    bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Linear` does."""
        _reset(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mapped channels, in float32 or better."""
        y = exact_product(x, self.weight.t())
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class PreciseConv(nn.Module):
    """Convolution with zero padding over one to three axes, in float32 or better, also under autocast.

    Args:
        axes: number of axes of the input.
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: kernel size along every axis.
        stride: along every axis.
        padding: zeros added at both ends of every axis.
        groups: groups of channels, see `torch.nn.Conv2d`.
        bias: whether a bias is added.

    Shapes: x (b, in_channels, n_1, ...) -> (b, out_channels, m_1, ...).
    """

    def __init__(
        self,
        axes: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.stride, self.padding, self.groups = stride, padding, groups
        # one kernel size for all axes
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *[kernel_size] * axes))
        _add_bias(self, out_channels if bias else 0)
        self.reset_parameters()

    bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Conv2d` does."""
        _reset(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution, in float32 or better."""
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        # the weight is (out, in / groups, *kernel): two dimensions more than the number of axes
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.weight.ndim - 3]
        with no_autocast(x.device):
            return convolve(
                x.to(dtype), self.weight.to(dtype), bias, self.stride, self.padding, groups=self.groups
            )

    def extra_repr(self) -> str:
        """Return the shape of the weight for `repr`."""
        return (
            f"{tuple(self.weight.shape)}, stride={self.stride}, padding={self.padding}, groups={self.groups}"
        )


class PreciseNorm(nn.Module):
    """Layer normalisation of the last axis, in float32 or better.

    Args:
        width: channels.
        eps: added to the variance.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised channels (..., width) of `x`, which is in float32 or better."""
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        return F.layer_norm(x, self.weight.shape, weight, bias, self.eps)


class EmbeddingTable(nn.Module):
    """Embedding table: learned vectors, one per row; the encoding selects rows.

    Args:
        rows: number of vectors.
        width: channels of a vector.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from a standard normal, as `torch.nn.Embedding` does."""
        nn.init.normal_(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return ", ".join(map(str, self.weight.shape))


def small_init(layer: PreciseLinear) -> None:
    """Draw the weight from a truncated normal with std 0.02; the bias is 0."""
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(cast("Tensor", layer.bias))


def _add_bias(layer: Any, size: int) -> None:
    layer.register_parameter("bias", nn.Parameter(torch.empty(size)) if size else None)


def _reset(weight: Tensor, bias: Tensor | None) -> None:
    # a = sqrt(5) gives a uniform distribution in +- 1 / sqrt(fan-in)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        # weight[0].numel() is the fan-in: inputs of one output channel
        bound = 1 / math.sqrt(weight[0].numel()) if weight[0].numel() else 0.0
        nn.init.uniform_(bias, -bound, bound)


def positioned_first(pos: Positions) -> tuple[Tensor, Tensor] | None:
    """Return the order that moves tokens with a position to the front, and its inverse (b or 1, n); None for grids.

    Causal convolutions along a sequence skip the other tokens. Those of a grid come first and act as zero padding.
    """
    if pos.grid is not None:
        return None
    order = (~pos.spatial).int().argsort(dim=-1, stable=True)
    return order, order.argsort(-1)


def take_tokens(x: Tensor, order: Tensor) -> Tensor:
    """Return tokens (b, ..., n, d) in an order (b or 1, n)."""
    index = order.reshape(len(order), *[1] * (x.dim() - 3), -1, 1)
    return x.take_along_dim(index.expand(*x.shape[:-1], 1), -2)
