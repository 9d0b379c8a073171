"""Further vision models of transformers: copies of CLIP, AIMv2, TIPSv2, RADIO, Sapiens 2, DPT and ViTPose."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import vispe
from tests.cases import cases
from tests.hosts.helpers import dense, shake
from tests.hosts.transformers.tiny import transformers
from tests.hosts.transformers.vision.oracle import close
from tests.hosts.transformers.vision.vision_models import SHAPE, outputs
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions
from vispe.hosts.transformers.vision.unsupported import REASONS

CLIP = ("ChineseCLIP", "AltCLIP", "CLIPSeg", "MetaClip2", "OwlViT", "Owlv2")
STAGES = {"out_features": ["stage1", "stage2"]}
BACKBONE = {"image_size": [32, 32], "patch_size": [8, 8]}  # its patches are padded by 2 pixels
GROUPS = {"num_attention_heads": 4, "num_key_value_heads_per_layer": [4, 2], "num_register_tokens": 3}
# tower: its prefix tokens, its configuration, and its options
TOWERS = {
    **{f"{name}VisionModel": (1, f"{name}VisionConfig", {}) for name in CLIP},
    "Aimv2VisionModel": (0, "Aimv2VisionConfig", {}),
    "Tipsv2VisionModel": (2, "Tipsv2VisionConfig", {"num_register_tokens": 1}),
    "Tipsv2VisionBackbone": (2, "Tipsv2VisionConfig", {"num_register_tokens": 1, **STAGES}),
    "RadioModel": (3, "RadioConfig", {"max_img_size": 32, "num_cls_tokens": 2, "num_registers": 1}),
    "Sapiens2Model": (4, "Sapiens2Config", GROUPS),
    "Sapiens2Backbone": (4, "Sapiens2Config", GROUPS | STAGES),
    "DPTModel": (1, "DPTConfig", {"is_hybrid": False}),
    "VitPoseBackbone": (0, "VitPoseBackboneConfig", BACKBONE | {"out_features": ["stage1", "stage2"]}),
}
ONE_SIZE = ("Aimv2VisionModel", "VitPoseBackbone")
ON_REQUEST = tuple(f"{name}VisionModel" for name in CLIP)


def build(name):
    """Return a random model, in double precision."""
    _, config, options = TOWERS[name]
    torch.manual_seed(0)
    return (
        shake(getattr(transformers, name)(getattr(transformers, config)(**{**SHAPE, **options})))
        .double()
        .eval()
    )


def inputs(name, height=16, width=16):
    """Return images, with permission to resample the table where a model needs it."""
    generator = torch.Generator().manual_seed(1)
    if name == "VitPoseBackbone":
        height, width = 2 * height, 2 * width
    sample = {"pixel_values": torch.randn(2, 3, height, width, generator=generator).double()}
    other = (height, width) != (16, 16) and name in ON_REQUEST
    return sample | ({"interpolate_pos_encoding": True} if other else {})


def biased(model, biases):
    """Return a stock model without tables whose attention layers add a bias (h, n, n) to their logits."""
    model = copy.deepcopy(model)
    tower = vision_tower_of(model)
    for path, parameter in tower.named_parameters():
        if "position_embedding" in path:
            parameter.data.zero_()
    bias_of = {attention: biases[i] for i, _, attention in attentions(tower)}

    def attend(module, query, key, value, mask, scaling=None, **_):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        logits = query @ key.transpose(2, 3) * scaling + bias_of.get(module, 0)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("written_out", attend)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "written_out"
    return model


@cases("name", TOWERS)
def test_positions_of_the_model_are_retained(name):
    model, sample = build(name), inputs(name)
    before, names = outputs(model, sample), list(model.state_dict())
    rope = name.startswith("Sapiens2")
    vispe.convert(model, "none", keep_abs=not rope, keep_rope=rope)
    for a, b in zip(outputs(model, sample), before, strict=True):
        close(a, b, 1e-12)
    vispe.convert(model, "alibi2d+irpe", keep_abs=False, keep_rope=False)
    assert "alibi2d" in vispe.describe(model)
    after = outputs(model, sample)
    assert max((a - b).abs().max() for a, b in zip(after, before, strict=True)) > 1e-4
    vispe.restore(model)
    assert list(model.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, sample), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TOWERS if "Sapiens2" not in name])
def test_distances_equal_dense_attention(name):
    model = build(name)
    prefix, heads = TOWERS[name][0], 2
    slopes = torch.linspace(0.3, 1.1, 2 * heads).double().view(2, heads)
    stock = model
    model = copy.deepcopy(model)
    vispe.convert(model, "alibi2d(slopes=learned)", keep_abs=False)
    with torch.no_grad():
        for i, _, attention in attentions(vision_tower_of(model)):
            attention.pos_enc.slope.copy_(slopes[i])
    for size in ((16, 16),) if name in ONE_SIZE else ((16, 16), (12, 24)):
        distances = dense(size[0] // 4, size[1] // 4, prefix).double()
        expected = biased(stock, [-distances * s[:, None, None] for s in slopes])
        sample = inputs(name, *size)
        for a, b in zip(outputs(model, sample), outputs(expected, sample), strict=True):
            close(a, b, 1e-6)


@cases("name", ["Sapiens2Model", "Sapiens2Backbone"])
def test_groups_of_heads_with_separate_rotation(name):
    model, sample = build(name), inputs(name, 12, 24)
    distances = dense(3, 6, 4).double()
    slopes = torch.linspace(0.3, 1.1, 8).double().view(2, 4)
    stock = copy.deepcopy(model)
    vispe.convert(model, "alibi2d(slopes=learned)+rope")
    with torch.no_grad():
        for i, _, attention in attentions(vision_tower_of(model)):
            attention.pos_enc.slope.copy_(slopes[i])
    expected = biased(stock, [-distances * s[:, None, None] for s in slopes])
    for a, b in zip(outputs(model, sample), outputs(expected, sample), strict=True):
        close(a, b, 1e-6)


@cases("name", TOWERS)
def test_every_layer_has_a_gradient(name):
    model = build(name)
    vispe.convert(model, "alibi2d(slopes=learned)", keep_abs=False)
    sum(out.square().sum() for out in outputs(model, inputs(name)) if out.requires_grad).backward()
    for _, _, attention in attentions(vision_tower_of(model)):
        assert attention.pos_enc.slope.grad.abs().max() > 0


@cases(
    ("package", "config", "name"),
    [
        ("eomt", "EomtConfig", "EomtForUniversalSegmentation"),
        ("eomt_dinov3", "EomtDinov3Config", "EomtDinov3ForUniversalSegmentation"),
        ("data2vec", "Data2VecVisionConfig", "Data2VecVisionModel"),
        ("x_clip", "XCLIPVisionConfig", "XCLIPVisionModel"),
    ],
)
def test_reasons(package, config, name):
    more = {"num_queries": 3, "num_blocks": 1, "num_upscale_blocks": 1} if "eomt" in package else {}
    model = getattr(transformers, name)(getattr(transformers, config)(**SHAPE, **more))
    with pytest.raises(UnsupportedHost, match=f"{name} {REASONS[package]}"):
        vispe.convert(model, "alibi2d")


def test_packed_images_and_computed_tables_are_refused():
    model = build("RadioModel")
    vispe.convert(model, "alibi2d")
    with pytest.raises(UnsupportedCombination, match="got image_grid_hw"):
        model(torch.randn(16, 48).double(), image_grid_hw=torch.tensor([[4, 4]]))
    native = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**SHAPE, is_native=True))
    with pytest.raises(UnsupportedHost, match=r"got config\.is_native=True"):
        vispe.convert(native, "alibi2d")


@cases(
    "name",
    [
        "DPTForDepthEstimation",
        "VitPoseForPoseEstimation",
        "CLIPSegForImageSegmentation",
        "OwlViTForObjectDetection",
    ],
)
def test_models_with_heads(name):
    model = headed(name)
    vispe.convert(model, "alibi2d")
    tower = vision_tower_of(model)
    assert type(tower).__name__ in vispe.describe(model) or "alibi2d" in vispe.describe(model)
    assert len(list(attentions(tower))) >= 2
    vispe.restore(model)


def headed(name):
    """Return a tiny model with a head."""
    vision = {**SHAPE, "projection_dim": 16}
    text = {k: v for k, v in SHAPE.items() if "size" in k and "image" not in k and "patch" not in k}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100, "projection_dim": 16}
    neck = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "backbone_out_indices": [0, 1, 2, 3]}
    if name.startswith("DPT"):
        config = transformers.DPTConfig(**{**SHAPE, "num_hidden_layers": 4}, **neck, is_hybrid=False)
    elif name.startswith("VitPose"):
        backbone = transformers.VitPoseBackboneConfig(**{**SHAPE, **BACKBONE}, out_indices=[2])
        config = transformers.VitPoseConfig(backbone_config=backbone, num_labels=3)
    elif name.startswith("OwlViT"):
        config = transformers.OwlViTConfig(vision_config=vision, text_config=text, projection_dim=16)
    else:
        head = {"extract_layers": [0, 1], "reduce_dim": 8, "decoder_num_attention_heads": 2}
        config = transformers.CLIPSegConfig(
            vision_config=vision, text_config=text | {"bos_token_id": 0, "eos_token_id": 1}, projection_dim=16,
            decoder_intermediate_size=16, **head,
        )  # fmt: skip
    return getattr(transformers, name)(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["CLIPSegVisionModel", "RadioModel", "Sapiens2Model", "DPTModel", "VitPoseBackbone"]
)
def test_saved_and_loaded(name, tmp_path):
    model = build(name).float()
    sample = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in inputs(name).items()}
    vispe.convert(model, "alibi2d(slopes=learned)", keep_abs=False)
    with pytest.warns(UserWarning, match=r"load it with vispe\.from_pretrained"):
        model.save_pretrained(tmp_path / name)
    reloaded = vispe.from_pretrained(getattr(transformers, name), tmp_path / name).eval()
    assert all(
        torch.equal(a, b) for a, b in zip(outputs(model, sample), outputs(reloaded, sample), strict=True)
    )
