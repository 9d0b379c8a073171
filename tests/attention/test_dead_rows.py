"""Queries without any key: output 0 and gradients 0, in every backend and for every kind of mask or bias."""

import pytest
import torch

from tests.attention import oracle
from tests.attention.cases import HEADS, close, doubles, tensors
from tests.cases import cases
from vispe import Grid, attention
from vispe.attention import DenseBias, DistanceBias, GatedBias, LowRankBias, ProfileBias, SumBias, TableBias
from vispe.attention.backends import blocked

GRID, NONE = Grid((3, 4)), float("-inf")
TABLES = {
    "a head": lambda t: t[0].fill_(NONE),
    "rows of the grid": lambda t: t[:, :3].fill_(NONE),
    "all but one offset": lambda t: t.copy_(torch.full_like(t, NONE).index_fill_(2, torch.tensor([6]), 0.5)),
}
KEEP = torch.ones(2, 12, dtype=torch.bool)
KEEP[0], KEEP[1, 5:] = False, False


def table(name, heads=HEADS):
    values = torch.randn(heads, 5, 7)
    TABLES[name](values)
    return values.requires_grad_()


@pytest.fixture(params=["strips", "mask"])
def path(request, monkeypatch, poisoned):
    if request.param == "strips":
        monkeypatch.setattr(blocked, "MIN_QUERIES", 0)


def check(run, bias_of, dense, params, keep=None):
    """Compare with float64; rows without keys are 0 there, and so are their gradients."""
    q, k, v = tensors(2, 12)
    actual = run(q, k, v, bias_of())
    leaves, exact = [q, k, v, *params], doubles([q, k, v, *params])
    bias = dense(*exact[3:])
    allowed = None if keep is None else keep[:, None, None]
    expected = oracle.attend(*exact[:3], bias=bias, keep=allowed)
    close(actual, expected, 2e-5)
    dead = (bias.detach() == NONE).expand(2, HEADS, 12, 12)
    dead = (dead if keep is None else dead | ~allowed).all(-1)
    assert dead.any()
    assert (actual[dead] == 0).all()
    cotangent = torch.randn_like(actual)
    ours = torch.autograd.grad(actual, leaves, cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        close(mine, other, 1e-4, f"gradient {i}")
    assert (ours[0][dead] == 0).all()


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["called", "compiled"]
)
@pytest.mark.parametrize("keep", [None, KEEP], ids=["whole", "padded"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_tables(path, backend, name, keep, compiled):
    if keep is None and name == "all but one offset":
        keep = torch.rand(2, 12) > 0.7
    values, pos = table(name), GRID.positions()

    def run(q, k, v, bias):
        return attention(q, k, v, bias=TableBias(values, pos), key_padding_mask=keep, backend=backend)

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    check(run, lambda: None, lambda t: oracle.table_matrix(t, GRID)[None], [values], keep)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_sums(path, backend):
    pos, values, slopes = GRID.positions(), table("rows of the grid", 1), torch.rand(HEADS).requires_grad_()

    def run(q, k, v, bias):
        return attention(q, k, v, bias=bias, backend=backend)

    matrix = oracle.distance_matrix(GRID, "euclidean", False, "none")
    check(
        run, lambda: SumBias([DistanceBias(slopes, pos), TableBias(values, pos)]),
        lambda s, t: -s[:, None, None] * matrix + oracle.table_matrix(t, GRID)[None], [slopes, values],
    )  # fmt: skip


@cases("backend", ["reference", "sdpa"])
def test_known_finite_biases(backend):
    pos = GRID.positions()
    open_, closed = torch.randn(HEADS, 5, 7), table("a head").detach()
    assert TableBias(open_, pos).finite
    assert not TableBias(closed, pos).finite
    assert not TableBias(open_, pos, torch.full((1, 3), NONE)).finite
    assert not ProfileBias(torch.ones(HEADS), closed[:1], pos).finite
    assert not SumBias([TableBias(open_, pos), TableBias(closed, pos)]).finite
    assert not GatedBias(torch.full((1, HEADS, 12), NONE), None, TableBias(open_, pos)).finite
    assert not TableBias(open_.to("meta"), pos).finite  # nothing is known without a look
    assert DistanceBias((1.0, 0.0), pos).finite
    row = torch.zeros(1, 1, 12, 1)
    row[:, :, 3] = NONE
    bias = LowRankBias(row, torch.ones(1, 1, 12, 1), pos)
    q, k, v = tensors(2, 12)
    out = attention(q, k, v, bias=bias, backend=backend)
    assert (out[:, :, 3] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))


@pytest.mark.parametrize("backend", ["reference", "sdpa", pytest.param("flex", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a head", "rows of the grid"])
def test_without_gradients(name, backend):
    q, k, v = (torch.randn(2, HEADS, 12, 16) for _ in range(3))
    values = table(name).detach()
    out = attention(q, k, v, bias=TableBias(values, GRID.positions()), key_padding_mask=KEEP, backend=backend)
    bias = oracle.table_matrix(values.double(), GRID)[None]
    close(out, oracle.attend(q.double(), k.double(), v.double(), bias=bias, keep=KEEP[:, None, None]), 2e-5)


def test_second_derivatives_of_strips(monkeypatch):
    monkeypatch.setattr(blocked, "MIN_QUERIES", 0)
    values, pos = table("rows of the grid"), GRID.positions()
    q, k, v = tensors(2, 12)
    result = []
    for backend in ("sdpa", "reference"):
        out = attention(q, k, v, bias=TableBias(values, pos), key_padding_mask=KEEP, backend=backend)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        result.append(torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)))
    for mine, other in zip(*result, strict=True):
        close(mine, other, 1e-4)


@cases("backend", ["reference", "sdpa"])
def test_more_queries_than_keys(backend):
    q, k, v = tensors(2, 6, 3)
    out = attention(q, k, v, is_causal=True, backend=backend)
    close(out, oracle.attend(*doubles((q, k, v)), keep=torch.ones(6, 3).tril().bool()), 2e-5)
    none = attention(q, k[:, :, :0], v[:, :, :0], backend=backend)
    assert none.shape == q.shape
    assert (none == 0).all()


def test_a_row_below_the_range_of_float16_is_not_zero():
    values = torch.full((1, HEADS, 12, 12), -1e9)
    values[:, :, 3:] = 0.0
    q, k, v = (t.detach() for t in tensors(2, 12, dtype=torch.float16))
    out = attention(q, k, v, bias=DenseBias(values), backend="sdpa")
    close(out, oracle.attend(*doubles((q, k, v)), bias=values.double()), 2e-3)
