"""Calls of every family of fused kernels, and the ways to differentiate them other than one backward pass."""

import torch
from torch.autograd import forward_ad

from vispe import Grid
from vispe.attention import DistanceBias, GatedBias, PairRotation, TableBias
from vispe.attention.bias.decomposed import DecomposedBias

GRID = Grid((2, 3), prefix=1)
POS = GRID.positions()
N, HEADS, WIDTH = POS.tokens, 2, 16


def inputs(dtype=torch.float32):
    return [torch.randn(1, HEADS, N, WIDTH).to(dtype) for _ in range(3)]


def _numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


_COLUMNS = _numbers(1, HEADS, N, 4)
_TABLE = _numbers(HEADS, 3, 5)
_SUBSET = POS.gather(torch.tensor([[0, 3, 1, 2, 6, 5, 4]]))
_ANGLE = _numbers(1, 1, N, 4)
_FIXED = DistanceBias((0.5, 0.1), POS)

# name: the parameter, and the arguments of attention for it
FAMILIES = {
    "table": (_TABLE, lambda p: {"bias": TableBias(p, POS)}),
    "prefix": (_numbers(HEADS, 3), lambda p: {"bias": TableBias(_TABLE, POS, p)}),
    "distance": (_numbers(HEADS), lambda p: {"bias": DistanceBias(p, POS)}),
    "coords": (_numbers(HEADS), lambda p: {"bias": DistanceBias(p, _SUBSET)}),
    "gated": (_numbers(1, HEADS, N), lambda p: {"bias": GatedBias(p, None, _FIXED)}),
    "decomposed": (
        _numbers(1, HEADS, N, 3),
        lambda p: {"bias": DecomposedBias(p, _COLUMNS, "query", POS)},
    ),
    "rotation": (_ANGLE, lambda p: {"transform": PairRotation(p.cos(), p.sin(), "half")}),
    "rotation and bias": (
        _ANGLE,
        lambda p: {"bias": _FIXED, "transform": PairRotation(p.cos(), p.sin(), "interleaved", values=True)},
    ),
}


def _dual(function, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.sin())
        return forward_ad.unpack_dual(function(dual)).tangent


def _total(function):
    return lambda x: function(x).square().sum()


def _backward_within_dual_level(function, x):
    x = x.clone().requires_grad_()
    out = function(x)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), out.detach())
        return forward_ad.unpack_dual(torch.autograd.grad(out, x, cotangent)[0]).tangent


def twice(function, x):
    """Return the gradient of the squared gradient."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(_total(function)(x), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


FORWARD = {
    "forward_ad": _dual,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda s: f(x * s))(torch.ones(())),
    "hessian": lambda f, x: torch.func.hessian(lambda s: _total(f)(x * s))(torch.ones(())),
}
REVERSE = {
    "grad": lambda f, x: torch.func.grad(_total(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "per-sample gradients": lambda f, x: torch.func.vmap(torch.func.grad(_total(f)))(torch.stack([x, 2 * x])),
    "jacrev": lambda f, x: torch.func.jacrev(lambda s: f(x * s))(torch.ones(())),
}
BACKWARD = {"double backward": twice, "backward in forward mode": _backward_within_dual_level}
