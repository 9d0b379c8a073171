"""Presets `rope_axial.vjepa2` and `rope_axial.vjepa21` against the formula, channel by channel in NumPy."""

import math

import numpy as np
import pytest
import torch

import vispe
from tests.cases import cases, pairwise
from vispe import Grid, create_encoding
from vispe.attention import ChannelTables
from vispe.errors import OptionError, ShapeError

WIDTHS = [6, 12, 14, 15, 20, 32]


def coordinates(shape, rule, side):
    """Scaled (frame, row, column) of every patch, in row-major order."""
    t, h, w = shape

    def scaled(i, n):
        if rule == "align_corners":
            return i * (side - 1) / (n - 1) if n > 1 else 0.0
        return i * side / n if rule == "rescale" else float(i)

    return [(float(f), scaled(r, h), scaled(c, w)) for f in range(t) for r in range(h) for c in range(w)]


def expected(x, points, prefix, theta, repeat):
    """Rotate x (b, h, n, D) in loops over tokens and channels."""
    y, part = x.copy(), 2 * ((x.shape[-1] // 3) // 2)
    for token, point in enumerate(points, start=prefix):
        for axis in range(3):
            for c in range(part):
                j = c % (part // 2) if repeat else c // 2
                angle = point[axis] * theta ** (-j / (part / 2))
                channel = axis * part + c
                other = -x[..., token, channel + 1] if c % 2 == 0 else x[..., token, channel - 1]
                y[..., token, channel] = x[..., token, channel] * math.cos(angle) + other * math.sin(angle)
    return y


def doubled(pos):
    return pos.replace(coords=pos.coords.double(), extent=pos.extent.double(), cell=pos.cell.double())


@pairwise
@cases("width", WIDTHS)
@cases("rule", ["none", "align_corners", "rescale"])
@cases("preset", ["vjepa2", "vjepa21"])
def test_tables_of_the_presets(preset, rule, width):
    side = 7
    options = {} if rule == "none" else {"reference": (1, side, side)}
    encoding = create_encoding(
        f"rope_axial.{preset}", dim=2 * width, num_heads=2, schedule=rule, temperature=300, **options
    )
    for shape in ((2, 3, 5), (3, 1, 4), (1, 6, 2)):
        pos = doubled(Grid(shape, prefix=2).positions())
        transform = encoding.transform(pos, 0)
        x = torch.randn(2, 2, pos.tokens, width, dtype=torch.float64)
        points = coordinates(shape, rule, side)
        repeat = preset == "vjepa2"
        for apply in (transform.query, transform.key):
            result = expected(x.numpy(), points, 2, 300.0, repeat)
            np.testing.assert_allclose(apply(x).numpy(), result, rtol=0, atol=1e-10)


def test_gradients_pass_through_the_transpose():
    encoding = create_encoding("rope_axial.vjepa2", dim=20, num_heads=1)
    pos = doubled(Grid((2, 3, 2), prefix=1).positions())
    transform = encoding.transform(pos, 0)
    q, k = (torch.randn(1, 1, 13, 20, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cotangent = torch.randn(1, 1, 13, 13, dtype=torch.float64)
    (transform.query(q) @ transform.key(k).mT * cotangent).sum().backward()
    points = coordinates((2, 3, 2), "none", 0)
    # the matrix of each token, column by column
    basis = np.broadcast_to(np.eye(20)[:, None, None], (20, 1, 13, 20))
    matrix = torch.from_numpy(expected(basis.copy(), points, 1, 10000.0, True))[:, 0].permute(1, 2, 0)
    rotated = torch.einsum("nij,bhnj->bhni", matrix, k.detach())
    result = torch.einsum("nij,bhni->bhnj", matrix, cotangent @ rotated)
    torch.testing.assert_close(q.grad, result, rtol=1e-9, atol=1e-9)


def test_repeat_is_not_a_rotation_and_scores_depend_on_absolute_positions():
    encoding = create_encoding("rope_axial.vjepa2", dim=64, num_heads=1)
    pos = Grid((1, 1, 20)).positions()
    transform = encoding.transform(pos, 0)
    x = torch.randn(1, 1, 1, 64).expand(-1, -1, 20, -1)
    y = transform.query(x)
    assert isinstance(transform, ChannelTables)
    diagonal = (y @ transform.key(x).mT)[0, 0].diagonal(3)
    assert diagonal.max() - diagonal.min() > 1
    # singular values at column 13, as measured on the authors' code
    matrix = transform.query(torch.eye(64)[:, None, None].expand(-1, 1, 20, -1))[:, 0, 13]
    singular = torch.linalg.svdvals(matrix)
    assert singular.min().item() == pytest.approx(0.02, abs=0.01)
    assert singular.max().item() == pytest.approx(1.41, abs=0.01)
    assert vispe.encoding_info("rope_axial.vjepa2").invariant == ()
    assert vispe.encoding_info("rope_axial.vjepa21").invariant == ("translation",)


def test_frames_have_no_effect_on_the_scale_and_training_grid():
    encoding = create_encoding("rope_axial.vjepa21", dim=24, num_heads=1, reference=(9, 4, 4))
    other = create_encoding("rope_axial.vjepa21", dim=24, num_heads=1, reference=(1, 4, 4))
    pos = Grid((3, 5, 2)).positions()
    torch.testing.assert_close(encoding.angles(pos), other.angles(pos), rtol=0, atol=0)


def test_bfloat16_is_rounded_once():
    encoding = create_encoding("rope_axial.vjepa2", dim=20, num_heads=1)
    pos = Grid((2, 3, 2)).positions()
    x = torch.randn(1, 1, 12, 20).bfloat16()
    y = encoding.transform(pos, 0).query(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, encoding.transform(pos, 0).query(x.float()).bfloat16())


def test_errors():
    with pytest.raises(OptionError, match=r"duplicate='repeat' mixes channels .* got layout='half'"):
        create_encoding("rope_axial(duplicate=repeat,layout=half)", dim=24, num_heads=2)
    with pytest.raises(OptionError, match=r"align_corners.* but rope_dinov3 reads fractions of the field"):
        create_encoding("rope_dinov3(schedule=align_corners)", dim=24, num_heads=2)
    with pytest.raises(ShapeError, match=r"needs a pair of channels per axis, got 2 pairs for 3 axes"):
        create_encoding("rope_axial.vjepa2", dim=5, num_heads=1).transform(Grid((1, 1, 2)).positions(), 0)
    with pytest.raises(ShapeError, match=r"even number of channels\), got \(1, 1, 2, 3\)"):
        ChannelTables(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3))
    with pytest.raises(ShapeError, match="tables for 6 channels, but head_dim is 4"):
        ChannelTables(torch.ones(1, 1, 2, 6), torch.ones(1, 1, 2, 6)).query(torch.ones(1, 1, 2, 4))
