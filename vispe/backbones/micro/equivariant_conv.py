"""D4-equivariant convolutions, with kernels that are linear combinations of symmetric patterns.

A convolution commutes with the eight poses of a square (rotations by 90 degrees and mirroring, D4) if its kernel is
invariant under all of them. Invariant kernels alone cannot detect edges. Therefore pairs of kernels of three
more kinds are used: slopes (odd along one axis), and saddles with their diagonal counterparts. The output for
a pair is the length of its two responses (root of the sum of squares). A pose swaps the two responses or
changes their signs, so the length is invariant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_KINDS = ("same", "slope", "saddle", "twist")
_EPS = 1e-4  # added under the square root of lengths; grey levels are of order 1


class SymmetricConv(nn.Module):
    """Convolution that commutes with rotations by 90 degrees and mirroring; padding replicates the border.

    Args:
        inputs: number of input channels.
        outputs: number of output channels with invariant kernels.
        edges: number of output channels with lengths of slopes; as many channels have lengths of saddles.
        side: kernel size in pixels; `side - stride` must be even, so that the output grid is symmetric.
        stride: stride in pixels.

    Shapes: (b, inputs, h, w), or (b, 1, h, w) for equal channels -> (b, outputs + 2 edges, h / stride, w / stride).
    """

    def __init__(self, inputs: int, outputs: int, edges: int, side: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.outputs, self.edges, self.stride, self.margin = outputs, edges, stride, (side - stride) // 2
        for kind in _KINDS:
            basis = patterns(side, kind)
            self.register_buffer(f"basis_{kind}", basis, persistent=False)
            count = outputs if kind == "same" else edges
            gain = math.sqrt(2.0 if kind == "same" else 1.0)
            weight = torch.randn(count, inputs, len(basis)) * gain / math.sqrt(inputs * len(basis))
            self.register_parameter(kind, nn.Parameter(weight) if count else None)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def kernel(self) -> Tensor:
        """Return all kernels, (outputs + 4 edges, inputs, side, side)."""
        kernels = {
            kind: torch.einsum("oip,phw->oihw", getattr(self, kind), getattr(self, f"basis_{kind}"))
            for kind in _KINDS
            if getattr(self, kind) is not None
        }
        if not self.edges:
            return kernels["same"]
        # the first kernels of all pairs, then the second kernels: vertical slopes, diagonal saddles
        kernels = [
            kernels["same"],
            kernels["slope"],
            kernels["saddle"],
            kernels["slope"].mT,
            kernels["twist"],
        ]
        return torch.cat(kernels).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (b, inputs, h, w), or (b, 1, h, w) for equal channels."""
        if self.margin:
            x = nn.functional.pad(x, (self.margin,) * 4, mode="replicate")
        kernel = self.kernel()
        if x.shape[1] == 1 < kernel.shape[1]:
            kernel = kernel.sum(1, keepdim=True)
            # strides of the channels-last format, which is several times faster
            x = x[:, 0, ..., None].movedim(-1, 1)
        # three convolutions instead of one, as the following operations are much faster on contiguous tensors
        kernels = kernel.split([self.outputs, 2 * self.edges, 2 * self.edges])
        plain = nn.functional.conv2d(x, kernels[0], self.bias, stride=self.stride)
        if not self.edges:
            return plain
        one, other = (nn.functional.conv2d(x, k, stride=self.stride) for k in kernels[1:])
        if one.requires_grad:
            length = torch.sqrt(one * one + other * other + _EPS)
        else:  # in place
            length = one.square_().addcmul_(other, other).add_(_EPS).sqrt_()
        return torch.cat([plain, length], 1)


class Gelu(nn.Module):
    """GELU, in place if no gradient is needed; this halves the time, as no memory is allocated."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply GELU to a tensor that is not used elsewhere."""
        return nn.functional.gelu(x) if x.requires_grad else torch.ops.aten.gelu_(x)


def patterns(side: int, kind: str) -> Tensor:
    """Return an orthonormal basis of the kernels with a symmetry, (n, side, side).

    Args:
        side: kernel size in pixels.
        kind: 'same' (invariant under all eight poses), 'slope' (odd along columns, even along rows), 'saddle' (even
            along both axes, negated by transposition) or 'twist' (odd along both axes, invariant under transposition).

    >>> patterns(2, "slope")
    tensor([[[ 0.5000, -0.5000],
             [ 0.5000, -0.5000]]])
    """
    points = torch.eye(side * side).view(-1, side, side)
    along, down = (-1, -1) if kind == "twist" else (-1 if kind == "slope" else 1, 1)
    # symmetrise each single pixel, with signs, along both axes and the diagonal
    spread = points + along * points.flip(-1)
    spread = spread + down * spread.flip(-2)
    if kind != "slope":
        spread = spread + (-1 if kind == "saddle" else 1) * spread.mT
    # pixels that poses map to each other give the same pattern up to its sign, and some patterns are 0
    basis: list[Tensor] = []
    for pattern in spread[spread.abs().sum((1, 2)) > 0]:
        pattern = pattern / pattern.norm()
        if all(float((pattern * other).sum().abs()) < 0.5 for other in basis):
            basis.append(pattern)
    return torch.stack(basis)
