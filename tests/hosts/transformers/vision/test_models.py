"""Vision towers inside their models: conversion, restoring, copies, checkpoints, towers of timm, and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import vispe
from tests.cases import cases
from tests.hosts.transformers.tiny import FAMILIES, QWEN, batch, make, needs, transformers
from tests.hosts.transformers.vision.oracle import GRIDS, ROWS, close, images, line, patches, tower
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.vision.convert import (
    convert_vision,
    describe_vision,
    restore_vision,
    vision_tower_of,
)
from vispe.hosts.transformers.vision.families import attentions


@cases("family", ROWS)
def test_a_removed_table_is_restored(family):
    ours = tower(family)
    stock, x = copy.deepcopy(ours), images(family)
    before, names = ours(x).last_hidden_state, list(ours.state_dict())
    path = next(n for n, p in ours.named_parameters() if "position_embedding" in n)
    remaining = ours.get_parameter(path)
    convert_vision(ours, "alibi2d", keep_abs=False)
    convert_vision(ours, "none", keep_abs=False)
    stock.get_parameter(path).data.zero_()
    assert torch.equal(ours(x).last_hidden_state, stock(x).last_hidden_state)
    large = {"interpolate_pos_encoding": True} if family != "internvl" else {}
    wide = images(family, size=(20, 28))
    assert torch.equal(ours(wide, **large).last_hidden_state, stock(wide, **large).last_hidden_state)
    assert path not in ours.state_dict()
    ours.load_state_dict(stock.state_dict())  # strictly, though it has the table
    with pytest.raises(UnsupportedCombination, match="no rotary embedding to keep"):
        convert_vision(ours, "alibi2d+rope")
    convert_vision(ours, "alibi2d+learn")
    assert ours.get_parameter(path) is remaining
    convert_vision(ours, "alibi2d", keep_abs=False)
    restore_vision(ours)
    assert list(ours.state_dict()) == names
    assert torch.equal(ours(x).last_hidden_state, before)
    assert ours.get_parameter(path) is remaining
    convert_vision(ours, "alibi2d", keep_abs=False)
    ours.bfloat16()
    restore_vision(ours)
    assert ours(x.bfloat16()).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_model_is_converted_and_restored(family):
    model = make(family)
    types = {name: type(m) for name, m in model.named_modules()}
    text, image = batch(family, [5], [3]), batch(family, [3, "image", 2])
    with torch.no_grad():
        before = [model(**b.inputs).logits for b in (text, image)]
        convert_vision(model, "alibi2d+irpe")
        after = [model(**b.inputs).logits for b in (text, image)]
        assert torch.equal(after[0], before[0])
        assert (after[1] - before[1]).abs().max() > 1e-3
        tower = vision_tower_of(model)
        assert vision_tower_of(model.model) is tower is vision_tower_of(tower)
        assert "alibi2d" in describe_vision(model)
        names = set(model.state_dict())
        fresh = make(family)
        convert_vision(fresh, "alibi2d+irpe")
        fresh.load_state_dict(make(family).state_dict())  # a stock checkpoint, strictly
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(**image.inputs).logits, after[1])
        restore_vision(model)
        assert {name: type(m) for name, m in model.named_modules()} == types
        assert {n for n in names if "pos_enc" not in n} == set(model.state_dict())
        assert all(
            torch.equal(model(**b.inputs).logits, ref) for b, ref in zip((text, image), before, strict=True)
        )
    with pytest.raises(UnsupportedHost, match="must be a converted one"):
        restore_vision(model)
    assert "without an encoding" in describe_vision(model)


def with_timm(kind: str) -> nn.Module:
    """Return a language model with a vision tower of timm."""
    shape = {"img_size": 12, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    vision = {"model_type": "timm_wrapper", "architecture": "vit_tiny_patch16_224", "model_args": shape}
    config = {"text_config": make("llava").config.text_config, "image_token_id": 290}
    torch.manual_seed(0)
    if kind == "perception_lm":
        model_config = transformers.PerceptionLMConfig(vision_config=vision, video_token_id=291, **config)
        return transformers.PerceptionLMForConditionalGeneration(model_config).eval()
    vision = transformers.AutoConfig.for_model(**vision)
    vision.hidden_size = 32
    model_config = transformers.LlavaConfig(vision_config=vision, vision_feature_layer=-1, **config)
    return transformers.LlavaForConditionalGeneration(model_config).eval()


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits from pixels; LLaVA needs the option that maps of timm become rows of tokens."""
    if "perception" in model.config.model_type:
        return model(**{**inputs, "pixel_values": inputs["pixel_values"][None]}).logits
    recorded = model.get_image_features(
        inputs["pixel_values"], vision_feature_select_strategy="full", output_fmt="NLC", return_dict=True
    )
    words = {k: v for k, v in inputs.items() if k != "pixel_values"}
    return model(**words, mm_encoder_outputs={"image": recorded}).logits


@cases("kind", ["llava", "perception_lm"])
def test_a_language_model_sees_images_through_a_converted_tower_of_timm(kind):
    if kind == "llava":
        needs("5.18", "encoded images cannot be passed")
    model = with_timm(kind)
    inner = model.model.vision_tower.timm_model
    assert vision_tower_of(model) is inner
    inputs = batch("llava", [3, "image", 2]).inputs
    with torch.no_grad():
        before = logits(model, inputs)
        convert_vision(model, "none")
        without = logits(model, inputs)
        assert "model.vision_tower.timm_model.pos_embed" not in model.state_dict()
        assert (without - before).abs().max() > 1e-5
        pixels = inputs["pixel_values"]
        rotated = pixels.unflatten(-1, (3, 4)).flip(-2).flatten(-2)
        features, swapped = (inner.forward_features(p)[:, 1:].unflatten(1, (3, 3)) for p in (pixels, rotated))
        close(swapped.flip(2), features, 1e-6)  # no position is left: columns may be exchanged
        convert_vision(model, "alibi2d", keep_abs=True)
        assert "alibi2d" in describe_vision(model)
        assert (logits(model, inputs) - without).abs().max() > 1e-5
        restore_vision(model)
        assert torch.equal(logits(model, inputs), before)
    model.train()
    convert_vision(model, "alibi2d", slopes="learned")
    logits(model, inputs).square().sum().backward()
    assert all(m.pos_enc.slope.grad.abs().max() > 0 for m in inner.modules() if getattr(m, "pos_enc", None))


@cases("family", ["qwen2_vl", "llava", "internvl"])
def test_unsupported_towers_are_rejected_unchanged(family):
    ours = tower(family, double=False)
    x = patches(double=False) if family in QWEN else (images(family, double=False),)
    before, types = ours(*x).last_hidden_state, [type(m) for m in ours.modules()]
    refused = {
        "sincos2d": "outside attention",
        "peg": "outside attention",
        "learned": "outside attention",
    }
    refused |= {
        "alibi3d": "3 axes",
        "alibi": "1 axis",
        "gta(so3=true)": "pose|so3",
        "alibi2d+peg": "outside attention",
    }
    for spec, why in refused.items():
        with pytest.raises((UnsupportedCombination, ShapeError, OptionError), match=why):
            convert_vision(ours, spec, keep_rope=False if family in QWEN else None)
    if family in QWEN:
        with pytest.raises(OptionError, match=r"Pass grid=\[h, w\]"):
            convert_vision(ours, "rpb")
    ours_attn = next(attn for _, _, attn in attentions(ours))
    ours_attn.forward = ours_attn.forward
    with pytest.raises(UnsupportedHost, match="patched on the instance"):
        convert_vision(ours, "alibi2d")
    del ours_attn.forward
    assert [type(m) for m in ours.modules()] == types
    assert torch.equal(ours(*x).last_hidden_state, before)


@cases("family", FAMILIES)
def test_classes_of_layers_that_are_replaced_after_the_conversion_are_refused(family):
    ours = tower(family)
    convert_vision(ours, "alibi2d")
    (_, _, layer), *_ = attentions(ours)
    layer.__class__ = type(layer).vispe_stock
    with pytest.raises(UnsupportedHost, match="its class was replaced"):
        ours(*(patches() if family in QWEN else (images(family),)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_converted_towers_can_be_copied_and_pickled(family):
    ours = tower(family)
    x = patches() if family in QWEN else (images(family),)
    before = ours(*x).last_hidden_state
    convert_vision(ours, "alibi2d+irpe", keep_abs=None if family in ("qwen2_vl", "qwen2_5_vl") else False)
    out = ours(*x).last_hidden_state
    for duplicate in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(duplicate(*x).last_hidden_state, out)
        restore_vision(duplicate)
        assert torch.equal(duplicate(*x).last_hidden_state, before)
    assert torch.equal(ours(*x).last_hidden_state, out)


def test_unknown_towers_are_rejected():
    class Own(type(tower("qwen2_vl"))):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    changed = tower("qwen2_vl")
    changed.__class__ = Own
    with pytest.raises(UnsupportedHost, match="Convert a stock tower"):
        convert_vision(changed, "alibi2d")
    with pytest.raises(
        UnsupportedHost, match="no supported vision tower in the model, got a Qwen2VLTextModel"
    ):
        convert_vision(make("qwen2_vl").model.language_model, "alibi2d")


def test_weights_of_an_encoding_module_are_copied():
    ours = tower("qwen2_vl")
    source = vispe.create_encoding("alibi2d", num_heads=2, slopes="learned", dim=32)
    with torch.no_grad():
        source.slope.copy_(torch.tensor([3.0, 5.0]))
    convert_vision(ours, source)
    for _, _, attn in attentions(ours):
        assert attn.pos_enc.slope.tolist() == [3.0, 5.0]
    with pytest.raises(UnsupportedCombination, match=r"this tower needs slope of shape \(2,\), got \(3,\)"):
        convert_vision(ours, vispe.create_encoding("alibi2d", num_heads=3, slopes="learned"))


def test_positions_outside_the_grid_are_rejected():
    ours = tower("qwen2_vl")
    convert_vision(ours, "alibi2d")
    x, grids = patches(GRIDS[:1])
    ids = torch.tensor([t[2:4] for t in line("qwen2_vl", GRIDS[:1])])
    for wrong in (ids + 3, ids + 0.5, ids - 1):
        with pytest.raises(ShapeError, match="must be rows and columns of the grid"):
            ours(x, grids, position_ids=wrong)
    with pytest.raises(ShapeError, match="one row and column per patch"):
        ours(x, grids, position_ids=ids[:-1])


def test_convert_accepts_the_complete_model():
    model, other = make("qwen2_5_vl"), make("qwen2_5_vl")
    inputs = batch("qwen2_5_vl", [3, "image", 2, "video", 1]).inputs
    with torch.no_grad():
        before = model(**inputs).logits
        vispe.convert(model, "alibi2d", slopes="learned", keep_rope=True)
        convert_vision(other, "alibi2d(slopes=learned)", keep_rope=True)
        vision_tower_of(other).load_state_dict(vision_tower_of(model).state_dict())
        assert torch.equal(model(**inputs).logits, other(**inputs).logits)
        assert "alibi2d" in vispe.describe(model)
        vispe.restore(model)
        assert torch.equal(model(**inputs).logits, before)
