"""Supported and rejected parts of open_clip; a rejection changes nothing."""

import copy

import pytest
import torch
from open_clip import CLIP, CLIPTextCfg, CoCa, CustomTextCLIP
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, image, shake
from tests.hosts.open_clip.common import TEXT, TOWER, VISION, tiny_clip, tiny_tower, words
from tests.products import partly
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.open_clip.tower import ConvertedClipTower
from vispe.hosts.timm.vit import ConvertedViT

TIMM = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
EVA = "eva02_tiny_patch14_224"
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}


def timm_clip(cls=CustomTextCLIP, **vision):
    torch.manual_seed(0)
    return shake(cls(16, {**TIMM, **vision}, TEXT)).eval()


def coca(**vision):
    torch.manual_seed(0)
    pool = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5, "output_tokens": True}
    text = {**TEXT, "width": 16, "embed_cls": True, "output_tokens": True}
    both = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1}
    model = CoCa(16, both, text, {**VISION, "head_width": 8, **pool, **vision})
    for p in model.text_decoder.parameters():  # open_clip leaves some of them as the memory was
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.1)
    return shake(model).eval()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [CLIP, CustomTextCLIP])
def test_the_trunk_of_a_timm_tower_is_converted(cls):
    stock = timm_clip(cls)
    x = image(2, 3, 160, 160)
    for pick in (lambda m: m, lambda m: m.visual, lambda m: m.visual.trunk):
        model = copy.deepcopy(stock)
        assert vispe.convert(pick(model), "alibi2d", slopes="learned", keep_abs=True) is pick(model)
        assert isinstance(model.visual.trunk, ConvertedViT)
        assert type(model.visual) is TimmModel
        assert vispe.describe(model).startswith("visual.trunk: VisionTransformer with")
        model.load_state_dict(stock.state_dict())
        assert not torch.equal(model.encode_image(x), stock.encode_image(x))
        for p in (p for n, p in model.named_parameters() if "pos_enc" in n):
            p.data.zero_()
        actual = torch.stack([t.detach().flatten() for t in model.get_logits(x, words())])
        close(actual, torch.stack([t.detach().flatten() for t in stock.get_logits(x, words())]), 1e-4)
        vispe.restore(pick(model))
        assert set(model.state_dict()) == set(stock.state_dict())
        assert torch.equal(model.encode_image(x), stock.encode_image(x))


@pytest.mark.slow
def test_keep_rope_of_a_trunk():
    stock = timm_clip(timm_model_name=EVA, image_size=224)
    x = image(1, 3, *stock.visual.image_size)
    expected = stock.visual.trunk(x)
    model = vispe.convert(copy.deepcopy(stock), "learn+rope+none")
    close(model.visual.trunk(x), expected)
    model = vispe.convert(copy.deepcopy(stock), "alibi2d", keep_rope=True, keep_abs=True)
    assert "own rotary embedding: in use" in vispe.describe(model)
    model = vispe.convert(copy.deepcopy(stock), "alibi2d")
    assert "own rotary embedding: removed" in vispe.describe(model)
    assert (model.visual.trunk(x) - expected).abs().max() > 1e-4
    close(vispe.restore(model).visual.trunk(x), expected)


def test_weights_of_an_encoding_module_are_copied_into_a_timm_trunk():
    model = timm_clip()
    source = vispe.create_encoding("learned", dim=64, grid=(10, 10))
    vispe.convert(model, [source, "alibi2d"])
    assert torch.equal(model.visual.trunk.pos_enc.parts()[0].weight, source.weight)


def test_methods_of_open_clip_for_timm_towers():
    model = vispe.convert(timm_clip(patch_dropout=0.5), "alibi2d(slopes=learned)+learned")
    model.set_grad_checkpointing()
    model.train()
    (model.encode_image(image(2, 3, 160, 160)) ** 2).sum().backward()
    assert model.visual.trunk.blocks[0].attn.pos_enc.slope.grad.abs().max() > 0
    model.eval()
    model.visual.set_input_size((160, 96))
    actual = model.visual.forward_intermediates(image(1, 3, 160, 96), indices=2)
    assert [tuple(f.shape) for f in actual["image_intermediates"]] == [(1, 64, 10, 6)] * 2
    model.lock_image_tower()
    assert not any(p.requires_grad for p in model.visual.trunk.parameters())


def test_the_image_tower_of_coca_is_converted_and_affects_captions():
    stock = coca()
    model = vispe.convert(copy.deepcopy(stock), "alibi2d(slopes=learned)", keep_abs=True)
    assert isinstance(model.visual, ConvertedClipTower)
    changed = model(image(), words()[:2], output_labels=False)
    for p in (p for n, p in model.named_parameters() if "pos_enc" in n):
        p.data.zero_()
    expected, actual = (m(image(), words()[:2], output_labels=False) for m in (stock, model))
    assert set(actual) == set(expected)
    assert not torch.equal(changed["logits"], expected["logits"])
    for name in expected:
        close(actual[name], expected[name], 1e-4)
    vispe.restore(model)
    for name, value in model(image(), words()[:2], output_labels=False).items():
        assert torch.equal(value, expected[name])


def refused(model, spec, error, match, **options):
    """Assert that converting raises and leaves the model unchanged."""
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    before = [(n, type(m), sorted(vars(m))) for n, m in model.named_modules()]
    with pytest.raises(error, match=match):
        vispe.convert(model, spec, **options)
    assert [(n, type(m), sorted(vars(m))) for n, m in model.named_modules()] == before
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_towers_without_tokens_are_rejected():
    for pick in (lambda m: m, lambda m: m.visual):
        model = CLIP(16, {**RESNET, "head_width": 8}, TEXT)
        refused(pick(model), "alibi2d", UnsupportedHost, "got open_clip's ModifiedResNet.*'ViT-B-32'")
        with pytest.raises(UnsupportedHost, match="ModifiedResNet"):
            vispe.restore(pick(model))
    model = CustomTextCLIP(16, {**TIMM, "timm_model_name": "test_resnet", "timm_pool": "avg"}, TEXT)
    refused(model, "alibi2d", UnsupportedHost, "ResNet")


def test_text_and_other_parts_are_rejected():
    model = coca()
    text = CustomTextCLIP(16, {**VISION, "head_width": 8}, CLIPTextCfg(**TEXT))
    for part in (model.text, model.text_decoder, text.text.transformer, model.visual.attn_pool):
        name = type(part).__name__
        refused(part, "alibi2d", UnsupportedHost, f"only image towers of open_clip are converted, got {name}")
    with pytest.raises(UnsupportedHost, match="got TextTransformer"):
        vispe.restore(model.text)


class OwnForward(VisionTransformer):
    def _embeds(self, x):
        return super()._embeds(x) * 2


class Quiet(VisionTransformer):
    pass


def test_subclasses_that_override_replaced_methods_are_rejected():
    refused(OwnForward(**TOWER), "alibi2d", UnsupportedHost, "OwnForward overrides _embeds of")
    tower = vispe.convert(Quiet(**TOWER), "alibi2d")
    assert isinstance(tower, Quiet)
    assert type(vispe.restore(tower)) is Quiet


def test_instances_with_patched_methods_are_rejected():
    tower = tiny_tower()
    tower.forward = lambda x: x
    refused(tower, "alibi2d", UnsupportedHost, "VisionTransformer: forward is patched on the instance")
    tower = tiny_tower()
    tower.transformer.resblocks[1].attention = lambda x: x
    refused(
        tower, "alibi2d", UnsupportedHost, r"transformer.resblocks.1: attention is patched on the instance"
    )
    vispe.convert(tower, "sincos2d")  # works outside of the blocks


class OwnAttention(nn.MultiheadAttention):
    pass


class OwnBlock(nn.Module):
    def forward(self, x, attn_mask=None):
        return x


def test_other_attention_classes_support_additive_encodings_only():
    tower = tiny_tower()
    tower.transformer.resblocks[1].attn = OwnAttention(32, 4, batch_first=True)
    refused(
        tower,
        "alibi2d",
        UnsupportedHost,
        r"resblocks.1.attn must be one of MultiheadAttention, .* got OwnAttention",
    )
    vispe.convert(tower, "learned")(image())
    tower = tiny_tower()
    tower.transformer.resblocks[0] = OwnBlock()
    refused(
        tower,
        "alibi2d",
        UnsupportedHost,
        r"resblocks\.0 must be one of MultiheadAttention, .* got OwnBlock\. Use an additive",
    )
    tower = tiny_tower()
    tower.transformer.resblocks[1] = OwnBlock()
    refused(tower, "alibi2d", UnsupportedHost, r"resblocks.1 must be one of .* got OwnBlock")
    tower = tiny_tower(scaled_cosine_attn=True)
    refused(tower, "alibi2d", UnsupportedHost, "scaled cosine attention is not supported")
    tower = tiny_tower()
    tower.transformer.resblocks[0].attn = nn.MultiheadAttention(32, 4, add_bias_kv=True, batch_first=True)
    refused(tower, "alibi2d", UnsupportedHost, "separate projections and bias tokens")
    tower = tiny_tower()
    tower.transformer.batch_first = False
    refused(tower, "alibi2d", UnsupportedHost, "batch_first=False")
    tower = tiny_tower(patch_dropout=0.5)
    tower.patch_dropout.exclude_first_token = False
    refused(tower, "alibi2d", UnsupportedHost, "must not drop the class token")


def test_unsupported_specs_are_rejected():
    refused(
        tiny_clip(),
        "alibi",
        UnsupportedCombination,
        "alibi supports 1 axis, got the 2-axis grid of VisionTransformer",
    )
    refused(tiny_clip(), "alibi2d", UnsupportedCombination, "no rotary embedding to keep", keep_rope=True)
    refused(tiny_clip(), "rope+alibi2d", UnsupportedCombination, "no rotary embedding to keep")
    refused(tiny_clip(), "alibi2dd", vispe.VispeError, "alibi2dd")
    refused(
        tiny_clip(),
        "alibi2d+learned",
        vispe.VispeError,
        "of a sum of encodings are ambiguous",
        metric="manhattan",
    )
    source = vispe.create_encoding("learned", dim=32, grid=(4, 4))
    refused(
        tiny_clip(),
        source,
        UnsupportedCombination,
        r"learned: this tower needs weight of shape \(1, 15, 32\), got \(1, 16, 32\)",
    )


@partly(25)
@cases("name", vispe.list_encodings(ndim=2))
def test_every_encoding_is_converted_or_rejected_before_any_change(name):
    stock = tiny_tower()
    tower = copy.deepcopy(stock)
    try:
        vispe.convert(tower, name)
    except vispe.VispeError:
        assert type(tower) is VisionTransformer
        assert torch.equal(tower(image()), stock(image()))
        return
    assert torch.isfinite(tower(image())).all()
    tower.load_state_dict(stock.state_dict())
    other = vispe.convert(copy.deepcopy(stock), name)
    other.load_state_dict(tower.state_dict())
    assert torch.equal(other(image()), tower(image()))
    assert torch.equal(vispe.restore(tower)(image()), stock(image()))


@cases("layers", [[1], [0]])
def test_random_draws_for_encodings_of_some_layers(layers):
    spec = [{"name": "alibi2d", "slopes": "learned", "layers": layers, "jitter": 0.9}, {"name": "rope_mixed"}]
    tower = vispe.convert(tiny_tower(), spec).train()
    assert (tower(image()) - tower(image())).abs().max() > 1e-3
    tower.eval()
    assert torch.equal(tower(image()), tower(image()))


def test_options_for_another_number_of_axes_are_rejected_before_any_change():
    tower = tiny_tower()
    with pytest.raises(
        UnsupportedCombination, match=r"rope_axial: split must .* 2-axis grid .* got \(2, 1, 1\)"
    ):
        vispe.convert(tower, "rope_axial(split=[2,1,1])")
    assert type(tower) is VisionTransformer
