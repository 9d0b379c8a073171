"""Ablation of rotary pairs: equal to frequency 0, and undone bit for bit."""

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

import vispe
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.attention.band_ablation import band_mask, unrotated

IMAGE = torch.randn(1, 3, 32, 40, generator=torch.Generator().manual_seed(1))


def small(spec, seed=0):
    torch.manual_seed(seed)
    sizes = {"img_size": (32, 40), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = vispe.convert(VisionTransformer(**sizes, num_classes=0), spec).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)
    return model


def test_the_lowest_bands_are_masked():
    ranks = torch.tensor([[1.9, 1.1, float("nan")], [1.2, 1.8, 1.7]])
    assert band_mask(ranks, 1 / 3).tolist() == [[False, True, False], [True, False, False]]
    assert band_mask(ranks, 1).sum() == 5  # where there are no keys there is no band
    assert not band_mask(ranks, 0).any()
    with pytest.raises(OptionError, match=r"share needs a number from 0 to 1, got share=1.5"):
        band_mask(ranks, 1.5)


@pytest.mark.parametrize("spec", ["rope_axial", "rope_mixed", "rope_axial(logit_scale=2)"])
@torch.no_grad()
def test_masked_pairs_are_not_rotated_and_restored_bit_for_bit(spec):
    model = small(spec)
    before = model(IMAGE)
    acc = {name: value.clone() for name, value in model.state_dict().items()}
    with unrotated(model, torch.zeros(8, dtype=torch.bool)):
        assert torch.equal(model(IMAGE), before)
    with unrotated(model, torch.ones(2, 2, 8, dtype=torch.bool)):
        expected = model(IMAGE)
    assert torch.equal(model(IMAGE), before)
    assert not torch.allclose(expected, before, atol=1e-3)
    assert all(torch.equal(value, acc[name]) for name, value in model.state_dict().items())
    if "scale" not in spec:  # without any rotation it is a model without an encoding
        torch.testing.assert_close(expected, vispe.convert(model, "none")(IMAGE))


@torch.no_grad()
def test_a_mask_of_heads_and_of_blocks():
    model = small("rope_axial")
    first, full = torch.zeros(2, 2, 8, dtype=torch.bool), torch.ones(2, 8, dtype=torch.bool)
    first[0, 1] = True
    by_block, by_head = [], []
    with unrotated(model, first):
        by_block = model(IMAGE)
    with unrotated(model, full):
        by_head = model(IMAGE)
    with unrotated(model, torch.ones(8, dtype=torch.bool)):
        assert torch.equal(model(IMAGE), by_head)
    # frequencies of 0 are what it means
    other = small("rope_axial(rotary_ratio=0.5)")
    with unrotated(model, torch.tensor([False, False, True, True] * 2)):
        torch.testing.assert_close(model(IMAGE), other(IMAGE))
    assert not torch.equal(by_block, by_head)
    assert not torch.equal(by_block, model(IMAGE))


def test_errors():
    model = small("rope_axial")
    before = model(IMAGE)
    with (
        pytest.raises(ShapeError, match=r"for 1 head with 8 pairs, got \(3,\)"),
        unrotated(model, torch.ones(3, dtype=torch.bool)),
    ):
        model(IMAGE)
    assert torch.equal(model(IMAGE), before)  # also after an error
    with (
        pytest.raises(UnsupportedHost, match="has no rotary encoding of vispe"),
        unrotated(nn.Linear(2, 2), None),
    ):
        pass
