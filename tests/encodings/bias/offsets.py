"""Checks of biases that depend on offsets only, against functions of two tokens."""

import math

import timm
import torch

from tests.attention import oracle
from vispe import Grid, Positions, attention, create_encoding
from vispe.attention.bias.lower_to_table import table_unsupported_reason

HEADS, WIDTH = 3, 8
GRIDS = [
    Grid((7,), 2),
    Grid((3, 4), 1),
    Grid((5, 1)),
    Grid((1, 1), 1),
    Grid((2, 3, 2), 1, (5.0, 0.7, 0.5)),
]


def slow(pos, function):
    """Return (h, n, n) float64: a function of the offset p_j - p_i (a tuple) for every pair, 0 without a position."""
    coords, positioned = pos.coords[0].double().tolist(), pos.spatial.expand(1, -1)[0].tolist()
    heads = len(function((0.0,) * pos.axes))
    out = torch.zeros(heads, pos.tokens, pos.tokens, dtype=torch.float64)
    for i, p in enumerate(coords):
        for j, r in enumerate(coords):
            if positioned[i] and positioned[j]:
                offset = tuple(b - a for a, b in zip(p, r, strict=True))
                out[:, i, j] = torch.tensor(function(offset), dtype=torch.float64)
    return out


def of_length(function):
    """Return a function of offsets from one of their length."""
    return lambda offset: function(math.hypot(*offset))


def check_values(encoding, function, grids=GRIDS, by_field=False):
    """Compare the bias with its definition on successive grids, as a table, and for free and gathered tokens.

    `by_field`: positions make the function of offsets, since it depends on the field they are in.
    """

    def defined(pos):
        return slow(pos, function(pos) if by_field else function)

    for grid in grids:
        pos = grid.positions()
        bias, expected = encoding.bias(pos, 0), defined(pos)
        torch.testing.assert_close(bias.dense()[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert table_unsupported_reason(bias) is None
        actual = oracle.table_matrix(bias.table(grid).double(), grid)
        torch.testing.assert_close(actual.expand_as(expected), expected, rtol=1e-5, atol=1e-5)
        keep = torch.randperm(pos.tokens)[: grid.prefix + 3]
        gathered = encoding.bias(pos.gather(torch.stack([keep, keep.flip(0)])), 0).dense().double()
        expected = expected[:, keep][:, :, keep]
        torch.testing.assert_close(gathered[0], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gathered[1], expected.flip(-1, -2), rtol=1e-5, atol=1e-5)
        free = Positions(torch.rand(2, 4, grid.axes, dtype=torch.float64) * 5)
        actual = encoding.bias(free, 0).dense()
        for sample in range(2):
            one = Positions(free.coords[sample])
            torch.testing.assert_close(actual[sample].double(), defined(one), rtol=1e-6, atol=1e-6)


def check_gradients(encoding, grid, dense=lambda bias: bias.dense()):
    """Compare gradients of a random cotangent with differences, in float64, also through the kernels' table."""
    encoding = encoding.double()
    pos = grid.positions()
    cotangent = torch.randn(dense(encoding.bias(pos, 0)).shape, dtype=torch.float64)

    def loss():
        return (dense(encoding.bias(pos, 0)) * cotangent).sum()

    parameters = [p for p in encoding.parameters() if p.requires_grad]
    for parameter, grad in zip(parameters, torch.autograd.grad(loss(), parameters), strict=True):
        flat = parameter.detach().view(-1)
        for i in range(flat.numel()):
            start, step = flat[i].item(), 1e-6
            ends = []
            for shifted in (start + step, start - step):
                flat[i] = shifted
                ends.append(loss().item())
            flat[i] = start
            torch.testing.assert_close(
                grad.flatten()[i].item(), (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6
            )


def check_routes(encoding, grid):
    """Compare attention and its gradients of the reference, of SDPA, and of the default backend."""
    pos = grid.positions()
    inputs = [torch.randn(2, HEADS, pos.tokens, WIDTH, requires_grad=True) for _ in range(3)]
    learned = [p for p in encoding.parameters() if p.requires_grad]
    cotangent, grads = torch.randn(2, HEADS, pos.tokens, WIDTH), []
    for backend in ("reference", "sdpa", "auto"):
        out = attention(*inputs, bias=encoding.bias(pos, 0), backend=backend)
        grads.append([out, *torch.autograd.grad(out, [*inputs, *learned], cotangent)])
    for other in grads[1:]:
        for mine, expected in zip(other, grads[0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def check_turned(encoding, degrees=37.0, mirrored=True):
    """Check that rotating an image about any point, and mirroring it, does not change the bias."""
    angle = math.radians(degrees)
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    matrix = matrix.double() @ torch.diag(torch.tensor([1.0, -1.0 if mirrored else 1.0])).double()
    coords = torch.rand(1, 9, 2, dtype=torch.float64) * 6
    before, after = (encoding.bias(Positions(c), 0).dense() for c in (coords, coords @ matrix.T + 3))
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)


def check_vit(spec):
    """Check that a model trains with the encoding, and accepts another image size."""
    torch.manual_seed(0)
    model = timm.create_model(
        "test_vit", pos_embed=spec, img_size=(48, 64), num_classes=3, depth=2, dynamic_img_size=True
    )
    out = model(torch.randn(2, 3, 48, 64))
    out.backward(torch.randn_like(out))
    result = [p for name, p in model.named_parameters() if "pos_enc" in name and p.requires_grad]
    assert all(p.grad is not None for p in result)
    assert model(torch.randn(1, 3, 80, 64)).isfinite().all()
    return model


def create(spec, **facts):
    """Return an encoding for `HEADS` heads."""
    facts = {"num_heads": HEADS, "dim": HEADS * WIDTH, **facts}
    return create_encoding(spec, **facts)
