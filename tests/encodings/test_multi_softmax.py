"""Encodings with several softmaxes, and calibrations before a rotation."""

import pytest
import timm
import torch
from torch import nn

from tests.cases import cases
from vispe import Attention, Biased, Grid, Rotary, create_encoding, plot_bias
from vispe.attention import Affine, DenseBias, PairRotation, attention
from vispe.encodings import registry
from vispe.encodings.attention_layer import attend
from vispe.encodings.compose import Compose, bias_of, transform_of
from vispe.encodings.multi_softmax import Branch, branches_of
from vispe.errors import UnsupportedCombination


class Both(Biased):
    """Half of a head's output by content, half by a learned map."""

    name = "both"
    ndim = (2,)
    multi_softmax = True
    num_heads: int

    def __post_init__(self):
        self.gate = nn.Parameter(torch.linspace(-1, 1, self.num_heads))
        self.tilt = nn.Parameter(torch.tensor(0.3))

    @property
    def per_layer(self):
        return True

    def branches(self, pos, layer, x=None):
        share = self.gate.sigmoid()[:, None, None]
        coord_sum = pos.coords.sum(-1).to(self.tilt.dtype)
        logits = self.tilt * (coord_sum[:, :, None] - 2 * coord_sum[:, None])[:, None]
        return [Branch(1 - share[None]), Branch(share[None], None, DenseBias(logits, pos).as_logits())]


class Twice(Rotary):
    """Queries of double length."""

    name = "twice"
    ndim = (1, 2, 3)
    scales_channels = True

    def transform(self, pos, layer, x=None):
        return Affine(q_mul=torch.tensor(2.0), k_add=torch.tensor(1.0))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "both": Both, "twice": Twice})


def expected(encoding, q, k, v, pos):
    """Return the output by the definition, from the weights."""
    share = encoding.gate.sigmoid()[:, None, None]
    content = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    coord_sum = pos.coords.sum(-1).to(q)
    fixed = (encoding.tilt * (coord_sum[:, :, None] - 2 * coord_sum[:, None]))[:, None].softmax(-1)
    return ((1 - share) * content + share * fixed) @ v


@cases("shape", [(3, 4), (1, 5), (6, 2)])
def test_branches_add_up_with_their_gates(shape):
    encoding, pos = Both(num_heads=3).double(), Grid(shape, prefix=1).positions()
    q, k, v, cotangent = torch.randn(4, 2, 3, pos.tokens, 8, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)] + list(encoding.parameters())
    out, target = attend(q, k, v, [encoding], pos, 0), expected(encoding, q, k, v, pos)
    torch.testing.assert_close(out, target)
    for actual, expected_grad in zip(
        *(torch.autograd.grad(o, leaves, cotangent) for o in (out, target)), strict=True
    ):
        torch.testing.assert_close(actual, expected_grad)


@cases("fused", [True, False])
def test_a_converted_model_supports_branches(fused):
    model = timm.create_model("test_vit", img_size=64, pos_embed="both", num_classes=5).eval()
    weights = []
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: weights.append(out))
    image = torch.randn(2, 3, 64, 64)
    calls = []
    block = model.blocks[0].attn
    block.register_forward_pre_hook(lambda module, args, kwargs: calls.append(args[0]), with_kwargs=True)
    block.register_forward_hook(lambda module, args, out: calls.append(out))
    model(image).sum().backward()
    x, out = calls
    q, k, v = block.qkv(x).unflatten(-1, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = block.q_norm(q), block.k_norm(k)
    (encoding,) = block.pos_enc.parts()
    pos = Grid((4, 4), prefix=x.shape[1] - 16).positions()
    target = expected(encoding, q, k, v, pos)
    torch.testing.assert_close(out, block.proj(target.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)
    assert (encoding.gate.grad != 0).all()
    if not fused:  # hooks see one map, whose rows are shares of the values
        assert len(weights) == len(model.blocks)
        torch.testing.assert_close(weights[0] @ v, target, rtol=1e-4, atol=1e-5)


def test_branches_through_the_layer_of_vispe():
    layer, pos = Attention(24, 3, "both"), Grid((3, 5)).positions()
    x = torch.randn(2, 15, 24)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    target = expected(layer.pos_enc, q, k, v, pos).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, pos), layer.proj(target), rtol=1e-4, atol=1e-5)


def test_branches_reject_unsupported_options():
    both, pos = Both(num_heads=3), Grid((2, 3)).positions()
    with pytest.raises(
        UnsupportedCombination, match="both uses several softmaxes, which cannot be combined with alibi2d"
    ):
        create_encoding("both+alibi2d", num_heads=3)
    create_encoding("both+sincos2d", num_heads=3, dim=24)
    for one in (bias_of, transform_of):
        with pytest.raises(
            UnsupportedCombination, match="both uses several softmaxes, so it has no single bias"
        ):
            one([both], pos, 0)

    class Values(Both):
        def branches(self, pos, layer, x=None):
            angles = torch.zeros(1, 1, pos.tokens, 2)
            return [
                Branch(torch.ones(1, 1, 1, 1), PairRotation(angles.cos(), angles.sin(), "half", values=True))
            ]

    with pytest.raises(
        UnsupportedCombination, match="A branch of both transforms values, which all branches"
    ):
        branches_of([Values(num_heads=3)], pos, 0)


@cases("spec", ["twice+rope_axial", "rope_axial+twice"])
def test_calibrations_come_before_the_rotation(spec):
    both = create_encoding(spec, dim=24, num_heads=3, grid=(3, 4))
    pos = Grid((3, 4)).positions()
    q, k, v = torch.randn(3, 1, 3, 12, 8)
    rope = next(e for e in both.parts() if e.name == "rope_axial").transform(pos, 0)
    target = attention(2 * q, k + 1, v, transform=rope)
    torch.testing.assert_close(attend(q, k, v, both.parts(), pos, 0), target)
    torch.testing.assert_close(attention(q, k, v, transform=both.transform(pos, 0)), target)
    with pytest.raises(UnsupportedCombination, match=r"rope_axial \+ rope_mixed: two rotary encodings"):
        Compose([*both.parts(), create_encoding("rope_mixed", dim=24, num_heads=3)])


def test_a_plot_shows_the_weights_of_all_softmaxes():
    pytest.importorskip("matplotlib")
    axes = plot_bias("gpsa", grid=(5, 6), query=(2, 3))
    values = axes.images[0].get_array()
    assert values.shape == (5, 6)
    # weights of one query over all patches
    assert values.sum() == pytest.approx(1, abs=1e-5)
