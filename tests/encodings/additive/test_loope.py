"""loope: orders against properties of the curve, shifts, tables by loops, other grids, and refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.encodings.parts.additive.gilbert_curve import curve_order
from vispe.errors import OptionError, ShapeError

quick = settings(max_examples=40, deadline=None, derandomize=True)


def loope(dim=8, grid=(3, 4), dtype=torch.float64, **options):
    return create_encoding("loope", dim=dim, grid=grid, **options).to(dtype)


def walk(x, y, ax, ay, bx, by):
    """Yield the cells of the curve by its recursive definition."""
    w, h = abs(ax + ay), abs(bx + by)
    dax, day = (ax > 0) - (ax < 0), (ay > 0) - (ay < 0)
    dbx, dby = (bx > 0) - (bx < 0), (by > 0) - (by < 0)
    if h == 1 or w == 1:
        for i in range(max(w, h)):
            yield (x + i * dax, y + i * day) if h == 1 else (x + i * dbx, y + i * dby)
        return
    ax2, ay2, bx2, by2 = ax // 2, ay // 2, bx // 2, by // 2
    if 2 * w > 3 * h:
        if abs(ax2 + ay2) % 2 and w > 2:
            ax2, ay2 = ax2 + dax, ay2 + day
        yield from walk(x, y, ax2, ay2, bx, by)
        yield from walk(x + ax2, y + ay2, ax - ax2, ay - ay2, bx, by)
        return
    if abs(bx2 + by2) % 2 and h > 2:
        bx2, by2 = bx2 + dbx, by2 + dby
    yield from walk(x, y, bx2, by2, ax2, ay2)
    yield from walk(x + bx2, y + by2, ax, ay, bx - bx2, by - by2)
    yield from walk(
        x + (ax - dax) + (bx2 - dbx), y + (ay - day) + (by2 - dby), -bx2, -by2, -(ax - ax2), -(ay - ay2)
    )


@quick
@given(h=st.integers(1, 40), w=st.integers(1, 40))
def test_the_curve_visits_every_cell_in_steps(h, w):
    order = curve_order((h, w))
    expected = np.zeros((h, w), dtype=int)
    for i, (x, y) in enumerate(walk(0, 0, w, 0, 0, h), 1):
        expected[y, x] = i
    assert (order == expected).all()
    assert sorted(order.ravel()) == list(range(1, h * w + 1))
    assert order[0, 0] == 1
    for start in ("width", "longer", "even"):
        order = curve_order((h, w), start)
        cells = np.argwhere(order >= 0)[np.argsort(order.ravel())]
        steps = np.abs(np.diff(cells, axis=0)).sum(1)
        diagonal = int((steps == 2).sum())
        assert ((steps == 1) | (steps == 2)).all()
        assert diagonal <= 1
        if start == "even" and (h % 2 == 0 or w % 2 == 0):
            assert diagonal == 0
        if start == "longer":
            assert (order == (curve_order((w, h)).T if h > w else curve_order((h, w)))).all()


def test_known_orders():
    for shape, diagonals in (((10, 15), 1), ((14, 37), 1), ((15, 10), 0), ((37, 14), 0)):
        order = curve_order(shape)
        cells = np.argwhere(order >= 0)[np.argsort(order.ravel())]
        assert (np.abs(np.diff(cells, axis=0)).sum(1) == 2).sum() == diagonals
    assert curve_order((2, 2)).tolist() == [[1, 4], [2, 3]]
    assert curve_order((300, 400)).max() == 120000


def code(x, dim, temperature=10000.0):
    """Return the code of one position by the formula."""
    rates = [temperature ** (-2 * i / dim) for i in range(dim // 2)]
    return [f(x * r) for r in rates for f in (math.sin, math.cos)]


@cases("order", ["gilbert", "raster"])
@cases("class_token", ["learned", "origin", "zero"])
def test_static_tables(order, class_token):
    encoding = loope(order=order, class_token=class_token, context="none", temperature=100.0)
    if class_token == "learned":
        assert (encoding.vector == 0).all()
        with torch.no_grad():
            encoding.vector.copy_(torch.arange(8.0) + 1)
    first = {"learned": list(range(1, 9)), "origin": [0, 1] * 4, "zero": [0] * 8}[class_token]
    for shape in ((3, 4), (5, 2), (1, 1), (1, 6)):
        for prefix in (0, 1, 5):
            pos = Grid(shape, prefix=prefix).positions()
            table = encoding.table(pos)
            assert table.shape == (1, pos.tokens, 8)
            if prefix:
                assert table[0, 0].tolist() == first
                assert (table[0, 1:prefix] == 0).all()
            h, w = shape
            positions = curve_order(shape) if order == "gilbert" else np.arange(1, h * w + 1).reshape(h, w)
            for token, position in enumerate(positions.ravel()):
                expected = code(int(position), 8, 100.0)
                assert table[0, prefix + token].tolist() == pytest.approx(expected, abs=1e-6)


def test_far_along_the_curve():
    encoding = loope(dim=4, order="raster", context="none", grid=(1, 1))
    table = encoding.table(Grid((1, 100000)).positions())
    expected = torch.arange(1, 100001, dtype=torch.float64).sin()
    torch.testing.assert_close(table[0, :, 0].double(), expected, rtol=0, atol=1e-6)


def test_rescaled_positions_keep_their_range():
    encoding = loope(context="cells", rescale=True)
    with torch.no_grad():
        encoding.offset.fill_(0.3)
    for grid in (Grid((6, 8)), Grid((6, 8), reference=(2, 3))):
        scale = (6 if grid.reference else 12) / 48
        table = encoding.table(grid.positions())
        for token, position in enumerate(curve_order((6, 8)).ravel()):
            expected = code((int(position) + math.tanh(0.3)) * scale, 8)
            assert table[0, token].tolist() == pytest.approx(expected, abs=1e-6)
    static = loope(context="none", rescale=True)
    plain = loope(context="none")
    pos = Grid((3, 4)).positions()
    assert torch.equal(static.table(pos), plain.table(pos))
    other_positions = Grid((3, 5)).positions()
    assert not torch.equal(static.table(other_positions), plain.table(other_positions))


def test_learned_order():
    encoding = loope(context="cells")
    pos = Grid((3, 4), prefix=1).positions()
    torch.testing.assert_close(encoding.table(pos).float(), loope(context="none").table(pos))
    with torch.no_grad():
        encoding.offset.normal_()
    table = encoding.table(pos)
    for token, (position, shift) in enumerate(
        zip(curve_order((3, 4)).ravel(), encoding.offset.detach().flatten(), strict=True)
    ):
        expected = code(int(position) + math.tanh(shift), 8)
        assert table[0, 1 + token].tolist() == pytest.approx(expected, abs=1e-6)
    small = Grid((5, 2)).positions()
    expected = F.interpolate(encoding.offset[None, None], size=(5, 2), mode="bilinear", align_corners=False)
    torch.testing.assert_close(encoding.shift(small), expected.reshape(1, 10).tanh())
    cotangent = torch.randn_like(table)
    (grad,) = torch.autograd.grad(table, encoding.offset, cotangent)
    eps, probe = 1e-6, torch.randn(3, 4, dtype=torch.float64)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            encoding.offset.add_(sign * eps * probe)
            values.append((encoding.table(pos) * cotangent).sum())
            encoding.offset.sub_(sign * eps * probe)
    assert ((values[0] - values[1]) / (2 * eps)).item() == pytest.approx(
        (grad * probe).sum().item(), rel=1e-5
    )


def test_the_image_shifts_the_order():
    torch.manual_seed(0)
    encoding = loope()
    grids = [Grid((3, 4), prefix=1), Grid((5, 2)), Grid((1, 1), prefix=2), Grid((6, 6))]
    for grid in grids:  # at first the static order, for images of every size
        image = torch.randn(2, 3, 14 * grid.shape[0], 9 * grid.shape[1])
        pos = grid.positions()
        assert (encoding.shift(pos, image) == 0).all()
        static = loope(context="none").table(pos).expand(2, -1, -1)
        torch.testing.assert_close(encoding.table(pos, image).float(), static)
    with torch.no_grad():
        encoding.network.convs[-1].weight.normal_()
        encoding.network.convs[0].weight.normal_()
    for grid in grids:
        image = torch.randn(3, 3, 16 * grid.shape[0], 16 * grid.shape[1], dtype=torch.float64)
        pos = grid.positions()
        shift, table = encoding.shift(pos, image), encoding.table(pos, image)
        assert shift.shape == (3, grid.patches)
        assert (shift.abs() < 1).all()
        for mode in (encoding.train(), encoding.eval()):  # an image does not see the others
            torch.testing.assert_close(mode.table(pos, image[1:2])[0], table[1])
        positions = torch.from_numpy(curve_order(grid.shape)).flatten() + shift
        for b in range(3):
            for token in range(grid.patches):
                expected = code(positions[b, token].item(), 8)
                assert table[b, grid.prefix + token].tolist() == pytest.approx(expected, abs=1e-6)


@cases("context", ["image", "released"])
def test_every_parameter_learns_from_the_second_step(context):
    torch.manual_seed(0)
    encoding = loope(context=context).train()
    pos, image = Grid((3, 4), prefix=1).positions(), torch.randn(2, 3, 48, 64)
    optimizer = torch.optim.SGD([p for p in encoding.parameters() if p.requires_grad], lr=0.1)
    cotangent = torch.randn(2, 13, 8)
    for _ in range(2):
        optimizer.zero_grad()
        table = encoding.table(pos, image)
        (table * cotangent).sum().backward()
        optimizer.step()
    for name, parameter in encoding.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad != 0).all(), name
    assert encoding.no_weight_decay() == {name for name, _ in encoding.named_parameters()}


def test_the_released_network():
    torch.manual_seed(0)
    encoding = loope(context="released").eval()
    image, pos = torch.randn(2, 3, 48, 64, dtype=torch.float64), Grid((3, 4)).positions()
    shift = encoding.shift(pos, image)
    other_shift = encoding.shift(Grid((5, 2)).positions(), image)  # its own size of image, another grid
    expected = F.interpolate(shift.reshape(2, 1, 3, 4), size=(5, 2), mode="bilinear", align_corners=False)
    torch.testing.assert_close(other_shift, expected.flatten(1))
    larger = F.interpolate(image, scale_factor=2, mode="nearest")
    small = F.interpolate(larger, size=(48, 64), mode="bilinear", antialias=True, align_corners=False)
    torch.testing.assert_close(encoding.shift(pos, larger), encoding.shift(pos, small))
    # batch statistics in training: the same as torch's layer
    norm = torch.nn.BatchNorm2d(1).double()
    x = torch.randn(3, 1, 3, 4, dtype=torch.float64)
    encoding.train()
    for _ in range(3):
        torch.testing.assert_close(encoding.network._normed(x), norm(x))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(encoding.network.norm[name], getattr(norm, name))
        assert not encoding.network.norm[name].requires_grad
    torch.testing.assert_close(encoding.eval().network._normed(x), norm.eval()(x))
    assert not list(encoding.buffers())


def test_parameters_as_published():
    count = sum(
        p.numel() for p in loope(dim=768, grid=(14, 14), context="released").parameters() if p.requires_grad
    )
    assert count == 97107
    state = {
        "pe.art_conv.0.weight": 1,
        "pe.art_conv.10.running_var": 2,
        "pe.art_conv.12.weight": 3,
        "pe.x": 4,
    }
    state |= {"pe.cls_token": torch.zeros(8), "pe.art_conv.10.num_batches_tracked": 5}
    loope(context="image").rename_checkpoint_keys(state, "", "pe.")
    assert "pe.art_conv.0.weight" in state
    loope(context="released").rename_checkpoint_keys(state, "", "pe.")
    names = {"network.convs.0.weight", "network.norm.running_var", "network.linear.weight", "x", "vector"}
    assert set(state) == {f"pe.{name}" for name in names}


def test_dropped_tokens_with_images():
    encoding = loope()
    with torch.no_grad():
        encoding.network.convs[-1].weight.normal_()
        encoding.vector.normal_()
    pos, image = Grid((3, 4), prefix=2).positions(), torch.randn(2, 3, 24, 32)
    keep = torch.stack([torch.cat([torch.arange(2), 2 + torch.randperm(12)[:5]]) for _ in range(2)])
    table = encoding.table(pos, image)
    subset = encoding.table(pos.gather(keep), image)
    for i in range(2):
        torch.testing.assert_close(subset[i], table[i, keep[i]])


@cases(
    ("options", "message"),
    [
        ({"dim": 7}, "dim needs an integer above 0 and divisible by 2, got dim=7"),
        ({"order": "hilbert"}, "order must be one of gilbert, raster, got 'hilbert'"),
        ({"start": "height"}, "start must be one of width, longer, even, got 'height'"),
        ({"context": "cnn"}, "context must be one of image, released, cells, none, got 'cnn'"),
        ({"class_token": "first"}, "class_token must be one of learned, origin, zero, got 'first'"),
        ({"order": "raster", "start": "even"}, "start='even' has no effect with order='raster'"),
        ({"rescale": 1}, "rescale is true or false, got rescale=1"),
        ({"temperature": 0}, "temperature needs a number above 0, got temperature=0"),
        ({"in_chans": 0}, "in_chans needs an integer above 0, got in_chans=0"),
        ({"in_chans": 1, "context": "none"}, "in_chans=1 has no effect with context='none'"),
        ({"grid": (3,)}, r"grid needs a list of 2 integers above 0, got grid=\(3,\)"),
        ({"grid": None, "context": "cells"}, r"context='cells' needs grid=\(h, w\)"),
        ({"grid": None, "context": "released"}, r"context='released' needs grid=\(h, w\)"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        loope(**options)


def test_missing_inputs_raise():
    encoding, pos = loope(), Grid((3, 4)).positions()
    for image, result in (
        (None, "none"),
        (torch.zeros(1, 1, 8, 8), r"\(1, 1, 8, 8\)"),
        (torch.zeros(3, 8, 8), r"\(3, 8, 8\)"),
    ):
        with pytest.raises(
            ShapeError, match=rf"images \(b, 3, height, width\) .*, got {result}\. .*'loope\.static'"
        ):
            encoding.table(pos, image)
    assert loope(in_chans=1).table(pos, torch.zeros(1, 1, 8, 8)).shape == (1, 12, 8)
    for free in (Positions(torch.zeros(1, 4, 2)), Grid((4,)).positions()):
        with pytest.raises(
            ShapeError,
            match=r"loope needs the tokens of a 2-axis grid, got [12] ax[ei]s .* It orders the cells",
        ):
            encoding.table(free)


def rounded(positions, dim, temperature):
    """Return waves with frequencies and angles in float32, position by position."""
    rows = []
    for position in np.asarray(positions, dtype=np.float32):
        row = []
        for i in range(0, dim, 2):
            rate = np.exp(np.float32(i) * np.float32(-math.log(temperature) / dim), dtype=np.float32)
            angle = np.float64(np.float32(position * rate))
            row += [math.sin(angle), math.cos(angle)]
        rows.append(row)
    return torch.tensor(rows)


@cases("dtype", [torch.float32, torch.float64])
@cases("order", ["gilbert", "raster"])
def test_rounding_of_the_reference(order, dtype):
    shape, grid = (25, 23), Grid((25, 23), prefix=1)
    encoding = loope(12, None, dtype, order=order, context="none", class_token="origin", exact=False)
    numbers = curve_order(shape).ravel() if order == "gilbert" else np.arange(1, 25 * 23 + 1)
    table = encoding.table(grid.positions())[0]
    expected = rounded([0, *numbers], 12, 10000.0)
    assert (table - expected).abs().max() < 1e-6
    exact = loope(12, None, dtype, order=order, context="none", class_token="origin").table(grid.positions())[
        0
    ]
    assert 2e-6 < (table - exact).abs().max() < 1e-4


def test_rounded_shifts_rescaled_with_gradient():
    encoding = loope(6, (4, 5), torch.float32, context="cells", exact=False, rescale=True, temperature=50.0)
    torch.nn.init.normal_(encoding.offset)
    pos = Grid((8, 9)).positions()
    positions = (encoding.static(pos) + encoding.shift(pos)[0]) * (20 / 72)
    table = encoding.table(pos)[0]
    assert (table - rounded(positions.detach(), 6, 50.0)).abs().max() < 1e-5
    cotangent = torch.randn_like(table)
    (grad,) = torch.autograd.grad((table * cotangent).sum(), encoding.offset)
    other = loope(6, (4, 5), torch.float32, context="cells", rescale=True, temperature=50.0)
    other.load_state_dict(dict(encoding.state_dict()))
    (expected,) = torch.autograd.grad((other.table(pos)[0] * cotangent).sum(), other.offset)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_exact_is_true_or_false():
    with pytest.raises(OptionError, match="exact is true or false, got exact=1"):
        create_encoding("loope(exact=1)", dim=8)
