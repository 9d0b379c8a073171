"""`rope_muvit` against its formula on crops of several magnifications, token by token, with gradients."""

import itertools

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import OptionError
from vispe.grid.crops import crop_positions

CROPS = {
    1: [((8,), (4,)), ((9,), (3,))],
    2: [((8, 12), (4, 4)), ((6, 4), (2, 4))],
    3: [((2, 4, 4), (1, 4, 2)), ((4, 2, 6), (2, 2, 2))],
}


def slow_coords(size, patch, levels, edges):
    """Coordinates of all tokens from the centred boxes."""
    points = []
    for level in levels:
        lines = []
        for n, p in zip(size, patch, strict=True):
            first, count = -level * (n / 2 - 0.5), n // p
            if edges == "centres":
                lines.append([first + level * (i * p + (p - 1) / 2) for i in range(count)])
            else:
                lines.append([first + i / max(count - 1, 1) * -2 * first for i in range(count)])
        points += itertools.product(*lines)
    return torch.tensor(points, dtype=torch.float64)


def slow(x, points, freqs):
    """Rotate x (b, h, n, D) with the frequencies of each axis. Differentiable."""
    rows = []
    for n, point in enumerate(points):
        channels, start = [], 0
        for axis, line in enumerate(freqs):
            for w in line:
                angle = point[axis] * w
                p, q = x[:, :, n, start], x[:, :, n, start + 1]
                channels += [p * angle.cos() - q * angle.sin(), q * angle.cos() + p * angle.sin()]
                start += 2
        rows.append(torch.stack(channels, -1))
    return torch.stack(rows, 2)


@cases("edges", ["centres", "box"])
@cases(("axes", "width"), [(1, 6), (2, 10), (2, 8), (3, 14), (3, 20)])
def test_rotations_and_gradients(axes, width, edges):
    encoding = create_encoding("rope_muvit", dim=2 * width, num_heads=2, axes=axes, temperature=256).double()
    part = 2 * (width // axes // 2)
    sizes = [width - (axes - 1) * part, *[part] * (axes - 1)]
    generator = torch.Generator().manual_seed(width)
    for axis, (freqs, d) in enumerate(zip(encoding.frequencies(), sizes, strict=True)):
        start = torch.tensor([256 ** (-2 * j / d) for j in range(d // 2)], dtype=torch.float64)
        torch.testing.assert_close(freqs.data, start, rtol=1e-6, atol=0, msg=str(axis))
        with torch.no_grad():
            freqs += 0.3 * torch.rand(freqs.shape, generator=generator, dtype=torch.float64)
    for size, patch in CROPS[axes]:
        pos = crop_positions(size, patch, levels=(1, 8, 2), edges=edges)
        points = slow_coords(size, patch, (1, 8, 2), edges)
        torch.testing.assert_close(pos.coords[0].double(), points)
        pos = pos.replace(coords=pos.coords.double())
        q, k = torch.randn(2, 1, 2, len(points), width, generator=generator, dtype=torch.float64)
        cotangent = torch.randn(len(points), len(points), generator=generator, dtype=torch.float64)
        transform = encoding.transform(pos, 0)
        copies = [f.detach().clone().requires_grad_() for f in encoding.frequencies()]
        expected = [slow(x, points, copies) for x in (q, k)]
        result = [transform.query(q), transform.key(k)]
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
        grads = [
            torch.autograd.grad((y[0] @ y[1].mT * cotangent).sum(), leaves)
            for y, leaves in ((result, encoding.frequencies()), (expected, copies))
        ]
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


def test_learned_and_shared_parameters():
    facts = {"dim": 16, "num_heads": 2}
    assert create_encoding("rope_muvit", **facts).per_layer
    assert not create_encoding("rope_muvit(share_layers=true)", **facts).per_layer
    fixed = create_encoding("rope_muvit(trainable=false)", **facts)
    assert not fixed.per_layer
    assert not list(fixed.parameters())
    assert len(fixed.state_dict()) == 2


def test_prefix_tokens_are_not_rotated():
    encoding = create_encoding("rope_muvit", dim=16, num_heads=2)
    x = torch.randn(1, 2, 8, 8)
    y = encoding.transform(Grid((2, 3), prefix=2).positions(), 0).query(x)
    assert torch.equal(y[:, :, :2], x[:, :, :2])
    assert not torch.equal(y[:, :, 3:], x[:, :, 3:])


def test_errors():
    with pytest.raises(
        OptionError, match="needs an even head_dim with a pair of channels per axis, got head_dim=4 for"
    ):
        create_encoding("rope_muvit", dim=8, num_heads=2, axes=3)
    with pytest.raises(OptionError, match="share_layers=True has no effect with trainable=False"):
        create_encoding("rope_muvit(share_layers=true,trainable=false)", dim=16, num_heads=2)
    with pytest.raises(OptionError, match=r"spacing needs one number for each of 2 axes, got spacing=\[1\]"):
        create_encoding("rope_muvit(spacing=[1])", dim=16, num_heads=2)
