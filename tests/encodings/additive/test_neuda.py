"""Deformable anchors: against a loop in plain Python, starts, borders, gradients, axes."""

import itertools
import math

import pytest
import torch

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError


def built(axes=2, dim=32, **options):
    torch.manual_seed(0)
    options = {"levels": 2, "base": 3, "growth": 1.5, **options}
    encoding = create_encoding("neuda", dim=dim, axes=axes, **options).double()
    with torch.no_grad():
        encoding.anchors += 0.1 * torch.randn_like(encoding.anchors)
    return encoding


def by_hand(encoding, point):
    """Return the features of one point, corner by corner."""
    low, high = encoding.box
    values, start, axes = list(point), 0, len(point)
    for level, n in enumerate(encoding.scales):
        coords = [(min(max(c, low), high - encoding.eps) - low) / (high - low) * n for c in point]
        sums = [0.0] * (2 * axes)
        for corner in itertools.product((0, 1), repeat=axes):
            vertex = [min(math.floor(p), n - 1) + s for p, s in zip(coords, corner, strict=True)]
            weight = math.prod(1 - abs(p - v) for p, v in zip(coords, vertex, strict=True))
            row = 0
            for v in vertex:
                row = row * (n + 1) + v
            anchor = encoding.anchors[start + row].tolist()
            for i, a in enumerate(anchor):
                sums[i] += weight * math.sin(2**level * a)
                sums[axes + i] += weight * math.cos(2**level * a)
        values += sums
        start += (n + 1) ** axes
    return values


@cases("axes", [1, 2, 3])
@cases("options", [{}, {"box": (0, 3), "eps": 0.25}, {"levels": 3, "base": 2, "growth": 1.0}])
def test_features_are_those_of_a_loop(axes, options):
    encoding = built(axes, **options)
    points = 4 * torch.rand(9, axes, dtype=torch.float64) - 1.5  # alongside the box too
    points[0], points[1] = encoding.box  # its corners
    expected = torch.tensor([by_hand(encoding, p.tolist()) for p in points], dtype=torch.float64)
    torch.testing.assert_close(encoding.features(points), expected)
    assert expected.shape == (9, encoding.count)


def test_anchors_start_at_their_vertices():
    fresh = create_encoding("neuda", dim=8, axes=2, levels=2, base=2, growth=1.5, box=(0, 6))
    assert fresh.scales == (2, 3)
    assert fresh.anchors[:4].tolist() == [[0, 0], [0, 3], [0, 6], [3, 0]]
    assert fresh.anchors[9 : 9 + 5].tolist() == [[0, 0], [0, 2], [0, 4], [0, 6], [2, 0]]
    assert len(fresh.anchors) == 9 + 16
    assert create_encoding("neuda.released", dim=8, axes=1).scales == (16, 22, 30, 42, 58, 80, 110, 152)
    # a point on a vertex has the wave of its anchor
    on = fresh.features(torch.tensor([[3.0, 0.0]]))
    torch.testing.assert_close(on[0, 2:6], torch.tensor([math.sin(3), 0, math.cos(3), 1]))


@cases("axes", [1, 2, 3])
def test_gradients(axes):
    encoding = built(axes, levels=2, base=2, dim=4)
    points = (1.8 * torch.rand(4, axes, dtype=torch.float64) - 0.9).requires_grad_()

    def run(points, anchors):
        return torch.func.functional_call(encoding, {"anchors": anchors}, (points,))

    encoding.forward = encoding.features
    assert torch.autograd.gradcheck(run, (points, encoding.anchors), fast_mode=True)


def test_only_near_anchors_get_gradients():
    encoding = built(1, levels=1, base=4, growth=1.0, dim=3, project=False)
    y = encoding.encode(torch.tensor([[-0.9], [-0.6]], dtype=torch.float64))
    y.backward(torch.randn_like(y))
    assert (encoding.anchors.grad.flatten() != 0).tolist() == [True, True, False, False, False]


def test_table_reads_cell_centres_and_any_grid():
    encoding = built()
    for shape in ((2, 3), (7, 1), (1, 1), (12, 12)):
        pos = Grid(shape, prefix=2).positions()
        result = encoding.table(pos)
        centres = torch.stack(
            torch.meshgrid(*((torch.arange(n) + 0.5) / n * 2 - 1 for n in shape), indexing="ij"), -1
        ).flatten(0, 1)
        torch.testing.assert_close(result[0, 2:], encoding.encode(centres.double()), rtol=1e-5, atol=1e-6)
        assert not result[:, :2].any()
    unnormalized = create_encoding({**encoding.config, "normalize": False}).double()
    unnormalized.load_state_dict(dict(encoding.state_dict()))
    free = torch.rand(1, 4, 2)
    torch.testing.assert_close(unnormalized.table(Positions(free))[0], encoding.encode(free.double())[0])


@cases(
    ("options", "message"),
    [
        ({"box": (1, 1)}, r"box needs a lower bound .* below its upper bound, got box=\[1, 1\]"),
        ({"eps": 2.5}, r"more than eps below its upper bound, got box=\[-1, 1\], eps=2\.5"),
        ({"growth": 0.1, "levels": 3}, r"at least one cell per axis, got \[3, 0, 0\] from base=3"),
        ({"dim": 8, "project": False}, "neuda has 10 features, which do not fit into dim=8"),
    ],
)
def test_options(options, message):
    with pytest.raises(OptionError, match=message):
        built(**options)
