"""Prefix tokens that enter after the first blocks: implementation by masks, and unsupported hosts."""

import open_clip
import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor

import vispe
from tests.hosts.helpers import shake
from vispe import Attention
from vispe.errors import OptionError, UnsupportedCombination

SPEC = "gpsa(layers=[0,1],late_prefix=true)"
SIZES = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}


def built(spec=SPEC, **options):
    torch.manual_seed(0)
    return shake(timm.create_model("vit_tiny_patch16_224", pos_embed=spec, **SIZES, **options)).eval()


def image():
    return torch.randn(2, 3, 24, 40)


@pytest.mark.parametrize("prefix", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_prefix_tokens_skip_the_first_blocks(prefix):
    model, x = built(**prefix), image()
    p = model.num_prefix_tokens
    recorded = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, sample, out: recorded.append((sample[0], out)))
    model.forward_features(x)
    assert [sample.shape[1] for sample, _ in recorded] == [15, 15, 15 + p, 15 + p]
    entering = recorded[2][0]
    torch.testing.assert_close(entering[:, p:], recorded[1][1], rtol=0, atol=0)
    if p:
        first = [model.cls_token, model.reg_token] if "reg_tokens" in prefix else [model.cls_token]
        assert torch.equal(entering[:, :p], torch.cat(first, 1).expand(2, -1, -1))
        # without class and registers in them the first blocks are those of a model that has none
        without_prefix = built(class_token=False, global_pool="avg")
        without_prefix.load_state_dict(model.state_dict(), strict=False)
        torch.testing.assert_close(without_prefix.forward_intermediates(x, intermediates_only=True)[1],
                                   model.forward_intermediates(x, intermediates_only=True)[1])  # fmt: skip


def test_checkpointed_traced_unfused_and_masked_outputs_are_equal():
    model, x = built(), image()
    plain = model(x)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), plain)
    model.set_grad_checkpointing(False)
    traced = create_feature_extractor(model, ["norm"])
    torch.testing.assert_close(traced(x)["norm"], model.forward_features(x))
    # a mask that closes nothing, of pairs and of keys
    for mask in (torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 1, 16)):
        torch.testing.assert_close(model.forward_features(x, attn_mask=mask), model.forward_features(x))
    closed = torch.zeros(2, 1, 1, 16)
    closed[..., -1] = -torch.inf
    modified = torch.where(torch.arange(40) >= 32, 9.0, x)  # the last column of patches
    modified = torch.where(torch.arange(24)[:, None] >= 16, modified, x)
    ours, other = (model.forward_features(one, attn_mask=closed)[:, :-1] for one in (x, modified))
    torch.testing.assert_close(ours, other)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(x), plain)


def test_dropped_patches_keep_their_positions():
    model, x = built(patch_drop_rate=0.4).train(), image()
    model.patch_drop.ordered = True
    assert model(x).isfinite().all()
    grads = torch.autograd.grad(model(x).square().sum(), model.blocks[1].attn.pos_enc.pos_proj.weight)
    assert grads[0].abs().sum() > 0


@pytest.mark.slow
def test_compiled():
    model, x = built(), image()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))


def test_a_model_is_rebuilt_from_its_saved_spec(tmp_path):
    model, x = built(), image()
    rebuilt = timm.create_model("vit_tiny_patch16_224", **{**SIZES, "pos_embed": model.vispe.saved})
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt.eval()(x), model(x))


def test_unsupported_hosts():
    sentence = "gpsa needs prefix tokens that enter at block 2, which .* Convert a plain ViT"
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
    with pytest.raises(UnsupportedCombination, match=sentence):
        timm.create_model("eva02_tiny_patch14_224", pos_embed=SPEC, **sizes)
    tower = open_clip.transformer.VisionTransformer(32, 8, 32, 4, 4, 2.0)
    with pytest.raises(UnsupportedCombination, match=sentence):
        vispe.convert(tower, SPEC)
    layer = Attention(32, 4, "gpsa(layers=[0],late_prefix=true)")
    assert layer(torch.ones(1, 6, 32), (2, 3)).shape == (1, 6, 32)
    with pytest.raises(UnsupportedCombination, match="allows no prefix token in block 0, got 1"):
        layer(torch.ones(1, 7, 32), vispe.Grid((2, 3), 1))
    with pytest.raises(OptionError, match="late_prefix=true needs layers, the blocks"):
        vispe.create_encoding("gpsa(late_prefix=true)", num_heads=4)
