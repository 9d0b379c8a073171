"""Patch kernels and features averaged over the poses of D4: which models become exactly equivariant."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.naflexvit import NaFlexVitCfg

import vispe
from tests.cases import cases
from tests.hosts.helpers import shake
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.images.symmetry import D4Features, d4_average, patch_kernel, symmetrize
from vispe.images.symmetry.d4 import D4, IDENTITY, element

SHAPE = {"img_size": 35, "patch_size": 7, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 0}
FEW = (element("rot90"), element("transpose"))
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


def vit(spec="none", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = VisionTransformer(**{**SHAPE, "dynamic_img_size": True, **options}, global_pool="")
    return shake(vispe.convert(model, spec)).to(dtype).eval()


def maps(model):
    return lambda x: model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)[-1]


def prefixes(model):
    def features(x):
        result = model.forward_intermediates(x, indices=1, return_prefix_tokens=True, intermediates_only=True)
        return result[-1][1]

    return features


@torch.no_grad()
def error(features, images, poses=tuple(g for g in D4 if g != IDENTITY)):
    """Return the centred equivariance error of the worst pose: 0 is exact, 1.4 means unrelated features."""
    reference = features(images)
    signal = (reference - reference.mean((-2, -1), keepdim=True)).square().sum()
    return max(
        float(((g.undo(features(g.apply(images))) - reference).square().sum() / signal).sqrt()) for g in poses
    )


def image(h, w, dtype=torch.float32, b=2):
    return torch.randn(b, 3, h, w, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 4}, {"class_token": False}], ids=str)
@pytest.mark.parametrize(
    "spec",
    ["none", "alibi2d", "alibi2d(wrap=false,normalize=none,slopes=geometric)", "alibi2d(metric=manhattan)"],
)
def test_isotropic_positions_with_a_symmetric_kernel_are_equivariant(spec, options, dtype):
    model = symmetrize(vit(spec, dtype, **options))
    for size in ((35, 35), (28, 42)):
        images = image(*size, dtype)
        assert error(maps(model), images) < EXACT[dtype]
        if model.num_prefix_tokens:
            tokens = [prefixes(model)(g.apply(images)).detach() for g in D4]
            scale = tokens[0].square().mean().sqrt()
            assert max(float((t - tokens[0]).abs().max() / scale) for t in tokens) < 5 * EXACT[dtype]


@cases("spec", ["none", "alibi2d"])
def test_an_ordinary_kernel_is_not_equivariant(spec):
    assert error(maps(vit(spec, torch.float64)), image(35, 35, torch.float64)) > 0.1


@cases("spec", ["learn", "rope_axial", "rope_mixed", "sincos2d"])
def test_anisotropic_positions_are_not_equivariant(spec):
    model = symmetrize(vit(spec, torch.float64))
    assert patch_kernel(model).asymmetry == 0
    assert error(maps(model), image(35, 35, torch.float64)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("spec", ["learn", "rope_axial", "alibi2d"])
def test_the_mean_over_poses_is_equivariant_for_every_model(spec, dtype):
    model = vit(spec, dtype, reg_tokens=1)
    averaged = D4Features(maps(model), patch_size=7)
    for size in ((35, 35), (28, 42)):
        assert error(averaged, image(*size, dtype), FEW) < EXACT[dtype]


@cases("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_symmetrized_kernel_is_the_mean_and_exactly_symmetric(dtype):
    model = vit(dtype=dtype)
    old_state = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        images = image(35, 35, dtype)
        model(images)
    assert symmetrize(model) is model
    new_state = model.state_dict()
    assert [k for k in old_state if not torch.equal(old_state[k], new_state[k])] == [
        "patch_embed.proj.weight"
    ]
    old, new = old_state["patch_embed.proj.weight"], new_state["patch_embed.proj.weight"]
    assert new.dtype == dtype
    expected = torch.stack([g.apply(old.double()) for g in D4]).mean(0)
    torch.testing.assert_close(new.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert all(torch.equal(g.apply(new), new) for g in D4)
    symmetrize(model)
    assert torch.equal(model.patch_embed.proj.weight, new)
    assert model.patch_embed.proj.weight.requires_grad


def test_symmetrize_logs_the_change(caplog):
    model = vit()
    old = model.patch_embed.proj.weight.detach().double()
    mean = torch.stack([g.apply(old) for g in D4]).mean(0)
    result = patch_kernel(model)
    assert (result.path, result.side) == ("patch_embed.proj.weight", 7)
    assert result.asymmetry == pytest.approx(float(1 - mean.square().sum() / old.square().sum()), rel=1e-9)
    assert torch.equal(model.patch_embed.proj.weight.double(), old)
    with caplog.at_level(logging.INFO, logger="vispe.images.symmetry.symmetrization"):
        symmetrize(model)
    assert f"patch_embed.proj.weight was averaged over 8 poses; {result.asymmetry:.3g} of its" in caplog.text
    assert patch_kernel(model).asymmetry == 0


def test_symmetrize_supports_eva():
    torch.manual_seed(0)
    model = Eva(
        **{**SHAPE, "embed_dim": 32},
        use_rot_pos_emb=True,
        use_abs_pos_emb=False,
        global_pool="",
        dynamic_img_size=True,
    )
    model = shake(vispe.convert(model, "alibi2d")).double().eval()
    images = image(28, 42, torch.float64)
    assert error(maps(model), images) > 0.1
    assert error(maps(symmetrize(model)), images) < 1e-12


@cases("kind", ["linear", "linear, normed", "linear, channels first", "conv"])
def test_symmetrize_supports_naflex(kind):
    torch.manual_seed(0)
    cfg = NaFlexVitCfg(
        embed_dim=32,
        depth=2,
        num_heads=4,
        patch_size=4,
        embed_proj_type=kind.partition(",")[0],
        patchify_channels_last="first" not in kind,
        pos_embed="none",
        class_token=True,
        reg_tokens=2,
        input_norm_layer="normed" in kind or None,
        norm_layer="layernorm",
    )
    model = shake(NaFlexVit(cfg, num_classes=0, global_pool="")).double().eval()
    images = image(12, 20, torch.float64)
    assert error(maps(model), images) > 0.1
    path = patch_kernel(model).path
    assert path == "embeds.proj.weight"
    assert error(maps(symmetrize(model)), images) < 1e-12


@cases("complete", [True, False])
def test_symmetrize_supports_open_clip(complete):
    pytest.importorskip("open_clip")
    from tests.hosts.open_clip.common import tiny_clip

    model = tiny_clip(image_size=24).double()
    tower = model.visual
    vispe.convert(tower, "alibi2d")
    images = image(24, 24, torch.float64)

    def features(x):
        return tower.forward_intermediates(x, indices=1, normalize_intermediates=True)["image_intermediates"][
            -1
        ]

    assert error(features, images) > 0.1
    arguments = model if complete else tower
    assert patch_kernel(arguments).path == ("visual.conv1.weight" if complete else "conv1.weight")
    assert symmetrize(arguments) is arguments
    assert error(features, images) < 1e-12


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@cases(
    ("name", "path"),
    [
        ("CLIPVision", "embeddings.patch_embedding.weight"),
        ("SiglipVision", "embeddings.patch_embedding.weight"),
        ("Dinov2", "embeddings.patch_embeddings.projection.weight"),
        ("DINOv3ViT", "embeddings.patch_embeddings.weight"),
        ("Aimv2Vision", "embeddings.patch_embed.weight"),
        ("Qwen2VL", "visual.patch_embed.proj.weight"),
        ("Llava", "vision_tower.embeddings.patch_embedding.weight"),
    ],
)
def test_symmetrize_supports_transformers(name, path):
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    torch.manual_seed(0)
    if name in ("Qwen2VL", "Llava"):
        from tests.hosts.transformers.tiny import config

        model = getattr(transformers, f"{name}Model")(config("qwen2_vl" if name == "Qwen2VL" else "llava"))
    else:
        options = {**SMALL, "image_size": 12, "patch_size": 4}
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    model = model.double().eval()
    actual = patch_kernel(model)
    assert actual.path == path
    assert actual.side == 4
    assert actual.asymmetry > 0.5
    expected = model.get_parameter(path).detach().clone()
    expected = torch.stack([g.apply(expected) for g in D4]).mean(0)
    symmetrize(model)
    torch.testing.assert_close(model.get_parameter(path).detach(), expected, rtol=0, atol=1e-15)
    if name in ("CLIPVision", "Dinov2"):
        embeddings = model.embeddings
        table = (
            embeddings.position_embedding.weight if name == "CLIPVision" else embeddings.position_embeddings
        )
        table.data.zero_()
        images = image(12, 12, torch.float64)

        def features(x):
            return model(pixel_values=x).last_hidden_state[:, 1:].mT.unflatten(2, (3, 3))

        assert error(features, images) < 1e-12


def test_models_without_a_single_square_projection_raise():
    with pytest.raises(UnsupportedHost, match="Linear must have exactly one patch projection, got none"):
        symmetrize(torch.nn.Linear(3, 4))
    model_list = torch.nn.ModuleList([vit(), vit()])
    with pytest.raises(UnsupportedHost, match=r"got 2 \(0.patch_embed.proj, 1.patch_embed.proj\)"):
        symmetrize(model_list)
    with pytest.raises(ShapeError, match=r"proj must have square patches, got 4 x 7 pixels"):
        symmetrize(vit(img_size=(28, 28), patch_size=(4, 7)))
    model = vit()
    model.patch_embed.proj = torch.nn.Conv2d(3, 32, 7, stride=4, padding=2)
    with pytest.raises(UnsupportedHost, match=r"kernel \(7, 7\), stride \(4, 4\), padding \(2, 2\)"):
        symmetrize(model)
    with torch.device("meta"):
        empty = VisionTransformer(**SHAPE)
    with pytest.raises(UnsupportedHost, match="got meta"):
        symmetrize(empty)


def asymmetric_features(x):
    """Return features without symmetry: a random linear projection of each 4 x 4 patch plus its row index."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64).to(x)
    out = torch.nn.functional.conv2d(x, kernel, stride=4)
    return out + torch.arange(out.shape[2]).to(x)[:, None]


def test_d4_average_is_the_mean_over_poses_and_not_in_place():
    images = image(12, 20, torch.float64)
    expected = torch.stack([g.undo(asymmetric_features(g.apply(images))) for g in D4]).mean(0)
    torch.testing.assert_close(
        d4_average(asymmetric_features, images, patch_size=4), expected, rtol=0, atol=1e-12
    )
    original = images.clone()
    torch.testing.assert_close(d4_average(lambda x: x, images, patch_size=1), original, rtol=0, atol=1e-12)
    assert torch.equal(images, original)


def test_gradients_of_the_mean_over_poses():
    model = vit("alibi2d", torch.float64)
    averaged = D4Features(model.patch_embed.proj, patch_size=7)
    images = image(28, 35, torch.float64).requires_grad_()
    out = averaged(images)
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    result = torch.autograd.grad(out, [images, *averaged.parameters()], cotangent)
    expected = torch.stack([g.undo(model.patch_embed.proj(g.apply(images))) for g in D4]).mean(0)
    for a, b in zip(
        result, torch.autograd.grad(expected, [images, *averaged.parameters()], cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@cases("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    images = image(12, 20).to(dtype)
    actual = d4_average(asymmetric_features, images, patch_size=4)
    expected = torch.stack([g.undo(asymmetric_features(g.apply(images))).float() for g in D4]).mean(0)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_features_of_a_pose_are_freed_before_the_next_pose():
    references, live_counts = [], []

    def features(x):
        live_counts.append(sum(ref() is not None for ref in references))
        array = asymmetric_features(x).numpy().copy()
        references.append(weakref.ref(array))
        return torch.from_numpy(array)

    d4_average(features, image(12, 20), patch_size=4)
    assert live_counts == [0] * 8


@pytest.mark.slow
@pytest.mark.parametrize(("size", "grid"), [((37, 30), (5, 4)), ((30, 43), (4, 7)), ((33, 40), (5, 6))])
@pytest.mark.parametrize("spec", ["learn", "none"])
def test_remainders_are_centred(spec, size, grid):
    """Patches of 7: an even remainder is cropped, an odd one padded, equally on both sides."""
    model = vit(spec, torch.float64)
    images = image(*size, torch.float64)
    averaged = D4Features(maps(model), patch_size=7, fit="auto")
    assert averaged(images).shape[-2:] == grid
    assert error(averaged, images, FEW) < 1e-12


def test_fit_crop_is_centred_and_fit_pad_rounds_up():
    images = image(14, 22, torch.float64)
    result = d4_average(asymmetric_features, images, patch_size=4, fit="crop")
    assert torch.equal(result, d4_average(asymmetric_features, images[:, :, 1:13, 1:21], patch_size=4))
    padded = d4_average(asymmetric_features, images, patch_size=4, fit="pad")
    assert padded.shape == (2, 5, 4, 6)


def test_cropping_one_side_breaks_equivariance():
    """Features that drop the remainder at the bottom right shift relative to the image."""
    model = symmetrize(vit("none", torch.float64))
    conv = model.patch_embed.proj
    images = image(37, 37, torch.float64)
    assert error(conv, images) > 0.1
    assert error(conv, images[:, :, 1:36, 1:36]) < 1e-12


def test_patch_size_defaults_to_that_of_the_features():
    class FeaturesWithPatchSize(torch.nn.Module):
        patch_size = 4

        def forward(self, x):
            return asymmetric_features(x)

    averaged = D4Features(FeaturesWithPatchSize(), fit="crop")
    assert averaged.patch_size == 4
    assert averaged(image(14, 20)).shape == (2, 5, 3, 5)
    with pytest.raises(ShapeError, match=r"multiples of patch_size=4 px, got \(14, 20\)\. Use fit='auto'"):
        d4_average(FeaturesWithPatchSize(), image(14, 20))


def test_invalid_arguments_of_d4_average_raise():
    with pytest.raises(OptionError, match="fit='crop' needs the patch size"):
        d4_average(asymmetric_features, image(12, 20), fit="crop")
    with pytest.raises(OptionError, match=r"patch_size must be a positive integer .* got 0"):
        D4Features(asymmetric_features, patch_size=0)
    with pytest.raises(ShapeError, match=r"needs images \(b, c, H, W\), got \(3, 12, 20\)"):
        d4_average(asymmetric_features, image(12, 20)[0])
    with pytest.raises(ShapeError, match=r"Features must be maps \(b, c, h, w\), got \(2,\)"):
        d4_average(lambda x: x.mean((1, 2, 3)), image(12, 20))
    with pytest.raises(ShapeError, match=r"must have \(12, 20\) cells in pose identity, got \(12, 12\)"):
        d4_average(lambda x: x[..., :12, :12], image(12, 20), patch_size=1)
    with pytest.raises(ShapeError, match=r"must have \(3, 12\) cells in pose rot90, got \(20, 3\)"):
        d4_average(lambda x: x[..., :3, :], image(20, 12))
    with pytest.raises(OptionError, match="cannot be centred by whole pixels"):
        d4_average(asymmetric_features, image(13, 20), patch_size=4, fit="auto")
