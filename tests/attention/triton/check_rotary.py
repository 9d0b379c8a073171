"""Fused rotation against the rotation in float64, with gradients of the angles. `test_interpreter` runs this file."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention import oracle
from vispe import Grid, attention
from vispe.attention import DistanceBias, PairRotation
from vispe.attention.backends.triton.rotary import op as rotary_op
from vispe.attention.backends.triton.rotary.op import rotate_pairs

pytestmark = pytest.mark.usefixtures("poisoned")

# bfloat16 is cut, not rounded, here
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 8e-3,
}
B, N = 2, 11
LAYOUTS = ["half", "interleaved"]


def slices(dtype, heads=2, kv_heads=2, width=16, value=16, n=N, batch=B):
    """Return q, k and v as slices of one projection: no two with the same start, none contiguous."""
    sizes = heads * width, kv_heads * width, kv_heads * value
    parts = torch.randn(batch, n, sum(sizes)).to(dtype).split(sizes, -1)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value)
    return [p.unflatten(-1, s).transpose(1, 2) for p, s in zip(parts, shapes, strict=True)]


def angles(pairs, tables=1, batch=1, n=N):
    """Return cos and sin of any rotation with a factor, as those with a logit scale are; rows are strided."""
    angle = torch.randn(batch, n, tables, pairs).transpose(1, 2)
    return [t.requires_grad_() for t in (angle.cos() * 1.3, angle.sin() * 1.3)]


def rotation(cos, sin, layout, values=False):
    """Return the rotation in float64, which kernels do not support."""
    return PairRotation(cos.double(), sin.double(), layout, values)


def relative(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def compare(arguments, cos, sin, layout, values=False):
    """Compare q, k, v and an output after rotation, and all gradients, with the rotation in float64."""
    dtype = arguments[0].dtype
    leaves = [t.detach().requires_grad_() for t in arguments]
    exact = [t.detach().double().requires_grad_() for t in (*arguments, cos, sin)]
    ours = PairRotation(cos, sin, layout, values)
    theirs = rotation(*exact[3:], layout, values)
    actual, expected = list(ours.inputs(*leaves)), list(theirs.inputs(*exact[:3]))
    if values:
        actual.append(ours.output(leaves[2]))
        expected.append(theirs.output(exact[2]))
    cotangents = [torch.randn_like(t) for t in actual]
    mine = torch.autograd.grad(actual, (*leaves, cos, sin), cotangents)
    other = torch.autograd.grad(expected, exact, [c.double() for c in cotangents])
    for a, b in zip((*actual, *mine), (*expected, *other), strict=True):
        assert a.shape == b.shape
        assert relative(a, b) <= TOLERANCE[dtype]
    assert all(t.dtype == dtype for t in (*actual, *mine[:3]))
    assert all(t.dtype == torch.float32 for t in mine[3:])


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles of tokens, chunks of heads and parts of a sum."""
    monkeypatch.setattr(rotary_op, "ELEMENTS", 64)
    monkeypatch.setattr(rotary_op, "HEADS", 3)
    monkeypatch.setattr(rotary_op, "PROGRAMS", 20)


@pytest.mark.parametrize(
    ("layout", "pairs", "width", "dtype"),
    [
        ("half", 8, 16, torch.float32), ("half", 3, 16, torch.float16), ("half", 5, 13, torch.bfloat16),
        ("interleaved", 8, 16, torch.float16), ("interleaved", 3, 16, torch.bfloat16),
        ("interleaved", 5, 13, torch.float32), ("interleaved", 1, 2, torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_and_partial_rotation(layout, pairs, width, dtype):
    compare(slices(dtype, width=width), *angles(pairs), layout)


@pytest.mark.parametrize(
    ("layout", "tables", "batch", "kv_heads"),
    [
        ("half", 1, 1, 2),
        ("half", 4, 1, 4),
        ("interleaved", 2, 1, 2),
        ("half", 2, B, 2),
        ("interleaved", 1, B, 4),
    ],
)
def test_tables_of_heads_and_samples(small_tiles, layout, tables, batch, kv_heads):
    compare(slices(torch.float32, 4, kv_heads), *angles(6, tables, batch), layout)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("half", torch.float32), ("interleaved", torch.float16)], ids=str
)
def test_values(layout, dtype):
    compare(slices(dtype, 4, 2, value=24), *angles(7, 2), layout, values=True)


@pytest.mark.parametrize("n", [1, 37])
def test_numbers_of_tokens(n):
    compare(slices(torch.float32, n=n), *angles(8, n=n), "half")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout):
    q, k, v = slices(torch.float32)
    columns = torch.randn(B, 2, 16, N).transpose(-1, -2)  # channels are not side by side
    one = torch.randn(1, 2, 1, 16).expand(B, -1, N, -1)
    compare((columns, one, v), *angles(8), layout)
    wide = torch.randn(1, 1, N, 16)
    compare((q, k, v), *(t[..., ::2].detach().requires_grad_() for t in (wide.cos(), wide.sin())), layout)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("half", torch.float16), ("interleaved", torch.float32)], ids=str
)
def test_prefix_tokens_and_unpaired_channels_do_not_change(layout, dtype):
    q, k, v = slices(dtype)
    q = q.clone()
    q[..., 12], q[..., 13] = float("inf"), float("nan")
    angle = torch.randn(1, 1, N, 5)
    angle[:, :, :3] = 0
    result = PairRotation(angle.cos(), angle.sin(), layout).inputs(q, k, v)
    assert result[2] is v
    for x, y in zip((q, k), result, strict=False):
        assert torch.equal(y[:, :, :3, :10], x[:, :, :3, :10])
        torch.testing.assert_close(y[..., 10:], x[..., 10:], rtol=0, atol=0, equal_nan=True)


def test_separate_queries_keys_and_outputs_are_equal():
    arguments, (cos, sin) = slices(torch.float16), angles(6, 2)
    turn = PairRotation(cos, sin, "half", values=True)
    for x, one, all_ in zip(
        arguments, (turn.query, turn.key, turn.value), turn.inputs(*arguments), strict=True
    ):
        assert torch.equal(one(x), all_)
    assert (
        relative(turn.output(arguments[2]), rotation(cos, sin, "half", True).output(arguments[2].double()))
        < 6e-4
    )


def test_gradients_of_the_angles_are_the_same_in_every_run(small_tiles):
    arguments, (cos, sin) = slices(torch.float32, batch=3), angles(6)
    cotangents = [torch.randn_like(t) for t in arguments[:2]]
    runs = [
        torch.autograd.grad(PairRotation(cos, sin, "half").inputs(*arguments)[:2], (cos, sin), cotangents)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradient_of_the_gradient():
    arguments, (cos, sin) = slices(torch.float32), angles(6)
    cos, sin, q = cos.detach(), sin.detach(), arguments[0].detach().requires_grad_()
    grad = torch.randn_like(q).requires_grad_()
    back = torch.autograd.grad(PairRotation(cos, sin, "half").query(q), q, grad, create_graph=True)[0]
    second = torch.autograd.grad(back, grad, q)[0]
    assert relative(second, rotation(cos, sin, "half").query(q.double())) < 2e-6


class Operators(TorchDispatchMode):
    """Count operators that return a tensor of at least `size` elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor) and first.numel() >= self.size:
            self.names.append(func.name())
        return out


def test_a_rotation_before_a_bias_is_one_operator(monkeypatch):
    half = sys.modules["vispe.attention.backends.triton.tiles"]
    # the interpreter needs as long for a small tile
    monkeypatch.setitem(half.TABLES, (90, "float32"), half.TABLES[90, "half"])
    grid = Grid((3, 4), 1)
    q, k, v = slices(torch.float32, 4, 4, n=grid.tokens)
    pos = grid.positions()
    angle = torch.randn(1, 1, grid.tokens, 8)
    bias = DistanceBias((0.2, 0.9, 0.1, 0.5), pos)
    turn = PairRotation(angle.cos(), angle.sin(), "half")
    attention(q, k, v, bias=bias, backend="triton")  # packs the bias
    with Operators(q.numel()) as recorded:
        out = attention(q, k, v, bias=bias, transform=turn, backend="triton")
    launches = [
        n for n in recorded.names if not n.startswith(("aten::transpose", "aten::empty", "aten::detach"))
    ]
    assert sum("rotate_pairs" in n for n in launches) == 1
    assert [n for n in launches if "vispe" not in n] == []
    exact = rotation(angle.cos(), angle.sin(), "half")
    matrix = -torch.tensor([0.2, 0.9, 0.1, 0.5])[:, None, None] * oracle.distance_matrix(
        grid, "euclidean", False, "none"
    )
    expected = oracle.attend(exact.query(q.double()), exact.key(k.double()), v.double(), bias=matrix.double())
    assert relative(out, expected) <= 2e-6


# inside torch


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck reads it of its own copies
@pytest.mark.parametrize("count", [1, 3])
def test_opcheck(count):
    arguments = [t.detach().requires_grad_() for t in slices(torch.float32)][:count] + [None] * (3 - count)
    for learned in (False, True):
        tables = [t.detach().requires_grad_(learned) for t in angles(6)]
        torch.library.opcheck(rotate_pairs, (*arguments, *tables, True, False), rtol=1e-4, atol=1e-5)


def test_compiled_in_one_graph_for_two_sizes():
    torch._dynamo.reset()

    def rotated(q, k, v, cos, sin):
        return PairRotation(cos, sin, "interleaved", True).inputs(q, k, v)

    fast = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    for n in (N, 7):
        leaves = [t.detach().requires_grad_() for t in slices(torch.float32, n=n)] + angles(6, n=n)
        actual, expected = fast(*leaves), rotated(*leaves)
        cotangents = [torch.randn_like(t) for t in actual]
        ours, theirs = (torch.autograd.grad(out, leaves, cotangents) for out in (actual, expected))
        for a, b in zip((*actual, *ours), (*expected, *theirs), strict=True):
            assert torch.equal(a, b)


def test_unsupported_rotations_run_without_kernels():
    q, k, _ = slices(torch.float32)
    cos, sin = angles(6, 2)
    assert not PairRotation(cos, sin, "half")._fused(q[:, :1])  # one head for tables of two
    assert not PairRotation(cos.double(), sin.double(), "half")._fused(q)
    assert not PairRotation(cos, sin, "half")._fused(q.double())
    assert not PairRotation(cos, sin, "half")._fused(q[:0])
    assert PairRotation(cos, sin, "half")._fused(k)
