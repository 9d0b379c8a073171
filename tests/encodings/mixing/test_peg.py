"""peg against a slow convolution, its symmetries, dropped tokens, coarser grids and refusals."""

import math

import pytest
import timm.models.coat
import timm.models.twins
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases, pairwise
from vispe import Grid, Positions, create_encoding
from vispe.encodings.attention_layer import Attention
from vispe.errors import OptionError, ShapeError, UnsupportedCombination

sides = st.integers(1, 7)
quick = settings(max_examples=20, deadline=None, derandomize=True)


def peg(dim=6, dtype=torch.float64, **options):
    return create_encoding("peg", dim=dim, **options).to(dtype)


def read(cell, n, padding):
    """Return the cell of a padded coordinate, or None outside."""
    if 0 <= cell < n:
        return cell
    if padding == "zeros":
        return None
    if padding == "circular":
        return cell % n
    while not 0 <= cell < n:
        cell = 0 if n == 1 else -cell if cell < 0 else 2 * (n - 1) - cell
    return cell


def slow(x, shape, prefix, kernel, bias, padding="zeros", present=None):
    """Return y by loops over tokens, for tokens (b, n, d) of a full grid; absent ones are read as 0."""
    h, w = shape
    k = kernel.shape[-1] // 2
    out = x.clone()
    for r in range(h):
        for c in range(w):
            total = bias.clone().expand(x.shape[0], -1)
            for i in range(-k, k + 1):
                for j in range(-k, k + 1):
                    row, column = read(r + i, h, padding), read(c + j, w, padding)
                    if row is not None and column is not None:
                        token = prefix + row * w + column
                        if present is None or token in present:
                            total = total + x[:, token] * kernel[:, 0, i + k, j + k]
            out[:, prefix + r * w + c] += total
    return out


@pairwise
@cases("padding", ["zeros", "circular", "reflect"])
@cases("symmetric", [False, True])
@cases(("shape", "k"), [((3, 5), 3), ((5, 2), 5), ((1, 1), 3), ((1, 6), 5), ((2, 3), 7)])
def test_values_and_gradients(padding, symmetric, shape, k):
    encoding = peg(padding=padding, symmetric=symmetric, kernel_size=k, after=[2])
    pos = Grid(shape, prefix=2).positions()
    x = torch.randn(2, pos.tokens, 6, dtype=torch.float64, requires_grad=True)
    expected = slow(x, shape, 2, encoding.kernel(2), encoding.proj[0].bias, padding)
    actual = encoding.mix(x, pos, 2)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual[:, :2], x[:, :2])
    assert encoding.mix(x, pos, 1) is x
    cotangent = torch.randn_like(x)
    inputs = (x, encoding.proj[0].weight, encoding.proj[0].bias)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_modules_of_timm_and_their_names():
    x = torch.randn(2, 15, 8)
    twins_layer = timm.models.twins.PosConv(8, 8)
    encoding = create_encoding("peg", dim=8, after=[1, 3])
    state = {f"stem.pos_block.1.{k}": v for k, v in twins_layer.state_dict().items()}
    state |= {f"stem.peg.0.proj.{k}": v for k, v in encoding.proj[0].state_dict().items()}
    encoding.rename_checkpoint_keys(state, "stem.", "stem.pos_enc.")
    assert set(state) == {f"stem.pos_enc.{k}" for k in encoding.state_dict()}
    encoding.load_state_dict({k.removeprefix("stem.pos_enc."): v for k, v in state.items()})
    torch.testing.assert_close(encoding.mix(x, Grid((3, 5)).positions(), 3), twins_layer(x, (3, 5)))
    coat = timm.models.coat.ConvPosEnc(8, 5)
    encoding = create_encoding("peg", dim=8, kernel_size=5)
    encoding.proj[0].load_state_dict(coat.proj.state_dict())
    x = torch.randn(2, 16, 8)
    torch.testing.assert_close(encoding.mix(x, Grid((5, 3), prefix=1).positions(), 0), coat(x, (5, 3)))


def test_positions_of_its_layers():
    assert create_encoding("peg", dim=4).blocks == [0]
    assert create_encoding("peg.cpvt", dim=4, depth=12).blocks == [0, 1, 2, 3, 4]
    assert create_encoding("peg.cpvt", dim=4, depth=3).blocks == [0, 1, 2]
    assert create_encoding("peg(first=3)", dim=4).blocks == [0, 1, 2]
    encoding = create_encoding("peg(after=[2,0])", dim=4, depth=3)
    assert [encoding.active(i) for i in range(4)] == [True, False, True, False]
    with torch.no_grad():
        encoding.proj[0].bias.fill_(2.0)
        encoding.proj[1].bias.fill_(1.0)
        for conv in encoding.proj:
            conv.weight.zero_()
    pos, x = Grid((2, 2)).positions(), torch.zeros(1, 4, 4)
    assert (encoding.mix(x, pos, 2) == 2).all()
    assert (encoding.mix(x, pos, 0) == 1).all()


def test_initialisation():
    torch.manual_seed(0)
    for k in (3, 5):
        encoding = create_encoding("peg", dim=2000, kernel_size=k)
        assert encoding.proj[0].weight.std().item() == pytest.approx(math.sqrt(2) / k, rel=0.02)
        assert (encoding.proj[0].bias == 0).all()
    retrofit = create_encoding("peg.retrofit", dim=6, first=2)
    pos = Grid((3, 4), prefix=1).positions()
    x = torch.randn(2, 13, 6)
    assert torch.equal(retrofit.mix(x, pos, 1), x)
    retrofit.mix(x, pos, 1).backward(torch.randn(2, 13, 6))
    assert (retrofit.proj[1].weight.grad != 0).all()
    with torch.no_grad():
        retrofit.proj[0].weight.fill_(3.0)
    retrofit.reset_parameters()
    assert (retrofit.proj[0].weight == 0).all()
    assert retrofit.no_weight_decay() == {"proj.0.weight", "proj.0.bias", "proj.1.weight", "proj.1.bias"}


def image(x, shape):
    return x.unflatten(1, shape)


@quick
@given(h=sides, w=sides, k=st.sampled_from([3, 5, 7]), down=st.integers(0, 6), right=st.integers(0, 6))
def test_circular_padding_commutes_with_cyclic_shifts(h, w, k, down, right):
    encoding, pos = peg(padding="circular", kernel_size=k), Grid((h, w)).positions()
    x = torch.randn(1, h * w, 6, dtype=torch.float64)

    def shifted(t):
        return image(t, (h, w)).roll((down, right), (1, 2)).flatten(1, 2)

    torch.testing.assert_close(encoding.mix(shifted(x), pos, 0), shifted(encoding.mix(x, pos, 0)))


@quick
@given(
    h=sides,
    w=sides,
    k=st.sampled_from([3, 5]),
    turns=st.integers(0, 3),
    flip=st.booleans(),
    padding=st.sampled_from(["zeros", "circular", "reflect"]),
)
def test_a_symmetric_kernel_commutes_with_rotations_and_flips(h, w, k, turns, flip, padding):
    encoding = peg(symmetric=True, kernel_size=k, padding=padding)
    x = torch.randn(1, h * w, 6, dtype=torch.float64)

    def rotated(t):
        t = image(t, (h, w)).rot90(turns, (1, 2))
        return (t.flip(1) if flip else t).flatten(1, 2)

    rotated_pos = Grid((w, h) if turns % 2 else (h, w)).positions()
    pos = Grid((h, w)).positions()
    torch.testing.assert_close(encoding.mix(rotated(x), rotated_pos, 0), rotated(encoding.mix(x, pos, 0)))


def test_an_asymmetric_kernel_does_not_commute_with_rotations():
    encoding, pos = peg(), Grid((4, 4)).positions()
    x = torch.randn(1, 16, 6, dtype=torch.float64)
    rotated = image(encoding.mix(x, pos, 0), (4, 4)).rot90(1, (1, 2)).flatten(1, 2)
    mixed = encoding.mix(image(x, (4, 4)).rot90(1, (1, 2)).flatten(1, 2), pos, 0)
    assert (rotated - mixed).abs().max() > 0.1


@quick
@given(h=sides, w=sides, row=st.integers(0, 9), column=st.integers(0, 9))
def test_translation_equivariance_away_from_the_border(h, w, row, column):
    encoding, shape = peg(), (h + 12, w + 12)
    x = torch.zeros(1, *shape, 6, dtype=torch.float64)
    content = torch.randn(h, w, 6, dtype=torch.float64)
    pos = Grid(shape).positions()
    with torch.no_grad():
        encoding.proj[0].bias.normal_()
    outs = []
    for top, left in ((1, 1), (1 + row, 1 + column)):
        y = x.clone()
        y[0, top : top + h, left : left + w] = content
        out = image(encoding.mix(y.flatten(1, 2), pos, 0), shape)
        outs.append(out[0, top - 1 : top + h + 1, left - 1 : left + w + 1])
    torch.testing.assert_close(outs[0], outs[1])


@cases("padding", ["zeros", "circular", "reflect"])
@cases("prefix", [0, 1, 5])
def test_dropped_tokens_count_as_zeros(padding, prefix):
    encoding = peg(padding=padding)
    full = Grid((4, 5), prefix=prefix).positions()
    x = torch.randn(2, full.tokens, 6, dtype=torch.float64)
    keep = torch.stack([prefix + torch.randperm(20)[:9] for _ in range(2)])
    keep = torch.cat([torch.arange(prefix).expand(2, -1), keep], 1)
    subset = x.gather(1, keep[..., None].expand(-1, -1, 6)).requires_grad_()
    actual = encoding.mix(subset, full.gather(keep), 0)
    cotangent = torch.randn_like(actual)
    (grad,) = torch.autograd.grad(actual, subset, cotangent)
    for i in range(2):
        sparse = x[i : i + 1].clone().requires_grad_()
        expected = slow(
            sparse, (4, 5), prefix, encoding.kernel(0), encoding.proj[0].bias, padding, set(keep[i].tolist())
        )
        torch.testing.assert_close(actual[i], expected[0, keep[i]])
        (full_grad,) = torch.autograd.grad(expected[0, keep[i]], sparse, cotangent[i])
        torch.testing.assert_close(grad[i], full_grad[0, keep[i]])
    assert torch.equal(actual[:, :prefix], subset[:, :prefix])
    # all tokens, in another order
    order = torch.cat([torch.arange(prefix), prefix + torch.randperm(20)])[None]
    permuted = encoding.mix(x[:, order[0]], full.gather(order), 0)
    torch.testing.assert_close(permuted, encoding.mix(x, full, 0)[:, order[0]])


def test_tokens_without_a_position_are_unchanged():
    encoding, grid = peg(), Grid((2, 3))
    pos = Positions(
        torch.zeros(1, 4, 2),
        torch.tensor([[True, True, False, False]]),
        grid=grid,
        index=torch.tensor([[4, 0, 99, -7]]),
    )
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    y = encoding.mix(x, pos, 0)
    assert torch.equal(y[:, 2:], x[:, 2:])
    canvas = torch.zeros(3, 6, 6, dtype=torch.float64).index_copy(1, torch.tensor([4, 0]), x[:, :2])
    expected = slow(canvas, (2, 3), 0, encoding.kernel(0), encoding.proj[0].bias)
    torch.testing.assert_close(y[:, :2], expected[:, [4, 0]])


def test_a_coarser_grid():
    encoding = peg(kernel_size=5, after=[0, 2])
    pos = Grid((5, 4), prefix=2, spacing=(1.0, 0.5)).positions()
    x = torch.randn(2, 22, 6, dtype=torch.float64)
    for stride in (2, 3):
        small, coarse = encoding.shrink(x, pos, 2, stride)
        rows, columns = range(0, 5, stride), range(0, 4, stride)
        assert coarse.grid == Grid((len(rows), len(columns)), 2, (1.0 * stride, 0.5 * stride))
        expected = slow(x, (5, 4), 2, encoding.kernel(2), encoding.proj[1].bias) - x
        cells = [2 + r * 4 + c for r in rows for c in columns]
        torch.testing.assert_close(small[:, 2:], expected[:, cells])
        torch.testing.assert_close(coarse.coords[0, 2:], pos.coords[0, cells])
        assert torch.equal(small[:, :2], x[:, :2])
    with pytest.raises(ShapeError, match=r"peg.shrink needs every token of a grid, got .*tokens dropped"):
        encoding.shrink(x[:, :3], pos.gather(torch.tensor([[0, 1, 5]])), 0)
    for layer, stride in ((1, 2), (0, 1), (0, True), (0, 1.5)):
        with pytest.raises(OptionError, match=r"stride of 2 or more after one of the blocks \[0, 2\]"):
            encoding.shrink(x, pos, layer, stride)


@cases("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    exact = peg(dim=16, symmetric=True)
    low = peg(dim=16, symmetric=True, dtype=dtype)
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())
    pos = Grid((6, 7), prefix=1).positions()
    x = torch.randn(2, 43, 16).to(dtype)
    actual, expected = low.mix(x, pos, 0), exact.mix(x.double(), pos, 0)
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=4 * eps)
    with torch.autocast("cpu", torch.bfloat16):
        y = peg(dim=16, dtype=torch.float32).mix(x.float(), pos, 0)
    assert y.dtype == torch.float32


@pytest.mark.slow
def test_compiles():
    encoding = create_encoding("peg(padding=circular,symmetric=true)", dim=6)

    def mix(x, pos):
        return encoding.mix(x, pos, 0)

    torch._dynamo.reset()
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
    for shape in ((3, 4), (5, 5)):
        pos, x = Grid(shape, prefix=1).positions(), torch.randn(2, 1 + shape[0] * shape[1], 6)
        torch.testing.assert_close(compiled(x, pos), mix(x, pos))
        subset = pos.gather(torch.tensor([[0, 3, 7], [0, 12, 1]]))
        torch.testing.assert_close(compiled(x[:, :3], subset), mix(x[:, :3], subset))


@cases(
    ("options", "message"),
    [
        ({"dim": 0}, "dim needs an integer above 0, got dim=0"),
        ({"kernel_size": 4}, "odd kernel_size of 3 or more, got kernel_size=4"),
        ({"kernel_size": 1}, "got kernel_size=1"),
        ({"kernel_size": 3.0}, "got kernel_size=3.0"),
        ({"init": "zeros"}, "init must be one of reference, zero, got 'zeros'"),
        ({"padding": "zero"}, "padding must be one of zeros, circular, reflect, got 'zero'"),
        ({"symmetric": 1}, "symmetric is true or false, got symmetric=1"),
        ({"first": 0}, "first needs an integer above 0, got first=0"),
        ({"first": 1.5}, "got first=1.5"),
        ({"first": 2, "after": [0]}, r"first=2 has no effect with after=\[0\]"),
        ({"after": []}, r"after needs different block indices of 0 or more, got after=\[\]"),
        ({"after": 1}, "after needs a list of integers, got after=1"),
        ({"after": [0.5]}, "list of integers"),
        ({"after": [0, 0]}, "different block indices of 0 or more, got"),
        ({"after": [-1]}, "different block indices of 0 or more"),
        ({"after": [3], "depth": 3}, r"0 or more below depth=3, got after=\[3\]"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("peg", **{"dim": 6, **options})


def test_it_needs_a_grid():
    encoding = create_encoding("peg", dim=6)
    with pytest.raises(
        ShapeError, match=r"peg needs the tokens of a 2-axis grid, got 2 axes .* It reads neighbouring cells"
    ):
        encoding.mix(torch.zeros(1, 3, 6), Positions(torch.zeros(1, 3, 2)), 0)
    with pytest.raises(ShapeError, match="peg needs the tokens of a 2-axis grid, got 1 axis"):
        encoding.mix(torch.zeros(1, 3, 6), Grid((3,)).positions(), 0)
    with pytest.raises(UnsupportedCombination, match="peg, which works on the tokens outside of attention"):
        Attention(8, 2, "peg")
