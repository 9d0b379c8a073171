"""Tokens at other positions than those of their grid, and every bias for them."""

import torch

from tests.attention.bias_matrix import DERIVED
from tests.attention.cases import CASES, HEADS, WIDTH, close, leaf, tensors
from tests.encodings.test_conformance import DEPTH, DIM, build, positions, shapes
from vispe import Grid, attention
from vispe.attention import DistanceBias, GatedBias, SumBias, TableBias
from vispe.attention.automatic_backend import BACKENDS
from vispe.attention.call import Call
from vispe.encodings.compose import bias_of
from vispe.errors import VispeError

GRID = Grid((3, 4), 1)


def _distances(pos, **options):
    return DistanceBias((0.5, 0.2, 0.1), pos, **options), []


def _table(pos):
    values = leaf(HEADS, *(2 * n - 1 for n in pos.grid.shape))
    return TableBias(values, pos), [values]


def _gated(pos):
    gates = [leaf(2, HEADS, pos.tokens) for _ in range(2)]
    return GatedBias(*gates, _distances(pos)[0]), gates


def _sum(pos):
    (first, _), (second, params) = _distances(pos), _table(pos)
    return SumBias([first, second]), params


def _case(name):
    def make(pos):
        case = CASES[name](pos, 2)
        return case.bias, case.params

    return make


def _encoded(spec):
    def make(pos):
        encoding = build(spec).eval()
        x = torch.randn(2, pos.tokens, DIM)
        layer = next(i for i in range(DEPTH) if bias_of(encoding.parts(), pos, i, x) is not None)
        return lambda: bias_of(encoding.parts(), pos, layer, x), list(encoding.parameters())

    return make


# oracles of `CASES` need a grid in order; here another backend is the oracle, so all of them serve
VOCABULARY = {
    **{f"distance {metric}": lambda pos, metric=metric: _distances(pos, metric=metric)
       for metric in ("euclidean", "manhattan", "chebyshev", "squared")},
    "distance wrapped": lambda pos: _distances(pos, wrap=True, normalize="max"),
    "distance spaced": lambda pos: _distances(pos, spacing=(0.5, 3.0)),
    "distance learned": lambda pos: (lambda m: (DistanceBias(m, pos), [m]))(leaf(HEADS)),
    "table": _table, "gated": _gated, "sum": _sum,
    **{name: _case(name) for name in ("profile", "lowrank", "dense", "context of query", "context of key")},
}  # fmt: skip
ENCODED = {spec: _encoded(spec) for spec in DERIVED}


def grid_of(name):
    """Return the positions of the grid for a bias of `VOCABULARY` or `ENCODED`."""
    if name in VOCABULARY:
        return GRID.positions()
    encoding = build(name)
    return positions(encoding, shapes(encoding)[0])


def _replaced(pos):
    return pos.replace(coords=pos.coords * 1.7 + 0.3 * torch.randn_like(pos.coords) * pos.spatial[..., None])


def _lost(pos):
    """The last patch has no position."""
    spatial = pos.spatial.clone()
    spatial[:, -1] = False
    return pos.replace(spatial=spatial)


def _gathered(pos):
    return pos.gather(torch.stack([torch.randperm(pos.tokens)[: pos.tokens - 2] for _ in range(2)]))


MOVES = {
    "spaced": lambda pos: pos.with_spacing([2.0, 0.5, 1.5][: pos.axes]),
    "replaced": _replaced,
    "without a position": _lost,
    "wider": lambda pos: pos.replace(extent=pos.extent * 1.5),
    "gathered": _gathered,
    "gathered and spaced": lambda pos: _gathered(pos).with_spacing([2.0, 0.5, 1.5][: pos.axes]),
}


def moved_bias(name, move):
    """Return a constructor of a bias for moved tokens, its parameters and the positions; None where it refuses them."""
    pos = MOVES[move](grid_of(name))
    try:
        bias, params = {**VOCABULARY, **ENCODED}[name](pos)
        make = bias if callable(bias) else lambda: bias
        wide = torch.zeros(2, HEADS, pos.tokens, WIDTH)
        make().dense(q=wide, k=wide, scale=1.0)
    except VispeError:
        return None
    return make, params, pos


def compare_moved(name, move, backend, compiler=None):
    """Compare a backend with the reference, forward and all gradients; return whether it supports the call.

    Args:
        name: of `VOCABULARY` or `ENCODED`.
        move: of `MOVES`.
        backend: of `attention`.
        compiler: compiler of torch; nothing was computed with these positions before.
    """
    case = moved_bias(name, move)
    if case is None:
        return False
    make, params, pos = case
    q, k, v = tensors(2, pos.tokens)
    if BACKENDS[backend][0](Call(q, k, v, make())) is not None:
        return False

    def run(q, k, v):
        return attention(q, k, v, bias=make(), backend=backend)

    called = run
    if compiler:
        torch._dynamo.reset()
        pos.memo.clear()
        called = torch.compile(run, backend=compiler, fullgraph=True)
    leaves = [q, k, v, *(p for p in params if p.requires_grad)]
    actual = called(q, k, v)
    expected = attention(q, k, v, bias=make(), backend="reference")
    close(actual, expected, 1e-5, f"{name} {move}")
    cotangent = torch.randn_like(expected)
    ours = torch.autograd.grad(actual, leaves, cotangent, allow_unused=True)
    theirs = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True)
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), (name, move, i)
        if other is not None:
            close(mine, other, 4e-5, f"{name} {move}, gradient {i}")
    return True
