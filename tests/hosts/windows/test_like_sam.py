"""Encoders derived from SAM's, and the encoder of SAM 3, which rotates queries and keys."""

import copy
import inspect
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import shake
from tests.hosts.windows.common import _sam_of_transformers, build, image, run
from tests.hosts.windows.test_windows import close
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.windows.model_table import LIKE_SAM

transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48, "patch_size": 8,
    "window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 48,
}  # fmt: skip
MORE = {
    "deepseek_ocr2": {"downsample_channels": [24, 32]},
    "unlimited_ocr": {"downsample_channels": [24, 32]},
    "pp_formulanet": {
        "post_conv_in_channels": 16,
        "post_conv_mid_channels": 24,
        "post_conv_out_channels": 32,
    },
}


def encoder(name):
    """Return a random encoder in double precision, by the full name of its class."""
    module, _, kind = name.rpartition(".")
    actual = getattr(pytest.importorskip(module, reason="this transformers does not have it"), kind)
    torch.manual_seed(0)
    # config_class of older versions is the configuration of the complete model
    kind = inspect.signature(actual.__init__).parameters["config"].annotation
    config = kind(**SHAPE, **MORE.get(module.split(".")[2], {}))
    return shake(actual(config)).double().eval()


@cases("name", sorted(LIKE_SAM))
def test_derived_encoders_support_the_encodings_of_sam(name):
    stock, x = encoder(name), image("hub_sam")
    model, before = copy.deepcopy(stock), run(stock, x)
    vispe.convert(model, "none+learn")
    close(run(model, x), before)  # some round their softmax to float32
    vispe.convert(model, "decomposed")
    model.load_state_dict(stock.state_dict())  # a stock checkpoint brings the tables of the encoding
    with torch.no_grad():
        stock.pos_embed.zero_()
    close(run(model, x), run(stock, x))
    assert run(model, image("hub_sam", (40, 72))).isfinite().all()
    vispe.restore(model)
    assert torch.equal(run(model, x), before)


def test_the_encoder_of_a_complete_model_is_converted():
    config = transformers.SamHQConfig(
        vision_config={**SHAPE, "image_size": 64, "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8},
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "iou_head_hidden_dim": 16, "vit_dim": 32,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = shake(transformers.SamHQModel(config)).eval()
    sample = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.tensor([[[[10.0, 20.0]]]])}
    before = model(**sample).pred_masks
    vispe.convert(model, "alibi2d(slopes=learned)")
    assert (model(**sample).pred_masks - before).abs().max() > 1e-3
    vispe.restore(model)
    assert torch.equal(model(**sample).pred_masks, before)


def test_sam2_is_rejected_with_a_suggestion():
    with torch.device("meta"):
        model = transformers.Sam2VisionModel(transformers.Sam2VisionConfig())
    for one in (model, model.backbone):
        with pytest.raises(
            UnsupportedHost, match=r"create_model\('samvit_base_patch16', pos_embed='alibi2d'\)"
        ):
            vispe.convert(one, "alibi2d")


def test_the_rotation_of_sam3_is_optional():
    model, x = build("hub_sam3"), image("hub_sam3")
    before = run(model, x)
    vispe.convert(model, "alibi2d+learn+rope")
    both = run(model, x)
    assert (both - before).abs().max() > 1e-3
    assert "own rotary embedding: in use" in vispe.describe(model)
    with pytest.raises(UnsupportedCombination, match="two rotary encodings"):
        vispe.convert(model, "rope_axial+rope")
    vispe.convert(model, "alibi2d+learn")
    assert (run(model, x) - both).abs().max() > 1e-3
    assert "own rotary embedding: removed" in vispe.describe(model)
    vispe.convert(model, "alibi2d+learn+rope")  # it comes back
    assert torch.equal(run(model, x), both)
    vispe.restore(model)
    assert torch.equal(run(model, x), before)


def test_sam3_is_saved_and_loaded_and_returns_attention_weights(tmp_path):
    model, x = build("hub_sam3").float(), image("hub_sam3").float()
    vispe.convert(model, "alibi2d(slopes=learned)")
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    reloaded = vispe.from_pretrained(transformers.Sam3ViTModel, tmp_path).eval()
    close(run(reloaded, x), run(model, x), 1e-6)
    complete = transformers.Sam3VisionModel(
        transformers.Sam3VisionConfig(
            backbone_config=model.config.to_dict(), fpn_hidden_size=16, num_pos_feats=8
        )
    ).eval()
    vispe.convert(complete, "alibi2d")
    assert "Sam3ViTModel" in vispe.describe(complete)
    reloaded.set_attn_implementation("eager")
    out = reloaded(x, output_attentions=True)
    close(out.last_hidden_state, run(model, x), 1e-5)
    close(out.attentions[1].sum(-1), torch.ones(out.attentions[1].shape[:-1]), 1e-5)


@cases("kind", ["sam", "sam3", "swin", "vitdet"])
def test_returned_weights_are_part_of_the_graph(kind):
    model, x = build(f"hub_{kind}").train(), image(f"hub_{kind}")
    if kind == "sam":
        torch.manual_seed(0)
        model = shake(_sam_of_transformers("eager")).double().train()
    elif kind != "vitdet":
        model.set_attn_implementation("eager")
    vispe.convert(model, "alibi2d(slopes=learned)")
    out = model(x, output_attentions=True)
    assert len(out.attentions) > 1
    for weights in out.attentions:
        weights.retain_grad()
    out.last_hidden_state.square().sum().backward()
    assert all(weights.grad.abs().max() > 0 for weights in out.attentions)


def test_the_backbone_of_swin():
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        use_absolute_embeddings=True, out_features=["stage1", "stage2"],
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = shake(transformers.SwinBackbone(config)).eval(), torch.randn(1, 3, 64, 64)
    before = model(x).feature_maps
    vispe.convert(model, "alibi2d(slopes=learned)")
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(model(x).feature_maps, before, strict=True))
    vispe.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model(x).feature_maps, before, strict=True))
