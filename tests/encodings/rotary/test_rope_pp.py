"""RoPE++ against complex numbers."""

import itertools

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

IMAGINARY = {"imagh": [0, 1, 1], "imago": [1, 1, 1], "imag1": [0, 1, 0], "none": [0, 0, 0]}


def slow(encoding, grid, q, k):
    """Return scores (b, h, n, n) of the complex product, token by token, including prefix tokens."""
    pairs = q.shape[-1] // 2
    counts = [pairs // grid.axes + (i < pairs % grid.axes) for i in range(grid.axes)]
    axis_of = [(a, c / n) for a, n in reversed([*enumerate(counts)]) for c in range(n)]
    cells = [None] * grid.prefix + list(itertools.product(*map(range, grid.shape)))
    half = encoding.layout == "half"
    z, w = (torch.complex(*(t.chunk(2, -1) if half else (t[..., 0::2], t[..., 1::2]))) for t in (q, k))
    scores = q.new_zeros(*q.shape[:3], q.shape[2])
    imaginary_heads = 0
    for h, imaginary in enumerate(IMAGINARY[encoding.mode]):
        other_axis = grid.axes - 1 - imaginary_heads % grid.axes
        for i, j in itertools.product(range(len(cells)), repeat=2):
            for c, (axis, power) in enumerate(axis_of):
                query_coord, key_coord = (0 if cell is None else cell[axis] for cell in (cells[i], cells[j]))
                angle = torch.tensor((query_coord - key_coord) * encoding.base**-power, dtype=q.dtype)
                product = z[:, h, i, c] * w[:, h, j, c].conj() * torch.polar(torch.ones_like(angle), angle)
                rotated = (
                    imaginary
                    and cells[i] is not None
                    and (encoding.rotated_pairs == "all" or axis == other_axis)
                )
                scores[:, h, i, j] += product.imag if rotated else product.real
        imaginary_heads += imaginary
    return scores


@cases(
    ("shape", "prefix", "options"),
    [
        ((2, 3), 2, {}),
        ((3,), 1, {"mode": "imago", "layout": "interleaved", "base": 20}),
        ((1, 2, 2), 0, {"mode": "imag1"}),
        ((2, 2), 1, {"mode": "imago", "rotated_pairs": "axis"}),
        ((3, 1), 0, {"mode": "imagh", "rotated_pairs": "axis", "layout": "interleaved"}),
        ((2, 1, 2), 1, {"mode": "none"}),
    ],
)
def test_scores_and_gradients(shape, prefix, options):
    encoding = create_encoding("rope_pp", dim=18, num_heads=3, **options)
    grid = Grid(shape, prefix=prefix)
    q, k = (torch.randn(2, 3, grid.tokens, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    transform = encoding.transform(Positions(grid.positions().coords.double(), grid.positions().spatial), 0)
    actual, expected = transform.query(q) @ transform.key(k).mT, slow(encoding, grid, q, k)
    cotangent = torch.randn_like(expected)
    sides = [torch.autograd.grad(side, [q, k], cotangent) for side in (actual, expected)]
    torch.testing.assert_close((actual, sides[0]), (expected, sides[1]))


def scores(encoding, coords, q, k):
    transform = encoding.transform(Positions(coords), 0)
    return transform.query(q) @ transform.key(k).mT


def test_imaginary_scores_are_odd_functions_of_offsets():
    encoding = create_encoding("rope_pp", dim=16, num_heads=2, mode="imago")
    coords = torch.randn(7, 2, dtype=torch.float64)
    x, y = torch.randn(2, 1, 2, 1, 8, dtype=torch.float64).expand(-1, -1, -1, 7, -1)
    odd = scores(encoding, coords, x, x)
    torch.testing.assert_close(odd, -odd.mT)
    shifted = scores(encoding, coords + torch.tensor([9.7, -3.0]), x, y)
    torch.testing.assert_close(shifted, scores(encoding, coords, x, y))


def test_heads_of_one_axis_are_odd_along_it_and_even_along_the_other():
    encoding = create_encoding("rope_pp", dim=16, num_heads=2, mode="imago", rotated_pairs="axis")
    coords = torch.randn(5, 2, dtype=torch.float64)
    x = torch.ones(1, 2, 5, 8, dtype=torch.float64)
    full = scores(encoding, coords, x, x)[0]
    for head, axis in ((0, 1), (1, 0)):  # the first head has the last axis
        mirrored = coords.clone()
        mirrored[:, 1 - axis] *= -1  # the real pairs do not see this
        torch.testing.assert_close(scores(encoding, mirrored, x, x)[0, head], full[head])
        mirrored = coords.clone()
        mirrored[:, axis] *= -1
        real = create_encoding("rope_pp", dim=16, num_heads=2, mode="none")
        pairs = [0, 1, 4, 5] if axis == 0 else [2, 3, 6, 7]  # of the other axis, in the layout 'half'
        others = x.clone()
        others[..., [c for c in range(8) if c in pairs]] = 0
        even = scores(real, coords, x - others, x - others)[0, head]
        other = scores(encoding, mirrored, x, x)[0, head]
        torch.testing.assert_close(other + full[head], 2 * even)


def test_backends_spacing_and_dropped_tokens():
    encoding = create_encoding("rope_pp", dim=16, num_heads=2, spacing=[2.0, 0.5])
    pos = Grid((3, 4), prefix=1).positions()
    q, k, v = torch.randn(3, 2, 2, 13, 8)
    transform = encoding.transform(pos, 0)
    outs = [attention(q, k, v, transform=transform, backend=b) for b in ("reference", "sdpa")]
    torch.testing.assert_close(*outs)
    plain = create_encoding("rope_pp", dim=16, num_heads=2)
    spaced = plain.transform(Grid((3, 4), prefix=1, spacing=(2.0, 0.5)).positions(), 0)
    torch.testing.assert_close(spaced.query(q), transform.query(q))
    keep = torch.tensor([[0, 12, 7], [0, 3, 4]])
    subset = encoding.transform(pos.gather(keep), 0)
    for i in range(2):
        torch.testing.assert_close(subset.query(q[:, :, keep[i]])[i], transform.query(q)[i][:, keep[i]])
        torch.testing.assert_close(subset.key(k[:, :, keep[i]])[i], transform.key(k)[i][:, keep[i]])


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="rope_pp(rotated_pairs=axis)", img_size=(48, 64))
    image = torch.randn(2, 3, 48, 64)
    out = model(image)
    out.backward(torch.randn_like(out))
    assert not torch.allclose(model(image), model(image.flip(-1)), atol=1e-5)


def test_errors():
    with pytest.raises(OptionError, match="rope_pp needs pairs of channels, got head_dim=5"):
        create_encoding("rope_pp", dim=10, num_heads=2)
    with pytest.raises(OptionError, match="mode must be one of imagh, imago, imag1, none"):
        create_encoding("rope_pp", dim=16, num_heads=2, mode="imag2")
    with pytest.raises(
        ShapeError, match="rope_pp needs 1 or 2 axes, for its 2 pairs with spacing=None, got 3"
    ):
        create_encoding("rope_pp", dim=8, num_heads=2).transform(Grid((1, 2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match="rope_pp needs 2 axes, for its 4 pairs"):
        create_encoding("rope_pp", dim=16, num_heads=2, spacing=[1, 2]).transform(Grid((3,)).positions(), 0)
