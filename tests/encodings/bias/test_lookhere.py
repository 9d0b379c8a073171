"""lookhere against fields of view defined by angles, pair by pair."""

import math

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe import Grid, attention, create_encoding
from vispe.errors import OptionError, ShapeError

# middle of each field of view in degrees, anticlockwise from right, and half its width
FIELDS = {
    "halves": ([90, 270, 180, 0], 90),
    "triangles": ([90, 270, 180, 0], 45),
    "corners": ([135, 45, 225, 315], 45),
    "diagonals": ([45, 135, 315, 225], 90),
    "eighths1": ([112.5, 247.5, 157.5, 22.5], 22.5),
    "eighths2": ([67.5, 292.5, 202.5, 337.5], 22.5),
    "none": ([0], 180),
}
SLOPES = {"directed": [1 / 2] * 4 + [1 / 4] * 4 + [1 / 8] * 4, "none": [1 / 4, 1 / 16, 1 / 64, 1 / 256]}


def by_angles(groups, shape, spacing=(1, 1), power=1):
    """Return m_h d^power of every pair, infinite out of sight; groups: [(name, slopes)]."""
    positions = [(y * spacing[0], x * spacing[1]) for y in range(shape[0]) for x in range(shape[1])]
    heads = []
    for name, slopes in groups:
        middles, width = FIELDS[name]
        for i, slope in enumerate(slopes):
            rows = []
            for y, x in positions:
                seen_angles = [
                    (math.degrees(math.atan2(y - b, a - x)), math.dist((y, x), (b, a))) for b, a in positions
                ]
                angle_to_middle = [
                    abs((at - middles[i % len(middles)] + 180) % 360 - 180) for at, _ in seen_angles
                ]
                rows.append(
                    [
                        slope * d**power if d == 0 or t <= width + 1e-6 else math.inf
                        for t, (_, d) in zip(angle_to_middle, seen_angles, strict=True)
                    ]
                )
            heads.append(rows)
    return torch.tensor(heads)


@cases("name", [n for n in FIELDS if n != "none"])
@cases("shape", [(3, 4), (5, 1), (1, 1)])
def test_fields_of_view(name, shape):
    encoding = create_encoding("lookhere", num_heads=12, directions=f"{name}-none", depth=1)
    actual = encoding.bias(Grid(shape).positions(), 0).dense()[0]
    expected = by_angles([(name, SLOPES["directed"][:8]), ("none", SLOPES["none"])], shape)
    torch.testing.assert_close(actual, -1.5 * expected)


@cases(
    ("heads", "directions", "sizes"),
    [
        (12, "halves", [12]),
        (12, "none", [12]),
        (12, "corners-halves-none", [4, 4, 4]),
        (16, "corners-none", [8, 8]),
        (16, "corners-halves-none", [8, 4, 4]),
        (16, "corners-halves-triangles-none", [4, 4, 4, 4]),
        (6, "corners-none", [4, 2]),
        (6, "corners-halves-none", [2, 2, 2]),
        (5, "corners-halves-none", [2, 2, 1]),
        (3, "corners-none", [2, 1]),
    ],
)
def test_groups_of_heads(heads, directions, sizes):
    encoding = create_encoding("lookhere", num_heads=heads, directions=directions, layer_slopes=[1, 1])
    groups = []
    for name, size in zip(directions.split("-"), sizes, strict=True):
        each = SLOPES["none" if name == "none" else "directed"]
        if name == "none" and size > 4:
            each = [m for m in each for _ in range(size // 4)]
        groups.append((name, each[:size]))
    result = encoding.bias(Grid((3, 3)).positions(), 0).dense()[0]
    torch.testing.assert_close(result, -by_angles(groups, (3, 3)))


@cases(("distance", "power"), [("sqrt", 0.5), ("square", 2)])
def test_distances_and_spacing(distance, power):
    encoding = create_encoding(
        "lookhere", num_heads=4, directions="triangles", distance=distance, spacing=[2, 0.5], global_slope=3
    )
    pos = Grid((3, 4), prefix=2).positions()
    expected = -3 * by_angles([("triangles", [1 / 2] * 4)], (3, 4), (2, 0.5), power)
    actual = encoding.bias(pos, 0).dense()[0]
    torch.testing.assert_close(actual[:, 2:, 2:], expected)
    assert not actual[:, :2].any()
    assert not actual[:, :, :2].any()
    triangles = create_encoding(
        "lookhere", num_heads=4, directions="triangles", distance=distance, global_slope=3
    )
    spaced = Grid((3, 4), spacing=(2.0, 0.5)).positions()
    torch.testing.assert_close(triangles.bias(spaced, 0).dense()[0], expected)


def test_layers():
    encoding = create_encoding("lookhere", num_heads=4, directions="none", depth=5, layer_slopes=[2, 0])
    pos = Grid((2, 3)).positions()
    unit = -by_angles([("none", SLOPES["none"])], (2, 3))
    for layer, slope in enumerate((2, 1.5, 1, 0.5, 0)):
        torch.testing.assert_close(encoding.bias(pos, layer).dense()[0], slope * unit)
    blind = create_encoding("lookhere", num_heads=4, directions="halves", depth=2, layer_slopes=[2, 0])
    dense = blind.bias(pos, 1).dense()
    assert dense.isinf().any()
    assert not dense.isnan().any()
    with pytest.raises(OptionError, match=r"depth of 5 blocks, got block 5"):
        encoding.bias(pos, 5)


@cases("prefix", [0, 1])
def test_backends_agree(prefix):
    encoding = create_encoding("lookhere.released", num_heads=12, depth=2)
    grid = Grid((3, 5), prefix=prefix)
    q, k, v, cotangent = torch.randn(4, 2, 12, grid.tokens, 4, dtype=torch.float64)
    assert not encoding.bias(grid.positions(), 0).finite
    result = []
    for backend in ("reference", "sdpa"):
        arguments = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*arguments, bias=encoding.bias(grid.positions(), 1), backend=backend)
        result.append((out, *torch.autograd.grad(out, arguments, cotangent)))
    torch.testing.assert_close(*result, rtol=1e-12, atol=1e-12)


def test_bias_depends_on_offsets_only():
    encoding = create_encoding("lookhere", num_heads=12, depth=2)
    large = encoding.bias(Grid((5, 7)).positions(), 0).dense()[0].reshape(12, 5, 7, 5, 7)
    for y, x in ((0, 0), (2, 1), (3, 4)):
        part = large[:, y : y + 2, x : x + 3, y : y + 2, x : x + 3].reshape(12, 6, 6)
        torch.testing.assert_close(part, encoding.bias(Grid((2, 3)).positions(), 0).dense()[0])


def test_dropped_tokens():
    encoding = create_encoding("lookhere", num_heads=3)
    pos = Grid((3, 4), prefix=1).positions()
    keep = torch.tensor([[0, 2, 5, 12], [0, 1, 7, 9]])
    full, result = (encoding.bias(p, 0).dense() for p in (pos, pos.gather(keep)))
    for sample, indices in enumerate(keep):
        assert torch.equal(result[sample], full[0][:, indices][:, :, indices])


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="lookhere", img_size=64)
    for size in (64, 96):
        model.set_input_size((size, 64))
        out = model(torch.randn(2, 3, size, 64))
        torch.autograd.backward(out, torch.randn_like(out))
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_errors():
    with pytest.raises(OptionError, match=r"joined by hyphens, got directions='halves-sideways'"):
        create_encoding("lookhere", num_heads=12, directions="halves-sideways")
    with pytest.raises(
        OptionError, match=r"at least one head for each of the directions corners-triangles-none"
    ):
        create_encoding("lookhere", num_heads=2, directions="corners-triangles-none")
    with pytest.raises(ShapeError, match="2-axis grid"):
        create_encoding("lookhere", num_heads=4).bias(vispe.Positions(torch.rand(1, 5, 2)), 0)
    with pytest.raises(ShapeError, match="2-axis grid"):
        create_encoding("lookhere", num_heads=4).bias(Grid((5,)).positions(), 0)
