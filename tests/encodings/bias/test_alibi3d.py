"""alibi3d against a slow oracle, its symmetries, and alibi2d on flat grids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention import oracle
from tests.cases import cases, pairwise
from vispe import Grid, create_encoding
from vispe.attention import attention
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.errors import OptionError, ShapeError

sides = st.integers(1, 4)
spacings = st.floats(0.25, 8, width=32)
metrics = st.sampled_from(["euclidean", "manhattan", "chebyshev", "squared"])
rules = st.sampled_from(["max", "none"])


def dense(encoding, grid):
    return encoding.bias(grid.positions(), 0).dense()[0]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pairwise
@cases("slopes", ["constant", "geometric", "alibi"])
@cases("metric", ["euclidean", "manhattan", "chebyshev", "squared"])
@cases(("wrap", "normalize"), [(False, "none"), (True, "max"), (False, "reference"), (True, "reference")])
def test_values(slopes, metric, wrap, normalize):
    grid = Grid((2, 3, 5), prefix=2, spacing=(5.0, 0.5, 1.5), reference=(4, 3, 2))
    encoding = create_encoding(
        "alibi3d", num_heads=6, metric=metric, wrap=wrap, normalize=normalize, slopes=slopes
    )
    expected = -torch.tensor(fixed_slopes(slopes, 6))[:, None, None] * oracle.distance_matrix(
        grid, metric, wrap, normalize
    )
    same(dense(encoding, grid).double().expand(6, -1, -1), expected.double())


def test_defaults_and_preset():
    default = create_encoding("alibi3d", num_heads=4)
    assert (default.slopes, default.wrap, default.normalize) == ("geometric", False, "none")
    small, large = dense(default, Grid((2, 3, 2))), dense(default, Grid((4, 5, 3)))
    cells = torch.arange(60).reshape(4, 5, 3)[:2, :3, :2].flatten()
    assert torch.equal(large[:, cells][:, :, cells], small)
    flat = create_encoding("alibi2d.dinosaw", num_heads=4)
    deep = create_encoding("alibi3d.dinosaw", num_heads=4)
    same(dense(deep, Grid((1, 4, 5), prefix=1)), dense(flat, Grid((4, 5), prefix=1)))


@given(h=sides, w=sides, metric=metrics, wrap=st.booleans(), normalize=rules, dy=spacings, dx=spacings)
def test_a_flat_volume_is_alibi2d(h, w, metric, wrap, normalize, dy, dx):
    options = {"num_heads": 2, "metric": metric, "wrap": wrap, "normalize": normalize, "slopes": "geometric"}
    volume = dense(create_encoding("alibi3d", **options), Grid((1, h, w), 1, (3.0, dy, dx)))
    same(volume, dense(create_encoding("alibi2d", **options), Grid((h, w), 1, (dy, dx))))


@given(
    shape=st.tuples(sides, sides, sides),
    spacing=st.tuples(spacings, spacings, spacings),
    metric=metrics,
    wrap=st.booleans(),
    normalize=rules,
    order=st.permutations(range(3)),
    flips=st.sets(st.integers(0, 2)),
)
def test_flips_and_exchanged_axes(shape, spacing, metric, wrap, normalize, order, flips):
    encoding = create_encoding("alibi3d", num_heads=2, metric=metric, wrap=wrap, normalize=normalize)
    rotated = Grid(tuple(shape[i] for i in order), spacing=tuple(spacing[i] for i in order))
    cells = torch.arange(rotated.patches).reshape(rotated.shape)  # cell numbers of the turned grid
    image = cells.permute(*(order.index(i) for i in range(3))).flip(tuple(flips)).flatten()
    transformed = dense(encoding, rotated)
    same(transformed[:, image][:, :, image], dense(encoding, Grid(shape, spacing=spacing)))


@given(
    shape=st.tuples(sides, sides, sides),
    shift=st.tuples(sides, sides, sides),
    metric=metrics,
    normalize=rules,
)
def test_wrapped_bias_is_invariant_to_cyclic_shifts(shape, shift, metric, normalize):
    encoding = create_encoding("alibi3d", num_heads=2, metric=metric, wrap=True, normalize=normalize)
    full = dense(encoding, Grid(shape))
    order = torch.arange(full.shape[-1]).reshape(shape).roll(shift, (0, 1, 2)).flatten()
    same(full[:, order][:, :, order], full)


def test_table_equals_dense_and_attention_backends_agree():
    grid = Grid((2, 3, 4), prefix=1, spacing=(3.0, 1.0, 2.0))
    pos = grid.positions()
    bias = create_encoding("alibi3d", num_heads=3).bias(pos, 0)
    table, full = bias.table(grid), bias.dense()[0]
    assert table.shape == (3, 3, 5, 7)
    cells = pos.cells()[0, 1:]
    gap = cells[:, None] - cells[None] + torch.tensor([1, 2, 3])
    same(table[:, gap[..., 0], gap[..., 1], gap[..., 2]], full[:, 1:, 1:])
    q, k, v = torch.randn(3, 2, 3, 25, 8).unbind(0)
    expected = ((q @ k.transpose(-1, -2)) * 8**-0.5 + full).softmax(-1) @ v
    for backend in ("reference", "sdpa"):
        same(attention(q, k, v, bias=bias, backend=backend), expected)


def test_spacing_option_replaces_that_of_the_grid():
    encoding = create_encoding("alibi3d(spacing=[5,0.7,0.7])", num_heads=2)
    plain = create_encoding("alibi3d", num_heads=2)
    same(dense(encoding, Grid((2, 3, 2))), dense(plain, Grid((2, 3, 2), spacing=(5, 0.7, 0.7))))


def test_learned_slopes_get_the_gradient_of_their_distances():
    encoding = create_encoding("alibi3d(slopes=learned)", num_heads=2)
    grid = Grid((2, 2, 3), prefix=1)
    out = encoding.bias(grid.positions(), 0).dense()
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    distance = oracle.distance_matrix(grid, "euclidean", False, "none").float()
    same(encoding.slope.grad, -(cotangent[0] * distance).sum((1, 2)))


@cases(
    ("spec", "message"),
    [
        ("alibi3d(spacing=[1,2])", r"spacing needs one number for each of 3 axes, got spacing=\[1, 2\]"),
        (
            "alibi3d(normalize=reference,reference=[4,4])",
            r"reference needs one number for each of 3 axes, got reference=\[4, 4\]",
        ),
        ("alibi3d(reference=[4,4,4])", "has no effect with normalize='none'"),
        ("alibi3d(slopes=steep)", "slopes must be one of"),
        ("alibi3d(wrap=3)", "wrap is true or false"),
        ("alibi3d(biased_heads=9)", "between 1 and num_heads=2"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, num_heads=2)


def test_other_axes_are_refused():
    with pytest.raises(ShapeError, match="alibi3d needs 3-axis positions, got 2 axes"):
        create_encoding("alibi3d", num_heads=2).bias(Grid((2, 3)).positions(), 0)
