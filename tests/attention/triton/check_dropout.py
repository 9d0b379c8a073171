"""Dropout in the fused kernels: which weights are dropped, output and gradients. `test_interpreter` runs this file."""

import pytest
import torch

from tests.attention.triton.check_attention import BACKWARD, FORWARD, inputs, relative, table
from vispe import Grid, attention, explain
from vispe.attention import TableBias
from vispe.attention.backends.triton.grid import operands
from vispe.attention.backends.triton.grid.launch import run_forward
from vispe.attention.bias.strip.layout import Layout

pytestmark = pytest.mark.usefixtures("poisoned")
BITS = 2**32


def hashed(x):
    """The finisher of MurmurHash3, in integers of 64 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % BITS
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % BITS
    return x ^ (x >> 16)


def mixed(x):
    x = x * 0xC2B2AE35 % BITS
    return x ^ (x >> 16)


def undropped(seed, batch, heads, n, prefix, dropout):
    """Return which weights `grid.dropout` does not drop, (batch, heads, n, n); the first `prefix` tokens are last."""
    low, high = seed % BITS, seed >> 32
    head = hashed(hashed(hashed(high) ^ low) ^ torch.arange(batch * heads).view(batch, heads, 1))
    position = (torch.arange(n) - prefix) % n
    rows, columns = mixed(head ^ position), mixed(hashed((head + 1) % BITS) ^ position)
    pair = (rows[..., :, None] ^ columns[..., None, :]) * 0x9E3779B1 % BITS
    pair = (pair ^ (pair >> 15)) * 0x85EBCA6B % BITS
    return pair >= int(torch.tensor(dropout, dtype=torch.float32) * BITS)


@pytest.fixture
def seeds(monkeypatch):
    """The seeds that calls draw."""
    drawn, draw = [], torch.randint

    def randint(*args, **options):
        drawn.append(draw(*args, **options))
        return drawn[-1]

    monkeypatch.setattr(torch, "randint", randint)
    return drawn


def attend(q, k, v, scores, undropped, dropout):
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + scores
    return (logits.softmax(-1) * undropped / (1 - dropout)) @ v


CASES = [
    (Grid((5, 7), 1), 0.1, {}, torch.float32), (Grid((13, 11), 5), 0.5, {}, torch.float32),
    (Grid((9, 9)), 0.25, {"deterministic": False}, torch.float32), (Grid((9, 11), 1), 0.1, {}, torch.float16),
    (Grid((6, 7), 1), 0.9, {"is_causal": True}, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("grid", "dropout", "options", "dtype"), CASES, ids=str)
def test_output_and_gradients(monkeypatch, seeds, grid, dropout, options, dtype, rows):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    pos, width = grid.positions(), 72 if grid.prefix == 5 else 16
    leaves = [*inputs(grid, dtype, width), table(grid)]
    bias = TableBias(leaves[3], pos)
    out = attention(*leaves[:3], bias=bias, dropout_p=dropout, backend="triton", **options)
    # rows of small grids hold the prefix, and count it first
    not_dropped = undropped(int(seeds[-1]), 2, 2, grid.tokens, 0 if rows else grid.prefix, dropout)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    scores = TableBias(exact[3], pos).dense()
    if options.get("is_causal"):
        hidden = torch.ones(grid.tokens, grid.tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    expected = attend(*exact[:3], scores, not_dropped, dropout)
    assert relative(out, expected.detach()) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, cotangent)
    right = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other in zip(actual, right, strict=True):
        assert relative(mine, other) <= BACKWARD[dtype]


def test_heads_that_share_keys(seeds):
    grid = Grid((6, 7))
    q, k, v = inputs(grid, heads=4)[0], *inputs(grid, heads=2)[1:]
    leaves = [q, k, v, table(grid, heads=4)]
    bias = TableBias(leaves[3], grid.positions())
    out = attention(*leaves[:3], bias=bias, dropout_p=0.3, enable_gqa=True, backend="triton")
    not_dropped = undropped(int(seeds[-1]), 2, 4, grid.tokens, 0, 0.3)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    k, v = (t.repeat_interleave(2, 1) for t in exact[1:3])
    expected = attend(exact[0], k, v, TableBias(exact[3], grid.positions()).dense(), not_dropped, 0.3)
    cotangent = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, cotangent)
    right = torch.autograd.grad(expected, exact, cotangent.double())
    assert relative(out, expected.detach()) <= 2e-6
    for mine, other in zip(actual, right, strict=True):
        assert relative(mine, other) <= 1e-5


def test_fixed_sums(seeds):
    """Fixed point gradients of a table do not overflow when undropped weights are scaled."""
    grid = Grid((9, 11), 1)
    leaves = [*inputs(grid), table(grid)]
    bias = TableBias(leaves[3], grid.positions())
    result = []
    for deterministic in (True, None):
        torch.manual_seed(3)
        out = attention(*leaves[:3], bias=bias, dropout_p=0.9, backend="triton", deterministic=deterministic)
        result.append(torch.autograd.grad(out.square().sum(), leaves[3])[0])
    assert seeds[0] == seeds[1]
    torch.testing.assert_close(*result, rtol=1e-5, atol=1e-6)


def test_seeds_come_from_torch():
    grid = Grid((5, 7), 1)
    q, k, v = inputs(grid)
    bias = TableBias(table(grid).detach(), grid.positions())
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [attention(q, k, v, bias=bias, dropout_p=0.5, backend="triton") for _ in range(2)]
    same = [[torch.equal(a, b) for b in outs] for a in outs]
    assert same == [[i == j or {i, j} in ({0, 2}, {1, 3}) for j in range(6)] for i in range(6)]


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_undropped_weights_are_random_and_independent(dropout):
    """Of 2 million pairs; rows, columns, samples and the corners of rectangles are uncorrelated."""
    batch, heads, n = 2, 4, 512
    not_dropped = undropped(123456789123456789, batch, heads, n, 1, dropout).double()
    deviation = (dropout * (1 - dropout)) ** 0.5
    z = (not_dropped - (1 - dropout)) / deviation
    assert abs(z.mean()) * z.numel() ** 0.5 < 4
    assert (z.mean(-1) * n**0.5).square().mean() == pytest.approx(1, abs=4 * (2 / (batch * heads * n)) ** 0.5)
    assert (z.mean(-2) * n**0.5).square().mean() == pytest.approx(1, abs=4 * (2 / (batch * heads * n)) ** 0.5)
    for step in (1, 2, 16, 128):
        beside = z.roll(step, -1), z.roll(step, -2), z.roll(1, 0), z.roll(1, 1), z.mT.roll(step, -1)
        for other in beside:
            assert abs((z * other).mean()) * z.numel() ** 0.5 < 5
        corners = z * z.roll(step, -1) * z.roll(step, -2) * z.roll((step, step), (-1, -2))
        assert abs(corners.mean()) * z.numel() ** 0.5 < 5


def test_without_a_bias(seeds):
    q, k, v = inputs(Grid((6, 7)))
    seed = torch.tensor([77])
    out = run_forward(q, k, v, None, None, None, None, 0, 0.25, seed=seed, dropout=0.4)[0]
    expected = attend(*(t.double() for t in (q, k, v)), 0.0, undropped(77, 2, 2, 42, 0, 0.4), 0.4)
    assert relative(out, expected) <= 2e-6


def test_compiled():
    grid = Grid((9, 11), 1)
    pos, leaves = grid.positions(), [*inputs(grid), table(grid)]

    def attend(q, k, v, values):
        return attention(q, k, v, bias=TableBias(values, pos), dropout_p=0.3, backend="triton")

    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    result = []
    for run in (attend, fast):
        torch.manual_seed(5)
        out = run(*leaves)
        result.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for mine, other in zip(*result, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_checkpointing_drops_the_same():
    grid = Grid((5, 7), 1)
    pos, leaves = grid.positions(), [*inputs(grid), table(grid)]

    def attend(q, k, v, values):
        return attention(q, k, v, bias=TableBias(values, pos), dropout_p=0.5, backend="triton")

    result = []
    for again in (False, True):
        torch.manual_seed(5)
        out = (
            torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
            if again
            else attend(*leaves)
        )
        result.append(torch.autograd.grad(out.square().sum(), leaves))
    for mine, other in zip(*result, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_auto_selects_it():
    q, k, v = inputs(Grid((5, 7), 1))
    bias = TableBias(table(Grid((5, 7), 1)), Grid((5, 7), 1).positions())
    assert explain(q, k, v, bias=bias, dropout_p=0.1, backend="triton").backend == "triton"
