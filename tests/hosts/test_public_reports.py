"""Situations that users of other libraries reported, reproduced with converted models, with the correct result."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from safetensors.torch import load_file

import vispe
from tests.cases import cases
from tests.hosts.helpers import image
from vispe.cli.main import main

IMAGE_SIZE = 64


def small(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 0}
    return timm.create_model(name, **shape, **options).eval()


def moved(model: torch.nn.Module, name: str = "pos_enc", share: float = 0.3) -> torch.nn.Module:
    """Change the parameters of an encoding from their initial values, where biases are 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name in key:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * share)
    return model


@cases(("spec", "how"), [("rope_axial", {}), ("rope_mixed", {}), ("alibi2d", {"keep_rope": True})])
def test_rope_keeps_bfloat16_activations(spec, how):
    """pytorch-image-models#2794: rotations promoted bf16 to fp32; angles are still computed in fp32."""
    model = small("vit_small_patch16_rope_224", img_size=IMAGE_SIZE, dynamic_img_size=True)
    vispe.convert(model, spec, **how)
    half = copy.deepcopy(model).bfloat16()
    dtypes = []
    for block in half.blocks:
        block.attn.proj.register_forward_hook(lambda module, args, out: dtypes.append(args[0].dtype))
    x = image(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    with torch.no_grad():
        reference, actual = model(x), half(x.bfloat16())
    assert dtypes == [torch.bfloat16] * 2
    assert actual.dtype == torch.bfloat16
    error = (actual.float() - reference).norm() / reference.norm()
    assert error < 2e-2


@cases("size", [(64, 160), (160, 64)])
def test_axis_order_of_pe_core(size):
    """pytorch-image-models#2541: axes were swapped on grids that are not square."""
    torch.manual_seed(0)
    model = timm.create_model("vit_pe_core_tiny_patch16_384", img_size=size, num_classes=0).eval()
    x = image(2, 3, *size)
    with torch.no_grad():
        expected = model(x)
        actual = vispe.convert(model, "rope_axial.pe", keep_abs=True)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@cases("spec", ["alibi2d", "rope_mixed", "rope_dinov3", "rpb", "irpe", "sincos2d", "fourier"])
def test_models_from_the_meta_device_are_equal_or_rejected(spec):
    """transformers#45902: buffers were garbage after to_empty and load_state_dict."""
    x = image(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    options = {"img_size": IMAGE_SIZE, "class_token": True}
    ordinary = moved(vispe.convert(small("vit_tiny_patch16_224", **options), spec))
    with torch.device("meta"):
        empty = vispe.convert(small("vit_tiny_patch16_224", **options), spec)
    empty.to_empty(device="cpu")
    for module in empty.modules():  # what to_empty leaves is arbitrary
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and f"{name}" in ordinary.state_dict():
                buffer.fill_(float("nan"))
    empty.load_state_dict(ordinary.state_dict())
    with torch.no_grad():
        assert torch.equal(empty(x), ordinary(x))


def test_slide_coordinates_do_not_depend_on_the_offset():
    """STAMP#148, TITAN#39: coordinates of patches of a slide, in pixels, with gaps and a large offset."""
    torch.manual_seed(0)
    layer = vispe.Attention(64, 4, "alibi2d").eval()
    h, w = 24, 21
    remaining = torch.randperm(h * w, generator=torch.Generator().manual_seed(1))[:420].sort().values
    rows, columns = remaining // w, remaining % w
    cells = torch.stack([rows, columns], 1)
    pixels = 512.0 * cells[None].double()
    cell, extent = torch.tensor([[512.0, 512.0]]).double(), torch.tensor([[512.0 * h, 512.0 * w]]).double()
    x = torch.randn(1, 420, 64)
    with torch.no_grad():
        expected = layer(x, vispe.Positions(pixels, extent=extent, cell=cell))
        actual = layer(x, vispe.Positions(pixels + 1e6, extent=extent, cell=cell))
        grid = layer(x, vispe.Grid((h, w)).positions().gather(remaining[None]))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected, grid, rtol=1e-5, atol=1e-5)


@cases(("spec", "how"), [("rope_dinov3", {}), ("alibi2d", {"keep_rope": True})])
def test_the_error_of_bfloat16_does_not_grow_with_the_grid(spec, how):
    """dinov3#181: bf16 was much worse than fp32 at 512 x 1024."""
    model = small("vit_small_patch16_dinov3")
    vispe.convert(model, spec, **how)
    half = copy.deepcopy(model).bfloat16()
    errors = []
    for size in ((128, 128), (256, 512)):
        x = image(1, 3, *size)
        with torch.no_grad():
            reference = model.forward_features(x)
            actual = half.forward_features(x.bfloat16()).float()
            with torch.autocast("cpu", torch.bfloat16):
                cast = model.forward_features(x).float()
        errors.append([float((y - reference).norm() / reference.norm()) for y in (actual, cast)])
    for small_grid, large_grid in zip(*errors, strict=True):
        assert large_grid < 1.5 * small_grid
        assert large_grid < 5e-2


VIDEO = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 16, "tubelet_size": 2,
    "pred_hidden_size": 48, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1,
}  # fmt: skip


def jepa(frames: int, side: int) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    torch.manual_seed(0)
    config = transformers.VJEPA2Config(frames_per_clip=frames, crop_size=side, **VIDEO)
    return transformers.VJEPA2Model(config).eval()


@cases("spec", ["alibi3d", "rope_axial"])
@cases(("frames", "side"), [(8, 64), (32, 64), (16, 96)])
def test_videos_of_another_length_equal_a_model_built_for_it(spec, frames, side):
    """vjepa2#68: frames and sizes other than those of the configuration were counted wrongly."""
    model = vispe.convert(jepa(16, 64), spec)
    built = vispe.convert(jepa(frames, side), spec)
    built.load_state_dict(model.state_dict())
    video = torch.randn(1, frames, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual = model(video, skip_predictor=True).last_hidden_state
        expected = built(video, skip_predictor=True).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_windowed_dino_of_rf_detr_is_exact_or_rejected_before_any_change():
    """rf-detr#398, #948, #964: windows of a grid that is not square."""
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    if not hasattr(transformers, "RfDetrConfig"):
        pytest.skip("this transformers has no RF-DETR")
    torch.manual_seed(0)
    backbone = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_windows": 2}
    config = transformers.RfDetrConfig()
    kind = type(config.backbone_config)
    config = transformers.RfDetrConfig(
        backbone_config=kind(**backbone, out_features=["stage2"]), d_model=32, num_queries=5, decoder_layers=1,
        encoder_layers=1, decoder_attention_heads=2,
    )  # fmt: skip
    model = transformers.RfDetrModel(config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(vispe.errors.VispeError, match="RfDetr"):
        vispe.convert(model, "alibi2d")
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@cases(("spec", "how"), [("alibi2d", {}), ("rpb", {}), ("alibi2d", {"keep_abs": True})])
@cases("size", [(96, 64), (192, 96), (96, 32)])
def test_swin_unetr_in_two_dimensions_at_any_size(spec, how, size):
    """MONAI#4693, #8300: SwinUNETR in 2D at sizes that are not square."""
    monai = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    torch.manual_seed(0)
    model = monai.SwinUNETR(in_channels=1, out_channels=2, spatial_dims=2, feature_size=12).eval()
    x = image(1, 1, *size)
    with torch.no_grad():
        expected = model(x)
        actual = vispe.convert(model, spec, **how)(x)
    assert actual.shape == expected.shape == (1, 2, *size)
    assert bool(actual.isfinite().all())
    assert not torch.equal(actual, expected)


def test_released_mixed_frequencies_of_another_grid_load(tmp_path):
    """rope-vit#31: freqs_t_x and freqs_t_y of 224 px did not load into a model of 384 px."""
    kinds = {"img_size": 64, "dynamic_img_size": True}
    model = moved(vispe.convert(small("vit_tiny_patch16_224", **kinds), "rope_mixed"))
    state = model.state_dict()
    # per axis and pair of channels
    layers = [state.pop(f"blocks.{i}.attn.pos_enc.freqs").flatten(1) for i in range(2)]
    released = {**state, "freqs": torch.stack(layers, 1)}
    released |= {"freqs_t_x": torch.arange(16.0) % 4, "freqs_t_y": torch.arange(16.0) // 4}
    torch.save({"model": released}, tmp_path / "old.pth")

    words = [
        "convert-weights",
        str(tmp_path / "old.pth"),
        str(tmp_path / "new.safetensors"),
        "--num-heads",
        "4",
    ]
    assert main(words) == 0
    weights = load_file(tmp_path / "new.safetensors")
    larger = vispe.convert(small("vit_tiny_patch16_224", img_size=96, dynamic_img_size=True), "rope_mixed")
    larger.load_state_dict(weights, strict=True)
    x = image(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(larger(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_sine_positions_preserve_half_precision(compiled):
    """transformers#47238, #47228: tables of sines in half precision, compiled."""
    model = small("vit_tiny_patch16_224", img_size=IMAGE_SIZE, pos_embed="sincos2d").bfloat16()
    x = image(1, 3, IMAGE_SIZE, IMAGE_SIZE).bfloat16()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        assert run(x).dtype == torch.bfloat16
