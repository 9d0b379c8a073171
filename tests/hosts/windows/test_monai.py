"""MONAI's ViT, UNETR and SwinUNETR on images and volumes, against explicit attention."""

from __future__ import annotations

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, shake
from tests.hosts.windows.test_windows import close
from tests.products import partly
from vispe.errors import ShapeError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.windows.model_table import attentions

nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
swin = pytest.importorskip("monai.networks.nets.swin_unetr", reason="MONAI is not installed")

VIT = {"in_channels": 1, "hidden_size": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 2}
SWIN = {
    "in_chans": 1,
    "embed_dim": 12,
    "window_size": (4, 4, 4),
    "patch_size": (2, 2, 2),
    "num_heads": (2, 2, 2, 2),
}
SWIN |= {"depths": (2, 1, 1, 1)}
MODELS = {
    "vit": (lambda: nets.ViT(img_size=(16,) * 3, patch_size=(4,) * 3, **VIT), (1, 16, 16, 16)),
    "vit_class": (
        lambda: nets.ViT(img_size=(16, 16), patch_size=(4, 4), spatial_dims=2, classification=True, **VIT),
        (1, 16, 16),
    ),
    "vit_perceptron": (
        lambda: nets.ViT(img_size=(16,) * 3, patch_size=(4,) * 3, proj_type="perceptron", save_attn=True, **VIT),
        (1, 16, 16, 16),
    ),
    "unetr": (
        lambda: nets.UNETR(
            in_channels=1, out_channels=2, img_size=(16, 32, 48), feature_size=4,
            hidden_size=24, mlp_dim=32, num_heads=2,
        ),
        (1, 16, 32, 48),
    ),
    "swin": (lambda: swin.SwinTransformer(**SWIN), (1, 32, 24, 40)),
    "swin_checkpoint": (lambda: swin.SwinTransformer(**SWIN, use_checkpoint=True), (1, 32, 24, 40)),
}  # fmt: skip
every = cases("name", MODELS)


def build(name):
    torch.manual_seed(0)
    model = shake(MODELS[name][0]()).double().eval()
    return model.train() if "checkpoint" in name else model


def volume(name, seed=1):
    return torch.randn(2, *MODELS[name][1], generator=torch.Generator().manual_seed(seed)).double()


def outputs(model, x):
    out = model(x)
    return (
        out[0]
        if isinstance(out, tuple)
        else torch.cat([o.flatten(1) for o in out], 1)
        if isinstance(out, list)
        else out
    )


def spec_of(name):
    word = "alibi2d" if name == "vit_class" else "alibi3d"
    return f"{word}(slopes=learned,normalize=none,wrap=false)"


def distances(*shape, prefix=0):
    """Return distances between all cells; tokens without a position have distance 0."""
    cells = torch.cartesian_prod(*(torch.arange(n).double() for n in shape)).reshape(-1, len(shape))
    distance = torch.zeros(len(cells) + prefix, len(cells) + prefix, dtype=torch.float64)
    distance[prefix:, prefix:] = (cells[:, None] - cells).square().sum(-1).sqrt()
    return distance


def by_hand(model, name, slopes):
    """Make every layer of a stock model add -slope * distance, without the tables of the model."""
    for (_, _, attn), slope in zip(attentions(model), slopes, strict=True):
        if name.startswith("swin"):
            bias = (-slope[:, None, None] * distances(*attn.window_size)).permute(1, 2, 0)
            index = attn.relative_position_index.flatten()
            one = torch.zeros(len(attn.relative_position_bias_table), dtype=torch.long)
            one.scatter_(0, index, torch.arange(len(index)))  # a pair of cells for each offset
            table = bias.flatten(0, 1)[one]
            del attn.relative_position_bias_table
            attn.relative_position_bias_table = table
            continue
        shape = {"unetr": (1, 2, 3), "vit_class": (4, 4)}.get(name, (4, 4, 4))
        bias = -slope[:, None, None] * distances(*shape, prefix=int(name == "vit_class"))
        attn.rel_positional_embedding = lambda x, logits, q, bias=bias: logits + bias
    for module in model.modules():
        if hasattr(module, "position_embeddings"):
            module.position_embeddings.data.zero_()
    return model


def slopes_of(model):
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(m.num_heads, generator=generator).double() for _, _, m in attentions(model)]


@pytest.mark.slow
@every
def test_slopes_and_their_gradients_equal_explicit_attention(name):
    ours, stock = vispe.convert(build(name), spec_of(name)), build(name)
    slopes = [s.requires_grad_() for s in slopes_of(stock)]
    layers = [m for _, _, m in attentions(ours)]
    with torch.no_grad():
        for attn, slope in zip(layers, slopes, strict=True):
            attn.pos_enc.slope.copy_(slope)
    x = volume(name)
    if name.startswith("swin"):  # only where windows are whole: stock reads its table as if they were
        x = torch.randn(1, 1, 64, 64, 64, generator=torch.Generator().manual_seed(1)).double()
    actual, expected = outputs(ours, x), outputs(by_hand(stock, name, slopes), x)
    close(actual, expected, 1e-6)
    towards = cotangent(actual, 3)
    grads = torch.autograd.grad((expected * towards).sum(), slopes)
    (actual * towards).sum().backward()
    for attn, grad in zip(layers, grads, strict=True):
        close(attn.pos_enc.slope.grad, grad, 1e-4)


@partly(3)
@every
def test_conversion_copies_restoring_and_loading_are_bit_exact(name):
    model, x = build(name), volume(name)
    before, state = outputs(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    vispe.convert(model, spec_of(name))
    assert not torch.equal(outputs(model, x), before)
    model.load_state_dict(state)  # strictly; the tables of the stock model have no position
    converted = outputs(model, x)
    assert torch.equal(outputs(copy.deepcopy(model), x), converted)
    reloaded = vispe.convert(build(name), spec_of(name))
    reloaded.load_state_dict(model.state_dict())
    assert torch.equal(outputs(reloaded, x), converted)
    torch.use_deterministic_algorithms(True)  # memory without values is filled with NaN
    try:
        reloaded.to("meta").to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    reloaded.load_state_dict(model.state_dict())
    for path, buffer in model.named_buffers():
        if path.endswith("relative_position_index"):
            reloaded.get_buffer(path).copy_(buffer)
    assert torch.equal(outputs(reloaded, x), converted)
    vispe.restore(model)
    assert list(model.state_dict()) == list(state)
    assert torch.equal(outputs(model, x), before)


@every
def test_stored_tables_equal_stock(name):
    model, x = build(name), volume(name)
    before = outputs(model, x)
    vispe.convert(model, spec_of(name), keep_abs=True)
    with torch.no_grad():
        for _, _, attn in attentions(model):
            attn.pos_enc.slope.zero_()
    close(outputs(model, x), before, 1e-12)


def test_windows_that_shrink_have_their_own_distances():
    """A map of 2 x 3 x 5 cells has windows of 2 x 3 x 4, but the index of stock assumes 4 x 4 x 4."""
    torch.manual_seed(0)
    block = swin.SwinTransformerBlock(8, 2, (4, 4, 4), (0, 0, 0)).double().eval()
    model = swin.SwinTransformer(**SWIN).double().eval()
    model.layers1[0].blocks[0] = block
    vispe.convert(model, "alibi3d(slopes=learned,normalize=none,wrap=false)")
    x = torch.randn(1, 2, 3, 4, 8).double()
    attn, slope = block.attn, torch.tensor([0.7, 1.9]).double()
    attn.pos_enc.slope.data.copy_(slope)
    actual = block.forward_part1(x, None)
    y = block.norm1(x).flatten(1, 3)
    q, k, v = attn.qkv(y).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 2 - slope[:, None, None] * distances(2, 3, 4)).softmax(-1)
    close(actual.flatten(1, 3), attn.proj((weights @ v).transpose(1, 2).flatten(2)), 1e-6)
    attn.vispe_shape = (2, 2, 2)
    with pytest.raises(ShapeError, match="got 24 tokens"):
        attn(y, None)


@pytest.mark.slow
def test_a_complete_network_with_an_encoding():
    torch.manual_seed(0)
    model = nets.SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(2, 1, 1, 1), num_heads=(2, 2, 2, 2)
    )
    vispe.convert(model.eval(), "alibi3d")
    for size in ((32, 32, 64), (64, 32, 32)):
        out = model(torch.randn(1, 1, *size))
        assert out.shape == (1, 2, *size)
        assert out.isfinite().all()


def test_stored_attention_weights():
    model = vispe.convert(build("vit_perceptron"), "alibi3d")
    model(volume("vit_perceptron"))
    weights = model.blocks[0].attn.att_mat
    close(weights.sum(-1), torch.ones(weights.shape[:3]).double(), 1e-12)


def test_a_model_without_a_stored_grid_is_rejected():
    model = nets.ViT(img_size=(16, 16, 32), patch_size=(4,) * 3, **VIT)
    with pytest.raises(UnsupportedHost, match="got 128 patches"):
        vispe.convert(model, "alibi3d")


def test_other_numbers_of_axes_are_rejected():
    with pytest.raises(UnsupportedCombination, match="3-axis grid"):
        vispe.convert(build("vit"), "alibi2d")


def test_a_model_without_values_is_loaded_by_assignment():
    source, x = vispe.convert(build("vit"), "alibi3d"), volume("vit")
    with torch.device("meta"):
        model = vispe.convert(MODELS["vit"][0]().eval(), "alibi3d")
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(outputs(model, x), outputs(source, x))
