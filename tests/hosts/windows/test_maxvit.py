"""MaxViT and CoAtNet of timm: explicit attention in windows, in grids and on full maps."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, dense, shake
from tests.hosts.windows.test_windows import close
from tests.products import partly
from vispe.errors import UnsupportedHost
from vispe.hosts.windows.model_table import attentions

MODELS = {
    "maxvit_of_tensorflow": {"model_name": "test_maxvit", "transformer_rel_pos_type": "bias_tf"},
    "maxvit": {"model_name": "test_maxvit"},
    "maxvit_heads_last": {"model_name": "test_maxvit", "transformer_head_first": False},
    "maxvit_network": {"model_name": "test_maxvit", "transformer_rel_pos_type": "mlp"},
    "coatnet": {"model_name": "test_coatnet"},
    "coatnet_heads_last": {"model_name": "test_coatnet", "transformer_head_first": False},
}
every = cases("name", MODELS)
SPEC = "alibi2d(slopes=learned,normalize=none,wrap=false)"


def build(name, **options):
    """Return a random model in double precision; windows and grids of 4 x 4, full maps of 8 x 8 and 4 x 4."""
    torch.manual_seed(0)
    return shake(timm.create_model(**MODELS[name], img_size=128, num_classes=3, **options)).double().eval()


def image(size=128):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)).double()


def slopes_of(model):
    """Return a slope for every head of every layer."""
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(m.num_heads, generator=generator).double() for _, _, m in attentions(model)]


def by_hand(model, slopes):
    """Make every layer add -slope * distance instead of its bias."""
    for (_, _, attn), slope in zip(attentions(model), slopes, strict=True):
        distances = dense(*attn.rel_pos.window_size, 0, wrap=False, normalize=False).double()
        attn.rel_pos.get_bias = lambda distances=distances, slope=slope: -slope[:, None, None] * distances
    return model


@pytest.mark.slow
@every
def test_slopes_and_their_gradients_equal_explicit_attention(name):
    ours, stock = vispe.convert(build(name), SPEC), build(name)
    slopes = [s.requires_grad_() for s in slopes_of(stock)]
    by_hand(stock, slopes)
    layers = [m for _, _, m in attentions(ours)]
    with torch.no_grad():
        for attn, slope in zip(layers, slopes, strict=True):
            attn.pos_enc.slope.copy_(slope)
    x = image()
    actual, expected = ours(x), stock(x)
    close(actual, expected, 1e-6)
    towards = cotangent(actual, 3)
    grads = torch.autograd.grad((expected * towards).sum(), slopes)
    (actual * towards).sum().backward()
    for attn, grad in zip(layers, grads, strict=True):
        close(attn.pos_enc.slope.grad, grad, 1e-5)


@partly(3)
@every
def test_conversion_restoring_and_loading_are_bit_exact(name):
    model, x = build(name), image()
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    vispe.convert(model, SPEC)
    assert not torch.equal(model(x), before)
    model.load_state_dict(state)  # strictly; the bias of the stock model has no position
    converted = model(x)
    reloaded = vispe.convert(build(name), SPEC)
    reloaded.load_state_dict(model.state_dict())
    assert torch.equal(reloaded(x), converted)
    vispe.restore(model)
    assert list(model.state_dict()) == list(state)
    assert torch.equal(model(x), before)


@partly(3)
@every
def test_a_stored_bias_equals_stock(name):
    model, x = build(name), image()
    before = model(x)
    vispe.convert(model, SPEC, keep_abs=True)
    with torch.no_grad():
        for _, _, attn in attentions(model):
            attn.pos_enc.slope.zero_()
    close(model(x), before, 1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's own resampling
@partly(2)
@every
def test_the_bias_is_restored_for_another_input_size(name):
    model, stock, x = vispe.convert(build(name), "alibi2d"), build(name), image(192)
    for m in (model, stock):
        m.set_input_size((192, 192))
    assert model(x).isfinite().all()
    assert ("(12, 12)" if "coatnet" in name else "(6, 6)") in vispe.describe(model)
    vispe.restore(model)
    assert torch.equal(model(x), stock(x))
    assert list(model.state_dict()) == list(stock.state_dict())


@partly(2)
@every
def test_a_graph_of_fx_equals_the_model(name):
    model, x = vispe.convert(build(name), "alibi2d"), image()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_timm_builds_it_with_an_encoding():
    model = timm.create_model("test_maxvit", pos_embed="gaussian2d", img_size=128, num_classes=3)
    assert model.vispe.spec == [{"name": "gaussian2d"}]
    assert "of each window: (4, 4)" in vispe.describe(model)
    maps = timm.create_model("test_maxvit", pos_embed="gaussian2d", img_size=128, features_only=True)
    assert len(maps(image().float())) == 5


def small(block, **attention):
    """Return two stages of one kind of block, of a class that no registered model of timm has."""
    cfg = MaxxVitCfg(
        embed_dim=(16, 32), depths=(1, 1), block_type=(block,) * 2, stem_width=8,
        transformer_cfg=MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), **attention),
    )  # fmt: skip
    torch.manual_seed(0)
    return MaxxVit(cfg, img_size=64, num_classes=3).double().eval()


@pytest.mark.parametrize("block", ["M", "PM", "T"])
def test_layers_without_a_bias_store_their_grid(block):
    model, x = small(block, rel_pos_type=""), image(64)
    before = model(x)
    vispe.convert(model, SPEC)
    assert (model(x) - before).abs().max() > 1e-6
    assert ("(16, 16), (8, 8)" if block == "T" else "(4, 4)") in vispe.describe(model)
    vispe.restore(model)
    assert torch.equal(model(x), before)


def test_a_model_without_attention_is_rejected():
    with pytest.raises(UnsupportedHost, match="must have attention layers"):
        vispe.convert(small("C"), SPEC)
