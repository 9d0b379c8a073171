"""MD-LRPE against its definition, channel by channel."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases, pairwise
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def phases(encoding, cell, head, h):
    """Return the phase of every channel (cosine) or pair (rotate) of one head at one cell."""
    width = head * encoding.num_heads if encoding.spectrum == "heads" else head
    first = h * encoding.rates if encoding.spectrum == "heads" else 0
    theta = [encoding.base ** (-2 * (first + i) / width) for i in range(encoding.rates)]
    every = [p * t for p in cell for t in theta]
    return every[:head] if encoding.form == "cosine" else every


@pairwise
@cases("spectrum", ["shared", "heads"])
@cases("learned", [False, True])
@cases(
    ("shape", "head", "prefix"),
    [((3, 4), 6, 1), ((2, 5), 5, 0), ((2, 1, 3), 7, 2), ((6,), 4, 1), ((1, 1), 8, 5)],
)
def test_cosine_form(shape, head, prefix, spectrum, learned):
    encoding = create_encoding(
        "lightnet", dim=2 * head, num_heads=2, axes=len(shape), spectrum=spectrum, learned=learned, base=50
    )
    grid = Grid(shape, prefix=prefix)
    q, k = torch.randn(2, 3, 2, grid.tokens, head)
    transform = encoding.transform(grid.positions(), 0)
    wide = transform.query(q)
    assert wide.shape == (3, 2, grid.tokens, 2 * head)
    assert torch.equal(wide[:, :, :prefix, :head], q[:, :, :prefix])
    assert not wide[:, :, :prefix, head:].any()
    cells = [(0,) * len(shape)] * prefix + list(itertools.product(*map(range, shape)))
    for h in range(2):
        phi = torch.tensor([phases(encoding, c, head, h) for c in cells])
        weight = (phi[:, None] - phi[None]).cos()
        expected = torch.einsum("bic,bjc,ijc->bij", q[:, h], k[:, h], weight)
        actual = wide[:, h] @ transform.key(k)[:, h].mT
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@cases("spectrum", ["shared", "heads"])
@cases(("shape", "head"), [((3, 4), 8), ((2, 5), 7), ((2, 2, 3), 14)])
def test_rotate_form(shape, head, spectrum):
    encoding = create_encoding(
        "lightnet.rotate", dim=3 * head, num_heads=3, axes=len(shape), spectrum=spectrum
    )
    grid = Grid(shape, prefix=1)
    x = torch.randn(2, 3, grid.tokens, head)
    actual = encoding.transform(grid.positions(), 0).query(x)
    assert torch.equal(actual[:, :, 0], x[:, :, 0])
    for h, (n, cell) in itertools.product(range(3), enumerate(itertools.product(*map(range, shape)))):
        phi = phases(encoding, cell, head, h)
        expected = x[:, h, n + 1].clone()
        for c, angle in enumerate(phi):
            a, b = x[:, h, n + 1, 2 * c], x[:, h, n + 1, 2 * c + 1]
            expected[:, 2 * c] = math.cos(angle) * a - math.sin(angle) * b
            expected[:, 2 * c + 1] = math.sin(angle) * a + math.cos(angle) * b
        torch.testing.assert_close(actual[:, h, n + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["cosine", "rotate"])
@given(h=st.integers(1, 6), w=st.integers(1, 6), down=st.floats(-9, 9), right=st.floats(-9, 9))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_scores_depend_on_offsets_only(form, h, w, down, right):
    encoding = create_encoding("lightnet", dim=16, num_heads=2, form=form)
    coords = Grid((h, w)).positions().coords.double()
    q, k = torch.randn(2, 1, 2, h * w, 8, dtype=torch.float64)
    scores = []
    for shift in (0.0, torch.tensor([down, right])):
        transform = encoding.transform(Positions(coords + shift), 0)
        scores.append(transform.query(q) @ transform.key(k).mT)
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)


@cases("form", ["cosine", "rotate"])
def test_gradients_and_backends(form):
    encoding = create_encoding("lightnet", dim=14, num_heads=2, form=form, learned=True, base=10).double()
    grid = Grid((2, 3), prefix=1)
    q, k, v = (torch.randn(2, 2, 7, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    coords = grid.positions().coords.double().requires_grad_()
    start = encoding.theta.detach().clone().requires_grad_()

    def out(q, k, v, coords, theta, backend="reference"):
        del encoding.theta
        encoding.theta = theta
        transform = encoding.transform(grid.positions().replace(coords=coords), 0)
        return attention(q, k, v, transform=transform, backend=backend)

    assert torch.autograd.gradcheck(out, (q, k, v, coords, start), fast_mode=True)
    torch.testing.assert_close(out(q, k, v, coords, start), out(q, k, v, coords, start, "sdpa"))


@cases("form", ["cosine", "rotate"])
def test_dropped_tokens_and_another_grid(form):
    encoding = create_encoding("lightnet", dim=16, num_heads=2, form=form)
    for shape in ((3, 5), (6, 2)):
        pos = Grid(shape, prefix=1).positions()
        x = torch.randn(3, 2, pos.tokens, 8)
        full = encoding.transform(pos, 0).query(x)
        keep = torch.stack(
            [torch.cat([torch.arange(1), 1 + torch.randperm(pos.tokens - 1)[:6]]) for _ in range(3)]
        )
        subset = encoding.transform(pos.gather(keep), 0).query(
            x.gather(2, keep[:, None, :, None].expand(-1, 2, -1, 8))
        )
        torch.testing.assert_close(
            subset, full.gather(2, keep[:, None, :, None].expand(-1, 2, -1, full.shape[-1]))
        )


@cases(
    ("spec", "message"),
    [
        ("lightnet(axes=4)", "axes needs an integer from 1 to 3, got axes=4"),
        ("lightnet(form=sine)", "form must be one of cosine, rotate, got 'sine'"),
        ("lightnet(spectrum=all)", "spectrum must be one of shared, heads, got 'all'"),
        ("lightnet(base=0)", "base needs a number above 0, got base=0"),
        ("lightnet(base=big)", "base needs a number above 0, got base='big'"),
        ("lightnet(learned=1)", "learned is true or false, got learned=1"),
        (
            "lightnet(form=rotate,axes=3)",
            "needs a pair of channels per axis, got 4 channels per head for 3 axes",
        ),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, dim=8, num_heads=2)
    with pytest.raises(
        OptionError, match="lightnet needs dim to be a multiple of num_heads, got dim=8, num_heads=3"
    ):
        create_encoding("lightnet", dim=8, num_heads=3)
    with pytest.raises(ShapeError, match=r"lightnet needs 2-axis positions, got 1 axis"):
        create_encoding("lightnet", dim=8, num_heads=2).transform(Grid((3,)).positions(), 0)
