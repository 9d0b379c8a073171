"""Shifted windows through the fused kernels: their mask is read from a table, with the bias of a window."""

import pytest
import timm
import torch

import vispe
from tests.attention.cases import HEADS, close, leaf, tensors
from tests.attention.windows import mask_of
from tests.hosts.helpers import shake
from vispe import Grid, attention, use_backend
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias, explain

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = 1e-5
MAPS = {"rows and columns": ((2, 3), (4, 3), (2, 1)), "volumes": ((2, 1, 2), (2, 3, 2), (1, 0, 1))}


def _table(pos):
    values = leaf(HEADS, *(2 * n - 1 for n in pos.grid.shape))
    return TableBias(values, pos), [values]


def _profile(pos):
    slopes = leaf(HEADS)
    return ProfileBias(slopes, torch.randn(1, *(2 * n - 1 for n in pos.grid.shape)), pos), [slopes]


def _distance(pos):
    slopes = leaf(HEADS)
    return DistanceBias(slopes, pos), [slopes]


def _both(pos):
    (first, some), (second, others) = _distance(pos), _table(pos)
    return SumBias([first, second]), [*some, *others]


BIASES = {
    "none": lambda pos: (None, []),
    "table": _table,
    "profile": _profile,
    "distance": _distance,
    "sum": _both,
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("name", BIASES)
def test_shifted_windows(name, kind):
    windows, shape, shift = MAPS[kind]
    torch.manual_seed(0)
    pos = Grid(shape).positions()
    bias, params = BIASES[name](pos)
    mask = mask_of(pos, windows, shift, 2)
    q, k, v = tensors(mask.samples, pos.tokens)
    assert explain(q, k, v, bias=bias, attn_mask=mask, backend="triton").backend == "triton"
    actual = attention(q, k, v, bias=bias, attn_mask=mask, backend="triton")
    expected = attention(q, k, v, bias=bias, attn_mask=mask.added(), backend="reference")
    close(actual, expected, TOLERANCE)
    cotangent, leaves = torch.randn_like(expected), [q, k, v, *params]
    for a, b in zip(
        torch.autograd.grad(actual, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
        strict=True,
    ):
        close(a, b, TOLERANCE)


@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "rope_axial"])
def test_a_model_with_shifted_windows(spec):
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=48, embed_dim=16, depths=(2,), num_heads=(2,), window_size=3
    )
    vispe.convert(shake(model).eval(), spec)
    shifted = [b for b in model.layers[0].blocks if b.attn_mask is not None]
    assert shifted
    x = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    actual, expected = [], []
    for backend, results in (("triton", actual), ("reference", expected)):
        model.zero_grad()
        with use_backend(backend):
            out = model.forward_features(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        results += [out, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, b.abs().max().item()))
