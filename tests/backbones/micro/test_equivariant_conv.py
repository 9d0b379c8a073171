"""Symmetric convolutions: patterns that span their symmetry, and layers that turn with the image."""

import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe.backbones.micro.equivariant_conv import SymmetricConv, patterns

POSES = [(turns, mirror) for mirror in (False, True) for turns in range(4)]


def posed(x, turns, mirror):
    return torch.rot90(x.flip(-1) if mirror else x, turns, (-2, -1))


@cases("side", [3, 4, 5, 6])
def test_patterns_span_all_kernels_of_their_symmetry(side):
    kernels = torch.randn(200, side, side, dtype=torch.float64)
    target = {
        "same": sum(posed(kernels, *p) for p in POSES),
        "slope": (kernels - kernels.flip(-1)) + (kernels - kernels.flip(-1)).flip(-2),
    }
    even = kernels + kernels.flip(-1)
    even = even + even.flip(-2)
    target["saddle"] = even - even.mT
    odd = kernels - kernels.flip(-1)
    odd = odd - odd.flip(-2)
    target["twist"] = odd + odd.mT
    for kind, expected in target.items():
        basis = patterns(side, kind).double().flatten(1)
        rank = torch.linalg.matrix_rank(expected.flatten(1))
        assert len(basis) == rank
        assert torch.allclose(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), atol=1e-6)
        spanned = expected.flatten(1) @ basis.T @ basis
        assert torch.allclose(spanned, expected.flatten(1), atol=1e-5)


@cases(("side", "stride"), [(3, 1), (5, 1), (4, 2), (6, 2)])
@cases("size", [(8, 14), (12, 12)])
def test_layer_is_equivariant(side, stride, size):
    torch.manual_seed(side)
    layer = SymmetricConv(3, 5, 2, side, stride).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (2, 9, size[0] // stride, size[1] // stride)
    for pose in POSES:
        assert torch.allclose(layer(posed(x, *pose)), posed(y, *pose), atol=1e-12)


def test_values_are_those_of_plain_convolutions():
    torch.manual_seed(0)
    layer = SymmetricConv(2, 3, 4).double()
    x = torch.randn(1, 2, 7, 6, dtype=torch.float64)
    kernel = layer.kernel()
    assert torch.equal(kernel[3:7].mT, kernel[11:15])  # slopes along columns, and along rows
    raw = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel)
    layer.bias.data.normal_()
    lengths = torch.sqrt(raw[:, 3:11] ** 2 + raw[:, 11:] ** 2 + 1e-4)
    expected = torch.cat([raw[:, :3] + layer.bias.view(-1, 1, 1), lengths], 1)
    assert torch.allclose(layer(x), expected, atol=1e-12)
    with torch.no_grad():  # in place
        assert torch.allclose(layer(x), expected, atol=1e-12)


@cases(("side", "stride", "edges"), [(3, 1, 2), (6, 2, 3), (4, 2, 0)])
def test_one_channel_stands_for_all(side, stride, edges):
    torch.manual_seed(side)
    layer = SymmetricConv(3, 4, edges, side, stride).double()
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    expected = layer(x.expand(-1, 3, -1, -1))
    assert torch.allclose(layer(x), expected, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(layer(x), expected, atol=1e-12)


def test_edges_see_what_symmetric_kernels_cannot():
    torch.manual_seed(0)
    step = torch.zeros(1, 1, 8, 8)
    step[..., 4:] = 1
    layer = SymmetricConv(1, 1, 1)
    lengths = layer(step)[0, 1, 4]
    assert lengths[3:5].min() > 2 * lengths[[0, 1, 6, 7]].max()
    plain = SymmetricConv(1, 4, 0)
    assert plain(step).shape == (1, 4, 8, 8)
    assert plain.slope is None


def test_gradients():
    torch.manual_seed(0)
    layer = SymmetricConv(2, 2, 1, side=4, stride=2).double()
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *(p.detach().requires_grad_() for p in layer.parameters())))
