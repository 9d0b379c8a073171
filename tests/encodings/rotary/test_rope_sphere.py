"""rope_sphere against matrix exponentials and quaternions; symmetries and gradients."""

import math

import numpy as np
import pytest
import timm
import torch
from scipy.linalg import expm

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def build(**options):
    torch.manual_seed(0)
    encoding = create_encoding("rope_sphere", **{"dim": 16, "num_heads": 2, **options}).double()
    # away from the start: frequencies differ between axes, vectors have other lengths than 1
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return encoding


def cross(x, y, z):
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def by_exponentials(encoding, coords):
    """Return the matrices (h, blocks, 3, 3) of one position."""
    freqs = encoding.freqs.detach().numpy()
    heads, blocks, axes = freqs.shape
    fixed = [(1, 0, 0), (0, 0, 1), (0, 1, 0)]
    matrices = np.zeros((heads, blocks, 3, 3))
    for head in range(heads):
        for block in range(blocks):
            product, total = np.eye(3), np.zeros((3, 3))
            for axis in range(axes):
                if encoding.order == "euler":
                    unit = np.array(fixed[axis], float)
                else:
                    unit = encoding.directions[head, block, axis].detach().numpy()
                    unit = unit / math.sqrt(float(unit @ unit))
                generator = float(coords[axis]) * freqs[head, block, axis] * cross(*unit)
                product, total = expm(generator) @ product, total + generator / axes
            matrices[head, block] = expm(total) if encoding.order == "mean" else product
    return matrices


@cases("order", ["euler", "quaternion", "mean"])
@cases(
    ("shapes", "options"),
    [
        (((3, 5), (4, 2)), {}),
        (((2, 3), (1, 1)), {"dim": 18, "spacing": (2.0, 0.3)}),
        (((5,), (2,)), {"axes": 1, "dim": 20}),
        (((2, 3, 2), (1, 2, 4)), {"axes": 3, "head_dim": 6}),
    ],
)
def test_rotations_are_those_of_the_definition(order, shapes, options):
    encoding = build(order=order, **options)
    width = options.get("head_dim", options.get("dim", 16) // 2)
    rotated = width // 3 * 3
    for shape in shapes:
        pos = Grid(shape, prefix=2).positions()
        transform, x = encoding.transform(pos, 0), torch.randn(2, 2, pos.tokens, width, dtype=torch.float64)
        actual = transform.query(x)
        assert torch.equal(actual, transform.key(x))
        assert torch.equal(actual[:, :, :2], x[:, :, :2])
        assert torch.equal(actual[..., rotated:], x[..., rotated:])
        coords = pos.coords[0].double() * torch.tensor(options.get("spacing", 1.0), dtype=torch.float64)
        for token in range(2, pos.tokens):
            matrices = torch.from_numpy(by_exponentials(encoding, coords[token]))
            blocks = x[:, :, token, :rotated].unflatten(-1, (-1, 3))
            expected = torch.einsum("hpij,bhpj->bhpi", matrices, blocks).flatten(2)
            torch.testing.assert_close(actual[:, :, token, :rotated], expected, rtol=1e-6, atol=1e-6)


def test_euler_angles_of_an_image():
    encoding, pos = build(), Grid((3, 4)).positions()
    matrices = encoding.rotations(pos)[0, 1, :, 0]
    w_row, w_column = encoding.freqs[1, 0].tolist()
    for token, (row, column) in enumerate(pos.coords[0].tolist()):
        a, b = column * w_column, row * w_row
        ca, sa, cb, sb = math.cos(a), math.sin(a), math.cos(b), math.sin(b)
        expected = [[ca, -cb * sa, sb * sa], [sa, cb * ca, -sb * ca], [0.0, sb, cb]]
        torch.testing.assert_close(matrices[token], torch.tensor(expected, dtype=torch.float64))


def quaternion_product(p, q):
    a, b = p[0], q[0]
    return np.concatenate([[a * b - p[1:] @ q[1:]], a * q[1:] + b * p[1:] + np.cross(p[1:], q[1:])])


def test_quaternions_with_half_angles_give_the_same_rotations():
    encoding, pos = build(order="quaternion", axes=3), Grid((2, 3, 2)).positions()
    vectors = torch.nn.functional.normalize(encoding.directions.detach(), dim=-1).numpy()[1, 1]
    freqs = encoding.freqs.detach().numpy()[1, 1]
    x = np.array([0.3, -1.2, 0.7])
    for token, coords in enumerate(pos.coords[0].numpy()):
        product = np.array([1.0, 0, 0, 0])
        for axis in range(3):
            half = coords[axis] * freqs[axis] / 2
            one = np.concatenate([[math.cos(half)], math.sin(half) * vectors[axis]])
            product = quaternion_product(one, product)
        inverse = product * np.array([1, -1, -1, -1])
        expected = quaternion_product(quaternion_product(product, np.concatenate([[0], x])), inverse)[1:]
        actual = encoding.rotations(pos)[0, 1, token, 1].detach().numpy() @ x
        np.testing.assert_allclose(actual, expected, atol=1e-9)


@cases("order", ["euler", "quaternion", "mean"])
def test_matrices_are_rotations_and_the_origin_is_not_rotated(order):
    encoding = build(order=order, axes=3)
    matrices = encoding.rotations(Grid((3, 2, 4)).positions())
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(matrices @ matrices.mT, eye.expand_as(matrices))
    torch.testing.assert_close(torch.linalg.det(matrices), torch.ones_like(matrices[..., 0, 0]))
    torch.testing.assert_close(matrices[:, :, 0], eye.expand_as(matrices[:, :, 0]))


def scores(encoding, coords, q, k):
    transform = encoding.transform(Positions(coords), 0)
    return transform.query(q) @ transform.key(k).mT


def parallel(encoding):
    """Set the rotation axes of each block to one direction for all axes of the grid, with different lengths."""
    with torch.no_grad():
        first = encoding.directions[:, :, :1].clone()
        encoding.directions.copy_(first * torch.tensor([0.5, 2.0, 3.0])[: encoding.axes, None])
    return encoding


@cases("encoding", [build(axes=1), build(axes=1, order="mean"), parallel(build(order="quaternion"))])
def test_translation_invariance_with_one_axis_and_with_parallel_axes(encoding):
    coords = 3 * torch.randn(1, 6, encoding.axes, dtype=torch.float64)
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(scores(encoding, coords + 2.5, q, k), scores(encoding, coords, q, k))


@cases("order", ["euler", "quaternion", "mean"])
def test_absolute_positions_matter_with_several_axes(order):
    coords, encoding = torch.randn(1, 6, 2, dtype=torch.float64), build(order=order)
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    difference = scores(encoding, coords + 2.5, q, k) - scores(encoding, coords, q, k)
    assert difference.abs().max() > 0.1


def test_parallel_axes_are_rope_mixed_in_another_basis():
    encoding = parallel(build(order="quaternion", dim=24))  # four blocks
    mixed = create_encoding("rope_mixed", dim=16, num_heads=2).double()
    with torch.no_grad():
        mixed.freqs.copy_(encoding.freqs.permute(2, 0, 1).flip(0))  # x first
    pos = Grid((3, 4), prefix=1).positions()
    x = torch.randn(1, 2, 13, 12, dtype=torch.float64)
    actual = encoding.transform(pos, 0).query(x)
    for head in range(2):
        for block in range(4):
            normal = encoding.directions[head, block, 0].detach()
            frame = torch.linalg.svd(normal[None])[2]  # the normal, then a basis of its plane
            frame = frame * torch.linalg.det(frame)
            basis = frame[[1, 2, 0]] if frame[0] @ normal > 0 else frame[[2, 1, 0]]
            before, after = (t[:, head, :, 3 * block : 3 * block + 3] @ basis.mT for t in (x, actual))
            pairs = torch.zeros(1, 2, 13, 8, dtype=torch.float64)
            pairs[:, head, :, 2 * block : 2 * block + 2] = before[..., :2]
            expected = mixed.transform(pos, 0).query(pairs)[:, head, :, 2 * block : 2 * block + 2]
            torch.testing.assert_close(after[..., :2], expected)
            torch.testing.assert_close(after[..., 2], before[..., 2])


def test_mean_is_symmetric_in_the_axes_and_products_are_not():
    for order in ("mean", "quaternion"):
        encoding, swapped = build(order=order), build(order=order)
        with torch.no_grad():
            for parameter, other in zip(encoding.parameters(), swapped.parameters(), strict=True):
                other.copy_(parameter.flip(2))
        coords = torch.randn(1, 5, 2, dtype=torch.float64)
        pair = encoding.rotations(Positions(coords)), swapped.rotations(Positions(coords.flip(-1)))
        assert torch.allclose(*pair) == (order == "mean")


class Attend(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, coords, q, k, v, backend):
        return attention(q, k, v, transform=self.encoding.transform(Positions(coords), 0), backend=backend)


@cases("backend", ["reference", "sdpa"])
@cases("order", ["euler", "quaternion", "mean"])
def test_gradients(order, backend):
    layer = Attend(build(order=order))
    q, k, v = torch.randn(3, 2, 2, 4, 8, dtype=torch.float64)
    coords = torch.randn(2, 4, 2, dtype=torch.float64)
    coords[:, 0] = 0.0  # rotation vectors of length 0 have a gradient as well
    names = [name for name, _ in layer.named_parameters()]
    leaves = [*(p.detach().clone() for p in layer.parameters()), coords, q, k]

    def out(*tensors):
        parameters = dict(zip(names, tensors, strict=False))
        return torch.func.functional_call(layer, parameters, (*tensors[len(names) :], v, backend))

    assert torch.autograd.gradcheck(out, tuple(x.requires_grad_() for x in leaves), fast_mode=True)
    torch.testing.assert_close(out(*leaves), layer(*leaves[len(names) :], v, "reference"))


def test_gradients_of_the_axes_are_tangential():
    encoding = build(order="quaternion")
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    result = scores(encoding, torch.randn(1, 6, 2, dtype=torch.float64), q, k)
    (result * torch.randn_like(result)).sum().backward()
    along = (encoding.directions.grad * encoding.directions).sum(-1)
    torch.testing.assert_close(along, torch.zeros_like(along))


def test_precision_of_small_rotations():
    encoding = create_encoding("rope_sphere", dim=6, num_heads=2, order="mean")
    vector = torch.nn.functional.normalize(encoding.directions.detach().double(), dim=-1)[0, 0, 0]
    for size in (1e-9, 1e-4, 0.01, 0.03, 1.0, 100.0):
        with torch.no_grad():
            encoding.freqs.fill_(2 * size)
        actual = encoding.rotations(Positions(torch.tensor([[[1.0, 0.0]]])))[0, 0, 0, 0].double()
        expected = torch.from_numpy(expm(size * cross(*vector.tolist())))
        torch.testing.assert_close(
            actual - torch.eye(3), expected - torch.eye(3), rtol=2e-5, atol=3e-7 * max(size, 1)
        )


def test_initial_values():
    encoding = create_encoding("rope_sphere", dim=64 * 3, num_heads=3, order="quaternion", axes=3)
    expected = torch.tensor([100 ** (-p / 21) for p in range(21)])
    torch.testing.assert_close(encoding.freqs.detach(), expected[None, :, None].expand(3, 21, 3))
    frames = encoding.directions.detach()
    torch.testing.assert_close(frames @ frames.mT, torch.eye(3).expand(3, 21, 3, 3))
    assert not hasattr(create_encoding("rope_sphere", dim=6, num_heads=2), "directions")


def test_dropped_tokens():
    encoding, pos = build(order="mean"), Grid((3, 4), 1).positions()
    keep = torch.tensor([[0, 5, 2], [0, 12, 3]])
    full, subset = encoding.rotations(pos)[0], encoding.rotations(pos.gather(keep))
    for i in range(2):
        torch.testing.assert_close(subset[i], full[:, keep[i]])


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="rope_sphere(order=quaternion)", img_size=64)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    for block in model.blocks:
        assert all(parameter.grad.any() for parameter in block.attn.pos_enc.parameters())


def test_errors():
    with pytest.raises(OptionError, match=r"rope_sphere needs 3 channels per head or more, got head_dim=2\."):
        create_encoding("rope_sphere", dim=4, num_heads=2)
    with pytest.raises(OptionError, match=r"order must be one of euler, quaternion, mean, got 'zyx'"):
        build(order="zyx")
    with pytest.raises(OptionError, match=r"spacing needs one number for each of 2 axes"):
        build(spacing=(1.0,))
    with pytest.raises(ShapeError, match=r"got 3 axes .*\. Use rope_sphere\(axes=3\)"):
        build().transform(Grid((2, 2, 2)).positions(), 0)
    encoding = build(order="quaternion")
    with torch.no_grad():
        encoding.directions[1, 0, 1] = 0.0
    with pytest.raises(OptionError, match=r"length above 0, got 0 for head 1, block 0, axis 1\."):
        encoding.transform(Grid((2, 2)).positions(), 0)
