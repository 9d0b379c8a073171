"""Log-sum-exp and sinks of the fused kernels against the reference. `test_interpreter` runs this file."""

import math
import os

import pytest
import torch

from tests.attention.cases import close
from vispe import Grid, attention
from vispe.attention import DistanceBias, GatedBias, ProfileBias, SumBias, TableBias, WindowMask
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.bias.decomposed import DecomposedBias

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, WIDTH = 2, 16
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter needs as long for a small tile as for a large one."""
    if "VISPE_TEST_DEVICE" not in os.environ:
        monkeypatch.setitem(sizes.TABLES, (90, "float32"), sizes.TABLES[90, "half"])


def leaf(*shape, far=0.0):
    return (torch.randn(*shape) + far).requires_grad_()


def table_of(pos, heads=HEADS, far=0.0):
    return leaf(heads, *(2 * n - 1 for n in pos.grid.shape), far=far)


def subset(pos):
    index = torch.stack([torch.randperm(pos.tokens)[:11] for _ in range(2)])
    return pos.gather(index)


def windows(pos):
    mask = torch.zeros(2, pos.tokens, pos.tokens)
    half = pos.tokens // 2
    mask[1, :half, half:] = mask[1, half:, :half] = -100.0
    return mask


def make(name, pos):
    """Return a bias and its parameters."""
    if name == "none":
        return None, []
    if name == "fixed":
        return DistanceBias((0.5, 2.0), pos), []
    if name == "slopes":
        slopes = torch.tensor([0.3, 0.9], requires_grad=True)
        return DistanceBias(slopes, pos), [slopes]
    if name in ("table", "far table", "shared table"):
        values = table_of(
            pos, 1 if name == "shared table" else HEADS, far=40.0 if name == "far table" else 0.0
        )
        edge = leaf(HEADS, 3, far=-30.0 if name == "far table" else 0.0)
        return TableBias(values, pos, edge), [values, edge]
    if name == "profile":
        slopes, values = leaf(HEADS), table_of(pos, 1)
        return ProfileBias(slopes, values, pos), [slopes, values]
    if name == "decomposed":
        rows, cols = (leaf(2, HEADS, pos.tokens, n + 1) for n in pos.grid.shape)
        return DecomposedBias(rows, cols, "key", pos), [rows, cols]
    if name == "gated":
        row = leaf(2, HEADS, pos.tokens)
        return GatedBias(row, None, DistanceBias((0.5, 0.2), pos)), [row]
    if name == "subset sum":
        slopes, values = torch.tensor([0.3, 0.9], requires_grad=True), table_of(pos, far=5.0)
        edge = leaf(HEADS, 3, far=-3.0)
        return SumBias([DistanceBias(slopes, pos), TableBias(values, pos, edge)]), [slopes, values, edge]
    raise AssertionError(name)


NAMES = (
    "none",
    "fixed",
    "slopes",
    "table",
    "far table",
    "shared table",
    "profile",
    "gated",
    "decomposed",
    "subset sum",
)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_reference(name, sunk, dtype):
    pos = Grid((3, 5), prefix=2).positions()
    pos = subset(pos) if name == "subset sum" else pos
    bias, params = make(name, pos)
    tensors = [torch.randn(2, HEADS, pos.tokens, WIDTH).to(dtype).requires_grad_() for _ in range(3)]
    sinks = [leaf(HEADS)] if sunk else []
    padding = torch.ones(2, pos.tokens, dtype=torch.bool)
    padding[0, 4:7] = False
    padding[1] = False  # closed rows
    inputs = [*tensors, *params, *sinks]
    arguments = {"bias": bias, "key_padding_mask": padding, "sinks": sinks[0] if sunk else None}
    ours = attention(*tensors, **arguments, backend="triton", return_lse=True)
    theirs = attention(*(t.float() for t in tensors), **arguments, backend="reference", return_lse=True)
    assert ours[1].dtype == torch.float32
    assert torch.equal(ours[1] == -math.inf, theirs[1] == -math.inf)
    sure = theirs[1] > -math.inf
    limit = LIMITS[dtype]
    close(ours[0], theirs[0], limit, "output")
    assert float((ours[1] - theirs[1]).detach()[sure].abs().max()) < limit
    cotangents = torch.randn_like(theirs[0]), torch.randn_like(theirs[1]).masked_fill(~sure, 0.0)

    def grads(results):
        parts = results[0].float(), results[1].masked_fill(~sure, 0.0)
        total = sum((a * c).sum() for a, c in zip(parts, cotangents, strict=True))
        return torch.autograd.grad(total, inputs)

    for i, (a, e) in enumerate(zip(grads(ours), grads(theirs), strict=True)):
        close(a, e, 4 * limit, f"gradient of input {i}")


def test_gradient_of_the_log_sum_exp():
    pos = Grid((3, 4), prefix=1).positions()
    bias, params = make("table", pos)
    q, k, v = (torch.randn(1, HEADS, pos.tokens, WIDTH, requires_grad=True) for _ in range(3))
    ours, theirs = (
        torch.autograd.grad(
            attention(q, k, v, bias=bias, backend=backend, return_lse=True)[1].square().sum(), (q, k, *params)
        )
        for backend in ("triton", "reference")
    )
    for a, e in zip(ours, theirs, strict=True):
        close(a, e, 2e-5)


def test_huge_logits():
    """Rows whose maximum is beyond the range in which log2-sum-exp is stored as one number."""
    q, k, v = (torch.randn(1, HEADS, 20, WIDTH, requires_grad=True) for _ in range(3))
    results = [
        attention(
            q * 60,
            k * 60,
            v,
            bias=DistanceBias((1.0, 0.5), Grid((4, 5)).positions()),
            backend=backend,
            return_lse=True,
        )
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-3)
    ours, theirs = (torch.autograd.grad(lse.sum(), (q, k)) for _, lse in results)
    for a, e in zip(ours, theirs, strict=True):
        close(a, e, 1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_grouped_heads_and_dropout(causal, dropout):
    pos = Grid((4, 5), prefix=1).positions()
    bias, _ = make("fixed", pos)
    q = torch.randn(1, HEADS, pos.tokens, WIDTH)
    k, v = (torch.randn(1, 1, pos.tokens, WIDTH) for _ in range(2))
    arguments = {"bias": bias, "enable_gqa": True, "is_causal": causal, "return_lse": True}
    ours = attention(q, k, v, backend="triton", dropout_p=dropout, **arguments)[1]
    torch.testing.assert_close(ours, attention(q, k, v, backend="reference", **arguments)[1])


def test_merging_halves_of_the_keys():
    pos = Grid((4, 4), prefix=1).positions()
    bias, params = make("table", pos)
    q, k, v = (torch.randn(1, HEADS, pos.tokens, WIDTH, requires_grad=True) for _ in range(3))
    first = (torch.arange(pos.tokens) < 7)[None]
    parts = [
        attention(q, k, v, bias=bias, key_padding_mask=keys, backend="triton", return_lse=True)
        for keys in (first, ~first)
    ]
    outs, lses = (torch.stack(t) for t in zip(*parts, strict=True))
    merged = (lses.softmax(0)[..., None] * outs).sum(0)
    fused, lse = attention(q, k, v, bias=bias, backend="triton", return_lse=True)
    close(merged, fused, 1e-6)
    close(lses.logsumexp(0), lse, 1e-6)
    inputs = [q, k, v, *params]
    ours, theirs = (torch.autograd.grad(t.square().sum(), inputs) for t in (merged, fused))
    for a, e in zip(ours, theirs, strict=True):
        close(a, e, 1e-5)


def test_packed_sequences():
    q, k, v = (torch.randn(1, HEADS, 20, WIDTH) for _ in range(3))
    arguments = {"cu_seqlens": torch.tensor([0, 7, 20]), "return_lse": True, "sinks": torch.randn(HEADS)}
    ours, theirs = (attention(q, k, v, backend=name, **arguments) for name in ("triton", "reference"))
    for a, e in zip(ours, theirs, strict=True):
        close(a, e, 1e-6)


def test_windows():
    pos = Grid((2, 4)).positions()
    values = table_of(pos, far=7.0)
    mask = WindowMask(windows(pos), pos, samples=2)
    q, k, v = (torch.randn(2, HEADS, pos.tokens, WIDTH) for _ in range(3))
    for bias in (None, TableBias(values, pos)):
        ours, theirs = (
            attention(q, k, v, bias=bias, attn_mask=mask, backend=name, return_lse=True)
            for name in ("triton", "reference")
        )
        for a, e in zip(ours, theirs, strict=True):
            close(a, e, 1e-5)
