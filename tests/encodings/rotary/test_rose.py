"""`rose` against its formula, token by token: frequencies, functions of the spacing, several grids, gradients."""

import itertools
import math

import pytest
import torch

from tests.cases import cases
from tests.products import partly
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError

SHAPES = {1: [(5,), (1,)], 2: [(3, 5), (2, 2), (1, 4)], 3: [(2, 3, 2), (3, 1, 2)]}
SPACING = (4.0, 1.5, 0.375)  # exact in float32


def build(axes, dim=24, heads=3, **options):
    """Return an encoding in float64 with random parameters."""
    encoding = create_encoding("rose", dim=dim, num_heads=heads, axes=axes, **options).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    return encoding


def positions(shape, spacing, prefix=0):
    pos = Grid(shape, prefix=prefix, spacing=spacing[: len(shape)]).positions()
    return pos.replace(coords=pos.coords.double(), cell=pos.cell.double())


def slow(x, shape, spacing, freqs, scale, prefix=0):
    """Rotate x (b, h, n, D); `scale` is None or (a, b, c, d) with one entry per axis. Differentiable."""
    rows = [x[:, :, :prefix]]
    for n, cell in enumerate(itertools.product(*map(range, shape)), start=prefix):
        point = []
        for axis, index in enumerate(cell):
            s = torch.tensor(spacing[axis], dtype=torch.float64)
            if scale is not None:
                a, b, c, d = (t[axis] for t in scale)
                s = a * s**b + c * torch.log(s / max(d, 1e-8))
            point.append(index * s)
        heads = []
        for head in range(x.shape[1]):
            v = x[:, head, n]
            if head >= len(freqs):
                heads.append(v)
                continue
            channels = []
            for pair in range(v.shape[-1] // 2):
                angle = sum(p * freqs[head, pair, axis] for axis, p in enumerate(point))
                p, q = v[:, 2 * pair], v[:, 2 * pair + 1]
                channels += [p * angle.cos() - q * angle.sin(), q * angle.cos() + p * angle.sin()]
            heads.append(torch.stack(channels, -1))
        rows.append(torch.stack(heads, 1)[:, :, None])
    return torch.cat(rows, 2)


@partly(1)
@cases("axes", [1, 2, 3])
@cases("scale", ["none", "identity", "log", "rope"])
def test_queries_and_keys_of_two_grids_and_gradients(axes, scale):
    learned = scale != "none"
    encoding = build(axes, rotary_ratio=0.7, spacing_scale=scale, learn_scale=learned)
    names = ["freqs", *(f"scale_{c}" for c in "abcd" if learned)]
    generator = torch.Generator().manual_seed(axes)
    for shape in SHAPES[axes]:
        copies = [getattr(encoding, name).detach().clone().requires_grad_() for name in names]
        other = tuple(n + 1 for n in shape)
        coarse = tuple(3 * s for s in SPACING)
        q = torch.randn(2, 3, 2 + math.prod(shape), 8, generator=generator, dtype=torch.float64)
        k = torch.randn(2, 3, math.prod(other), 8, generator=generator, dtype=torch.float64)
        mine = encoding.transform(positions(shape, SPACING, prefix=2), 0).query(q)
        theirs = encoding.transform(positions(other, coarse), 0).key(k)
        scales = copies[1:] or None
        expected_q = slow(q, shape, SPACING, copies[0], scales, prefix=2)
        expected_k = slow(k, other, coarse, copies[0], scales)
        torch.testing.assert_close(mine, expected_q, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(theirs, expected_k, rtol=1e-9, atol=1e-9)
        cotangent = torch.randn(2, 3, q.shape[2], k.shape[2], generator=generator, dtype=torch.float64)
        parameters = [getattr(encoding, name) for name in names]
        grads = torch.autograd.grad((mine @ theirs.mT * cotangent).sum(), parameters, allow_unused=True)
        expected = torch.autograd.grad((expected_q @ expected_k.mT * cotangent).sum(), copies)
        torch.testing.assert_close(list(grads), list(expected), rtol=1e-8, atol=1e-8)


@cases(
    ("rule", "exponent"),
    [
        ("none", lambda a: 1),
        ("linear", lambda a: 1 / a),
        ("sqrt", lambda a: a**-0.5),
        ("adaptive", lambda a: 2 / (24 * a)),
    ],
)
@cases("axes", [1, 2, 3])
def test_initial_frequencies(axes, rule, exponent):
    encoding = create_encoding(
        "rose",
        dim=24,
        num_heads=3,
        axes=axes,
        temperature=500,
        temperature_scaling=rule,
        init_std=0,
        rotary_ratio=0.67,
    )
    assert encoding.freqs.shape == (2, 4, axes)  # the first two of three heads
    for i, (head, pair) in enumerate(itertools.product(range(2), range(4))):
        value = 500 ** (-exponent(axes) * i / 8)
        torch.testing.assert_close(encoding.freqs[head, pair], torch.full((axes,), value))


def test_learned_frequencies_start_with_jitter_and_fixed_ones_without():
    learned, fixed = (create_encoding("rose", dim=512, num_heads=2, trainable=t).freqs for t in (True, False))
    ratio = (learned / fixed).log()
    assert 0.015 < ratio.std() < 0.025
    assert not fixed.requires_grad


def test_scale_of_initial_values():
    grid = Grid((2, 2), spacing=(3.0, 0.5)).positions()
    for start, factors in {
        "identity": (3.0, 0.5),
        "log": (math.log(3), math.log(0.5)),
        "rope": (0.0, 0.0),
    }.items():
        encoding = create_encoding("rose", dim=8, num_heads=1, spacing_scale=start)
        torch.testing.assert_close(encoding.scaled_coords(grid)[0, 3], torch.tensor(factors))
    rope = create_encoding("rose", dim=8, num_heads=1, spacing_scale="rope")
    x = torch.randn(1, 1, 4, 8)
    assert torch.equal(rope.transform(grid, 0).query(x), x)


def test_axes_without_spacing_have_position_0():
    encoding = create_encoding("rose.scale", dim=8, num_heads=1)
    pos = Positions(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), cell=torch.tensor([[0.0, 2.0]]))
    coords = encoding.scaled_coords(pos)
    torch.testing.assert_close(coords, pos.coords)
    coords.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoding.parameters() if p.grad is not None)


def test_joined_grids_use_the_spacing_of_each_token():
    encoding = build(2, spacing_scale="identity", learn_scale=True)
    grids = [Grid((2, 3), spacing=(1, 2), offset=(0, 0)), Grid((3, 1), spacing=(4, 8), offset=(0, 0))]
    joined = Positions.joined(grids)
    single = [encoding.scaled_coords(g.positions()) for g in grids]
    torch.testing.assert_close(encoding.scaled_coords(joined), torch.cat(single, 1))


def test_errors():
    with pytest.raises(
        OptionError, match=r"learn_scale=True needs a function of the spacing, got spacing_scale='none'"
    ):
        create_encoding("rose(learn_scale=true)", dim=8, num_heads=1)
    with pytest.raises(OptionError, match=r"spacing needs one number for each of 2 axes, got spacing=\[1\]"):
        create_encoding("rose(spacing=[1])", dim=8, num_heads=1)
    with pytest.raises(OptionError, match=r"rotary_ratio=0.4 rotates none of 2 heads\. Use at least 0\.5"):
        create_encoding("rose(rotary_ratio=0.4)", dim=8, num_heads=2)
    with pytest.raises(OptionError, match="rose needs pairs of channels, got head_dim=5"):
        create_encoding("rose", dim=10, num_heads=2)
    with pytest.raises(ShapeError, match="rose needs 2-axis positions, got 3 axes"):
        create_encoding("rose", dim=8, num_heads=1).transform(Grid((1, 2, 3)).positions(), 0)
