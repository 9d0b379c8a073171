"""PoPE against its definition, channel by channel."""

import itertools
import math

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def build(dim=16, **options):
    encoding = create_encoding("pope", dim=dim, num_heads=2, **options)
    torch.nn.init.uniform_(encoding.bias, -8, 1)  # some beyond both ends
    return encoding


def slow(encoding, grid, counts, q, k):
    """Return scores (b, h, n, n); `counts` has the channels of each axis, the last axis first."""
    cells = [None] * grid.prefix + list(itertools.product(*map(range, grid.shape)))
    scores = q.new_zeros(*q.shape[:3], q.shape[2])
    axis_of = [(len(counts) - 1 - a, c / n) for a, n in enumerate(counts) for c in range(n)]
    for h, i, j in itertools.product(range(2), range(len(cells)), range(len(cells))):
        for c in range(q.shape[-1]):
            a, b = q[:, h, i, c], k[:, h, j, c]
            if c < len(axis_of):
                axis, power = axis_of[c]
                query_coord, key_coord = (0 if cell is None else cell[axis] for cell in (cells[i], cells[j]))
                bias = 0 if cells[j] is None else encoding.bias[h, c].clamp(-2 * math.pi, 0)
                phase = torch.as_tensor((key_coord - query_coord) * encoding.base**-power + bias)
                a, b = F.softplus(a) * phase.cos(), F.softplus(b)
            scores[:, h, i, j] += a * b
    return scores


@cases(
    ("shape", "prefix", "options", "counts"),
    [
        ((2, 3), 2, {}, [4, 4]),
        ((3,), 1, {"base": 50, "rotated": 0.75, "layout": "half"}, [6]),
        ((1, 2, 2), 0, {"split": [1, 2, 5]}, [5, 2, 1]),
        ((1, 2, 2), 1, {}, [2, 3, 3]),
    ],
)
def test_scores_and_gradients(shape, prefix, options, counts):
    encoding = build(**options).double()
    grid = Grid(shape, prefix=prefix)
    q, k = (torch.randn(2, 2, grid.tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    transform = encoding.transform(Positions(grid.positions().coords.double(), grid.positions().spatial), 0)
    actual, expected = transform.query(q) @ transform.key(k).mT, slow(encoding, grid, counts, q, k)
    leaves, cotangent = [q, k, encoding.bias], torch.randn_like(expected)
    sides = [torch.autograd.grad(side, leaves, cotangent) for side in (actual, expected)]
    torch.testing.assert_close((actual, sides[0]), (expected, sides[1]))


def test_spacing_prefix_and_dropped_tokens():
    encoding = build()
    pos = Grid((3, 5), prefix=2).positions()
    x = torch.randn(1, 2, 17, 8)
    for side in ("query", "key"):
        full = getattr(encoding.transform(pos, 0), side)(x)
        torch.testing.assert_close(full[:, :, :2, 0::2], F.softplus(x[:, :, :2]))
        assert not full[:, :, :2, 1::2].any()
        keep = torch.tensor([[0, 1, 16, 7, 3], [0, 1, 5, 6, 4]])
        subset = getattr(encoding.transform(pos.gather(keep), 0), side)(
            x.expand(2, -1, -1, -1).gather(2, keep[:, None, :, None].expand(-1, 2, -1, 8))
        )
        for i in range(2):
            torch.testing.assert_close(subset[i], full[0][:, keep[i]])
    spaced = build(spacing=[2.0, 0.5])
    spaced.load_state_dict(dict(encoding.state_dict()))
    expected = encoding.transform(Grid((3, 5), spacing=(2.0, 0.5)).positions(), 0).key(x[:, :, 2:])
    torch.testing.assert_close(spaced.transform(Grid((3, 5)).positions(), 0).key(x[:, :, 2:]), expected)


def test_scores_depend_on_offsets_only():
    encoding = build(dim=28).double()
    coords = torch.randn(6, 2, dtype=torch.float64)
    q, k = torch.randn(2, 1, 2, 6, 14, dtype=torch.float64)
    turns = [encoding.transform(Positions(coords + shift), 0) for shift in (0.0, torch.tensor([3.7, -20.1]))]
    torch.testing.assert_close(*(transform.query(q) @ transform.key(k).mT for transform in turns))


def test_backends_and_precision():
    encoding = build(rotated=0.5)
    pos = Grid((3, 4), prefix=1).positions()
    q, k, v = torch.randn(3, 2, 2, 13, 8)
    transform = encoding.transform(pos, 0)
    outs = [attention(q, k, v, transform=transform, backend=b) for b in ("reference", "sdpa")]
    torch.testing.assert_close(*outs)
    scores = (transform.query(q) @ transform.key(k).mT * 8**-0.5).softmax(-1) @ v
    torch.testing.assert_close(outs[0], scores)
    small = attention(q.half(), k.half(), v.half(), transform=encoding.half().transform(pos, 0))
    torch.testing.assert_close(small.float(), outs[0], rtol=0.02, atol=0.02)


def test_initial_biases():
    assert not create_encoding("pope", dim=16, num_heads=2).bias.any()
    bias = create_encoding("pope", dim=512, num_heads=2, init="uniform").bias
    assert -2 * math.pi <= bias.min() < -6
    assert -0.3 < bias.max() <= 0
    assert create_encoding("pope.text", dim=16, num_heads=2).base == 10000


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="pope", img_size=(48, 64))
    out = model(torch.randn(2, 3, 48, 64))
    out.backward(torch.randn_like(out))
    assert all(p.grad.any() for name, p in model.named_parameters() if name.endswith("pos_enc.bias"))


@cases(
    ("options", "message"),
    [
        ({"rotated": 0.3}, r"integer number of channels, got rotated=0.3 of 8 per head\. Use 2/8"),
        ({"rotated": 0}, "rotated needs a number above 0 and up to 1"),
        ({"split": [3, 4]}, r"split needs 8 channels in total, got split=\[3, 4\]"),
        ({"split": [3, 5], "spacing": [1, 1, 1]}, "split and spacing need the same number of axes"),
        ({"init": "random"}, "init must be one of zeros, uniform"),
        ({"base": 0}, "base needs a number above 0"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("pope", dim=16, num_heads=2, **options)


def test_axes_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"pope needs 2 axes, for its 8 channels with split=\(3, 5\)"):
        create_encoding("pope", dim=16, num_heads=2, split=[3, 5]).transform(Grid((3,)).positions(), 0)
    with pytest.raises(ShapeError, match="pope needs 1 or 2 axes, for its 2 channels"):
        create_encoding("pope", dim=4, num_heads=2).transform(Grid((1, 2, 3)).positions(), 0)
