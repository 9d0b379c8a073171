"""Every kind of timm ViT: the converted model equals timm's forward pass under the dense bias."""

import copy
import re
from functools import partial

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)  # fmt: skip
from timm.models.vision_transformer_hybrid import HybridEmbed

import vispe
from tests.cases import cases
from tests.hosts.helpers import (
    RELEASE,
    close,
    dense,
    grads,
    head_masks,
    image,
    oracle,
    set_fused,
    shake,
    slopes_of,
    tiny,
    without_table,
)  # fmt: skip
from vispe.encodings.registry import encoding_class

pytestmark = pytest.mark.slow

FORMS = {
    "class token": {},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "registers without entry": {"reg_tokens": 3, "no_embed_class": True},
    "registers only": {"class_token": False, "reg_tokens": 2, "global_pool": "avg", "no_embed_class": True},
    "pre-norm": {"pre_norm": True},
    "attention pooling": {"class_token": False, "global_pool": "map"},
    "layer scale": {"init_values": 0.5, "qkv_bias": False, "proj_bias": False},
    "qk norm": {"qk_norm": True},
    "scale norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "parallel things": {"block_fn": ParallelThingsBlock},
    "post-norm": {"block_fn": ResPostBlock},
    "parallel scaling": {"block_fn": ParallelScalingBlock},
    "parallel scaling, qk norm": {"block_fn": ParallelScalingBlock, "qk_norm": True, "qkv_bias": False},
    "parallel diff": {"block_fn": DiffParallelScalingBlock},
    "parallel diff, no bias": {"block_fn": DiffParallelScalingBlock, "qk_norm": True, "qkv_bias": False},
    "diff": {"attn_layer": "diff"},
    "diff, qk norm": {"attn_layer": "diff", "qk_norm": True, "scale_attn_norm": True},
    "gated": {"qk_norm": True},
    "dynamic": {"dynamic_img_size": True},
    "dynamic, padded": {"dynamic_img_size": True, "dynamic_img_pad": True},
    "no table": {"pos_embed": "none"},
    "distilled": {"cls": VisionTransformerDistilled},
    "distilled, registers ignored": {"cls": VisionTransformerDistilled, "reg_tokens": 2},
}


def build(name: str, **options):
    if name == "gated" and RELEASE < (1, 0, 31):
        pytest.skip("this timm has no gated attention")
    model = tiny(**FORMS[name], **options)
    if name == "gated":
        for block in model.blocks:
            block.attn = shake(
                Attention(32, 4, gated=True, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm)
            )
    return model


@cases("fused", [True, False], ids=["fused", "unfused"])
@cases("name", FORMS)
def test_converted_equals_stock_under_the_dense_bias_with_gradients(name, fused):
    stock = without_table(build(name))
    set_fused(stock, fused)
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    x = image()
    masks = head_masks(stock, dense(3, 5, stock.num_prefix_tokens))
    expected = stock.forward_head(oracle(stock, x, masks))
    actual = ours(x)
    close(actual, expected)
    close(grads(ours, actual), grads(stock, expected))
    plain = stock(x)
    assert (plain - expected).abs().max() > 1e-3, "the bias would not be seen by this test"


@cases("fused", [True, False], ids=["fused", "unfused"])
@cases("name", ["registers", "diff", "parallel scaling", "parallel diff", "distilled", "qk norm"])
def test_gradients_of_learned_slopes_equal_those_of_the_dense_bias(name, fused):
    stock = without_table(build(name))
    set_fused(stock, fused)
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d(slopes=learned,wrap=false,normalize=none)")
    slopes = slopes_of(ours).detach().clone().requires_grad_()
    distance = dense(3, 5, stock.num_prefix_tokens, wrap=False, normalize=False)
    x = image()
    expected, actual = oracle(stock, x, head_masks(stock, distance, slopes)), ours.forward_features(x)
    close(actual, expected)
    grads(stock, expected)
    actual_grads = grads(ours, actual)
    got = torch.stack([g for n, g in actual_grads.items() if n.endswith("slope")])
    assert slopes.grad.abs().min() > 1e-4
    close(got, slopes.grad)


def test_branches_of_a_parallel_block_have_separate_slopes():
    ours = vispe.convert(build("parallel things"), "alibi2d(slopes=learned,layers=[1])")
    names = [n for n, _ in ours.named_parameters() if "slope" in n]
    assert names == [f"blocks.1.attns.{i}.attn.pos_enc.slope" for i in (0, 1)]


def hybrid(**options):
    stem = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 4, 4), torch.nn.ReLU())
    embed = partial(HybridEmbed, backbone=stem)
    return tiny(embed_layer=embed, patch_size=2, **options)


@cases("options", [{}, {"dynamic_img_size": True}], ids=["static", "dynamic"])
def test_hybrid_stems(options):
    stock = without_table(hybrid(**options))
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    x = image()
    masks = head_masks(stock, dense(3, 5, 1))
    close(ours.forward_features(x), oracle(stock, x, masks))
    if options:
        y = image(2, 3, 40, 16)
        close(ours.forward_features(y), oracle(stock, y, head_masks(stock, dense(5, 2, 1))))


@cases("name", ["class token", "registers without entry", "distilled", "pre-norm", "no table"])
def test_sincos_is_added_to_the_patches_only(name):
    stock = without_table(build(name))
    ours = vispe.convert(copy.deepcopy(stock), "sincos2d")
    d = 8
    rates = 10000.0 ** -(torch.arange(d) / d)
    rows = [
        torch.cat([(y * rates).sin(), (y * rates).cos(), (x * rates).sin(), (x * rates).cos()])
        for y in range(3)
        for x in range(5)
    ]
    extra = torch.cat([torch.zeros(stock.num_prefix_tokens, 32), torch.stack(rows)])[None]
    x = image()
    expected, actual = oracle(stock, x, [None] * 2, extra), ours.forward_features(x)
    close(actual, expected)
    close(grads(ours, actual), grads(stock, expected))


def test_the_learned_table_is_trained_like_that_of_timm():
    stock = tiny(no_embed_class=True)
    ours = vispe.convert(copy.deepcopy(stock), "learned")
    with torch.no_grad():
        ours.pos_enc.weight.copy_(stock.pos_embed)
    x = image()
    expected, actual = stock(x), ours(x)
    close(actual, expected)
    actual_grads, expected_grads = grads(ours, actual, "none"), grads(stock, expected, "none")
    close(actual_grads.pop("pos_enc.weight"), expected_grads.pop("pos_embed"))
    close(actual_grads, expected_grads)


@cases("name", ["registers", "registers without entry", "distilled", "dynamic"])
def test_keep_abs_keeps_the_table_alongside_the_bias(name):
    stock = build(name)
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d", keep_abs=True)
    x = image()
    expected = oracle(stock, x, head_masks(stock, dense(3, 5, stock.num_prefix_tokens)))
    actual = ours.forward_features(x)
    close(actual, expected)
    close(grads(ours, actual, "none"), grads(stock, expected, "none"))
    same = vispe.convert(copy.deepcopy(stock), "learn+alibi2d")
    assert torch.equal(same.forward_features(x), actual)


@cases(("height", "width"), [(24, 40), (40, 24), (16, 56), (19, 33)])
def test_padded_dynamic_sizes(height, width):
    stock = without_table(build("dynamic, padded"))
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    x = image(2, 3, height, width)
    masks = head_masks(stock, dense(-(-height // 8), -(-width // 8), 1))
    close(ours.forward_features(x), oracle(stock, x, masks))


MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit")
NAMES = [name for module in MODULES for name in timm.list_models(module=module)]


@cases("third", range(3))
def test_every_registered_architecture_converts_and_runs(third):
    names, kinds = NAMES[third::3], set()
    assert len(names) > 50
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name, depth=1, weight_init="skip", num_classes=0)
            stock, keys = type(model), set(model.state_dict())
            assert stock in (VisionTransformer, VisionTransformerDistilled)
            for spec in ("learned", "none", "sincos2d", "alibi2d(slopes=learned)", "alibi2d"):
                vispe.convert(model, spec)
                assert isinstance(model, stock)
                new = set(model.state_dict()) - keys
                has_parameters = spec in ("learned", "alibi2d(slopes=learned)")
                assert all("pos_enc." in key for key in new)
                assert bool(new) == has_parameters, (name, spec)
        kind = re.sub(r"\d+", "", repr(model))  # one run for each structure of modules
        if kind not in kinds:
            out = model.forward_features(torch.empty(1, 3, *model.patch_embed.img_size, device="meta"))
            tokens = model.patch_embed.num_patches + model.num_prefix_tokens
            assert out.shape == (1, tokens, model.embed_dim)
        kinds.add(kind)
        vispe.restore(model)
        assert type(model) is stock
        assert set(model.state_dict()) == keys
    assert len(kinds) > 5


def test_every_architecture_of_the_two_classes_is_tested():
    assert len(NAMES) == len(set(NAMES)) >= 150
    assert {"deit_tiny_distilled_patch16_224", "vit_base_r50_s16_224", "vit_xsmall_patch16_clip_224"} <= set(
        NAMES
    )


READERS = [n for n in vispe.list_encodings(ndim=2) if encoding_class(n).reads_tokens]


@cases("name", READERS)
def test_encodings_that_read_tokens_in_differential_attention(name):
    """Its heads have half the width of the tokens."""
    model = timm.create_model(
        "vit_dwee_patch16_reg1_gap_256", pos_embed=name, depth=2, embed_dim=48, num_heads=3, img_size=64
    )
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing
