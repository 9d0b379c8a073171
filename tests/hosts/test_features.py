"""Intermediate features, masks of the user, new sizes, copies and files."""

import copy
import io
import pickle

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, close, dense, head_masks, image, oracle, set_fused, tiny, without_table
from tests.products import partly
from vispe.errors import InputError, OptionError, ShapeError
from vispe.hosts.common.context import Context

SPECS = ["alibi2d", "alibi2d(slopes=learned)", "sincos2d", "learned", "learn+alibi2d"]


@cases("spec", SPECS)
@cases("form", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_intermediates_agree_with_features_in_every_format(spec, form):
    model = vispe.convert(tiny(depth=3, dynamic_img_size=True, **form), spec)
    x, p = image(2, 3, 40, 16), model.num_prefix_tokens
    features = model.forward_features(x)
    final, taken = model.forward_intermediates(x)
    assert torch.equal(final, features)
    assert [t.shape for t in taken] == [(2, 32, 5, 2)] * 3
    assert torch.equal(
        model.norm(torch.cat([features[:, :p] * 0, taken[2].flatten(2).mT], 1))[:, p:], final[:, p:]
    )
    normed = model.forward_intermediates(x, [-1], norm=True, output_fmt="NLC", intermediates_only=True)
    assert torch.equal(normed[0], final[:, p:])
    early = model.forward_intermediates(x, [0, 1], stop_early=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(early, taken, strict=False))
    assert len(early) == 2
    with_prefix = model.forward_intermediates(
        x, 2, return_prefix_tokens=True, norm=True, intermediates_only=True
    )
    result = model.forward_intermediates(x, (1, 2), return_prefix_tokens=True, output_dict=True)
    assert torch.equal(result["image_features"], final)
    assert torch.equal(result["image_intermediates"][1], taken[2])
    if p:
        assert torch.equal(with_prefix[1][1], final[:, :p])
        assert torch.equal(model.norm(result["image_intermediates_prefix"][1]), final[:, :p])
    else:
        assert isinstance(with_prefix[1], torch.Tensor)
        assert "image_intermediates_prefix" not in result
    assert set(model.forward_intermediates(x, 1, output_dict=True, intermediates_only=True)) == {
        "image_intermediates"
    }
    layers = model.get_intermediate_layers(x, [0, 2], reshape=True, return_prefix_tokens=False, norm=True)
    assert torch.equal(layers[1].flatten(2).mT, final[:, p:])


@cases("arguments", [
    {}, {"indices": 2}, {"indices": [0, -1]}, {"norm": True, "output_fmt": "NLC"}, {"return_prefix_tokens": True},
    {"stop_early": True, "indices": [1]}, {"output_dict": True, "return_prefix_tokens": True},
], ids=str)  # fmt: skip
def test_intermediates_have_the_shape_and_values_of_timm(arguments):
    stock = tiny(depth=3)
    ours = vispe.convert(copy.deepcopy(stock), "none", keep_abs=True)
    expected, actual = (m.forward_intermediates(image(), **arguments) for m in (stock, ours))
    flat = torch.utils._pytree.tree_flatten
    assert flat(actual)[1] == flat(expected)[1]
    assert all(torch.equal(a, b) for a, b in zip(flat(actual)[0], flat(expected)[0], strict=True))


def test_invalid_indices_of_intermediates_raise():
    model = vispe.convert(tiny(), "alibi2d")
    with pytest.raises(OptionError, match=r"of the 2 blocks of the model, got \[5\]"):
        model.forward_intermediates(image(), [5])
    with pytest.raises(OptionError, match="NCHW or NLC, got 'NHWC'"):
        model.forward_intermediates(image(), output_fmt="NHWC")


@cases("spec", SPECS)
def test_features_only_and_pruning(spec):
    torch.manual_seed(0)
    getter = timm.create_model(
        "vit_tiny_patch16_224",
        pos_embed=spec,
        features_only=True,
        out_indices=(0, 1),
        **{**SHAPE, "depth": 3},
    ).eval()
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pos_embed=spec, **{**SHAPE, "depth": 3}).eval()
    actual, expected = getter(image()), model.forward_intermediates(image(), [0, 1], intermediates_only=True)
    assert len(getter.model.blocks) == 2
    model.load_state_dict({**model.state_dict(), **getter.model.state_dict()})
    for a, b in zip(
        actual, model.forward_intermediates(image(), [0, 1], intermediates_only=True), strict=True
    ):
        assert torch.equal(a, b)
    assert actual[0].shape == expected[0].shape == (2, 32, 3, 5)
    assert "alibi2d" in vispe.describe(getter) or "alibi" not in spec
    assert model.prune_intermediate_layers([0], prune_norm=True) == [0]
    assert model.forward_features(image()).shape == (2, 16, 32)
    pruned = copy.deepcopy(model)
    pruned.load_state_dict(model.state_dict())
    assert torch.equal(pruned.forward_features(image()), model.forward_features(image()))


@partly(4)
@cases("checkpointing", [False, True])
@cases("spec", ["alibi2d", "none"])
@cases("shape", [(16, 16), (2, 1, 16, 16), (1, 4, 16, 16)], ids=str)
@cases("kind", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_the_user_is_added(kind, shape, spec, checkpointing):
    stock = without_table(tiny())
    ours = vispe.convert(copy.deepcopy(stock), spec)
    ours.set_grad_checkpointing(checkpointing)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    keep = (noise > -0.3) | torch.eye(16, dtype=torch.bool)
    added = torch.zeros(shape).masked_fill(~keep, float("-inf")) if kind == torch.bool else noise
    bias = dense(3, 5, 1) if spec == "alibi2d" else torch.zeros(16, 16)
    x = image()
    expected = oracle(stock, x, [(added - bias).expand(2, 4, 16, 16)] * 2)
    mask = keep if kind == torch.bool else noise
    close(ours.forward_features(x, attn_mask=mask), expected)
    close(ours(x, attn_mask=mask), stock.forward_head(expected))
    final, _ = ours.forward_intermediates(x, attn_mask=mask)
    close(final, expected)


@cases("spec", ["alibi2d", "none"])
def test_causal(spec):
    stock = without_table(tiny())
    ours = vispe.convert(copy.deepcopy(stock), spec)
    bias = dense(3, 5, 1) if spec == "alibi2d" else torch.zeros(16, 16)
    causal = torch.full((16, 16), float("-inf")).triu(1) - bias
    expected = oracle(stock, image(), [causal[None, None]] * 2)
    close(ours.forward_features(image(), is_causal=True), expected)
    close(ours.forward_intermediates(image(), is_causal=True)[0], expected)


def test_attention_of_the_encoding_needs_positions():
    ours = vispe.convert(tiny(), "alibi2d")
    x, mask = torch.randn(2, 16, 32), torch.randn(16, 16)
    for block in ours.blocks:
        for arguments in ({}, {"attn_mask": mask}):
            with pytest.raises(InputError, match="needs positions"):
                block(x, **arguments)


@cases("size", [(40, 24), (48, 64), (8, 8), (8, 80)])
@cases("spec", ["alibi2d", "alibi2d(slopes=learned)"])
def test_dynamic_sizes_and_set_input_size(spec, size):
    stock = without_table(tiny(dynamic_img_size=True))
    ours = vispe.convert(copy.deepcopy(stock), spec)
    fixed = vispe.convert(without_table(tiny()), spec)
    fixed.load_state_dict(ours.state_dict())
    fixed.set_input_size(size)
    x, slopes = image(2, 3, *size), None
    if "learned" in spec:
        slopes = torch.stack([b.attn.pos_enc.slope for b in ours.blocks])
    expected = oracle(stock, x, head_masks(stock, dense(size[0] // 8, size[1] // 8, 1), slopes))
    close(ours.forward_features(x), expected)
    close(fixed.forward_features(x), expected)
    fixed.set_input_size(img_size=(24, 40))
    with pytest.raises(AssertionError, match="Input height"):
        fixed(image(2, 3, *size)) if size != (24, 40) else None


def test_a_new_patch_size():
    ours = vispe.convert(tiny(), "alibi2d")
    ours.set_input_size(img_size=(24, 40), patch_size=(4, 8))
    stock = without_table(tiny())
    stock.set_input_size(img_size=(24, 40), patch_size=(4, 8))
    close(ours.forward_features(image()), oracle(stock, image(), head_masks(stock, dense(6, 5, 1))))


def test_an_image_of_the_wrong_size_raises_a_clear_error():
    ours = vispe.convert(tiny(), "alibi2d")
    ours.patch_embed.strict_img_size = False
    with pytest.raises(
        ShapeError, match=r"tokens of the grid \(3, 5\), got 9 tokens for an image of \(24, 24\) pixels"
    ):
        ours(image(1, 3, 24, 24))


def test_reference_normalisation_uses_the_initial_grid():
    ours = vispe.convert(
        without_table(tiny(dynamic_img_size=True)), "alibi2d(normalize=reference,wrap=false)"
    )
    ours.set_input_size((48, 64))
    stock = without_table(tiny(dynamic_img_size=True))
    distance = dense(6, 8, 1, wrap=False, normalize=False) / dense(3, 5, 1, wrap=False, normalize=False).max()
    x = image(2, 3, 48, 64)
    close(ours.forward_features(x), oracle(stock, x, head_masks(stock, distance)))


@cases("spec", SPECS)
def test_copies_and_files(spec):
    model = vispe.convert(tiny(dynamic_img_size=True), spec)
    x = image(2, 3, 40, 16)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is type(model)
        assert isinstance(other, timm.models.VisionTransformer)
        assert torch.equal(other(x), expected)
        assert all(a is not b for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert other.vispe.spec == model.vispe.spec
        other.zero_grad()
        other(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())


@cases(("options", "off"), [("layers=[1]", [0]), ("layers=[]", [0, 1]), ("slopes=learned,layers=[0]", [1])])
def test_layers_select_the_blocks_with_a_bias(options, off):
    stock = without_table(tiny())
    ours = vispe.convert(copy.deepcopy(stock), f"alibi2d({options})")
    slopes = torch.ones(2, 4)
    for i, block in enumerate(ours.blocks):
        slopes[i] = (
            0 if i in off else slopes[i] if block.attn.pos_enc is None else block.attn.pos_enc.slope.detach()
        )
    expected = oracle(stock, image(), head_masks(stock, dense(3, 5, 1), slopes))
    actual = ours.forward_features(image())
    close(actual, expected)
    actual.sum().backward()
    assert all(p.grad is not None for n, p in ours.named_parameters() if "pos_enc" in n)


def _plain_masks(model, x, monkeypatch, **arguments) -> list:
    """Run a forward pass and return the result of `Context.plain_mask` in every layer."""
    actual, original = [], Context.plain_mask
    monkeypatch.setattr(Context, "plain_mask", lambda *a: actual.append(original(*a)) or actual[-1])
    model.forward_features(x, **arguments)
    monkeypatch.undo()
    return actual


@pytest.mark.parametrize(("spec", "batch"), [("alibi2d", 1), ("alibi2d(slopes=geometric)", 2)])
def test_a_fixed_bias_is_one_mask_for_stock_attention(spec, batch, monkeypatch):
    model = vispe.convert(tiny(), spec)
    x = image(batch, 3, 24, 40)
    masks = _plain_masks(model, x, monkeypatch)
    assert len(masks) == 2
    slopes = 2.0 ** -torch.arange(2, 10, 2) if "geometric" in spec else torch.ones(1)
    for mask in masks:
        expected = -slopes.view(-1, 1, 1) * dense(3, 5, 1)
        torch.testing.assert_close(mask.squeeze(0).expand_as(expected), expected, rtol=1e-6, atol=1e-6)
    fast = model.forward_features(x)
    monkeypatch.setattr(Context, "plain_mask", lambda *a: None)
    torch.testing.assert_close(model.forward_features(x), fast, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("spec", "batch", "arguments", "fused"), [
    ("alibi2d(slopes=learned)", 1, {}, True),
    ("alibi2d", 1, {"attn_mask": torch.ones(16, 16, dtype=torch.bool)}, True),
    ("alibi2d", 1, {"is_causal": True}, True),
    ("alibi2d", 1, {}, False),
    ("rope_axial+alibi2d", 1, {}, True),
], ids=["learned", "mask", "causal", "unfused", "rotary"])  # fmt: skip
def test_other_encodings_take_the_general_path(spec, batch, arguments, fused, monkeypatch):
    model = vispe.convert(tiny(), spec)
    set_fused(model, fused)
    masks = _plain_masks(model, image(batch, 3, 24, 40), monkeypatch, **arguments)
    assert masks == [None, None]


def test_an_image_of_another_shape_with_equal_token_count():
    for spec in ("alibi2d(wrap=false)", "sincos2d"):
        model = vispe.convert(tiny(), spec)
        model.patch_embed.strict_img_size = False
        assert model(image()).isfinite().all()
        with pytest.raises(ShapeError, match=r"grid \(3, 5\), got \(5, 3\) patches"):
            model(image(2, 3, 40, 24))
