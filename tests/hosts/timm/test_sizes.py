"""Image sizes in practice: registers, rectangles, tables of another grid."""

import io

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from tests.hosts.helpers import close, shake

VIT = {"patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 0}


@cases("spec", ["none", "alibi2d", "sincos2d"])
def test_class_and_register_tokens_train(spec):
    """A DINOv2 with registers at 56 px has 1 + 4 + 16 tokens."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=56, pos_embed=spec, **small)
    tokens = model.forward_features(torch.randn(2, 3, 56, 56))
    assert tokens.shape == (2, 1 + 4 + 16, 48)
    model(torch.randn(2, 3, 56, 56)).square().sum().backward()
    for token in (model.cls_token, model.reg_token):
        assert token.grad.abs().max() > 0


def resampled(values, grid):
    """Return a table (1, 40, d) of 4 x 10 patches on another grid, as resampled by timm."""
    image = values.unflatten(1, (4, 10)).permute(0, 3, 1, 2)
    return F.interpolate(image, grid, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)


@cases("spec", ["learn+alibi2d", "rpb", "learned"])
def test_tables_are_resampled_from_the_true_grid(spec):
    def build(size, **options):
        torch.manual_seed(0)
        return timm.models.VisionTransformer(img_size=size, **VIT, pos_embed=spec, **options).eval()

    model = shake(build((64, 160), dynamic_img_size=True))
    sizes = ((64, 160), (160, 64), (96, 240))
    images = [torch.randn(1, 3, *size) for size in sizes]
    outputs = [model.forward_features(x).detach() for x in images]
    if spec == "learn+alibi2d":
        for x, (h, w) in zip(images, sizes, strict=True):
            table = resampled(model.pos_embed[:, 1:], (h // 16, w // 16))
            patches = model.patch_embed(x).flatten(1, 2)
            close(model._pos_embed(model.patch_embed(x))[:, 1:], patches + table, 1e-5)
    for x, size, expected in zip(images, sizes, outputs, strict=True):
        fixed = build((64, 160))
        fixed.load_state_dict(model.state_dict())
        fixed.set_input_size(size)
        close(fixed.forward_features(x), expected, 1e-5)
    fixed = build((64, 160))
    fixed.load_state_dict(model.state_dict())
    close(fixed.forward_features(images[0]), outputs[0], 1e-6)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state, square = torch.load(file), build((96, 96))
    if spec == "learn+alibi2d":  # the model's own table is not resampled by load_state_dict, as in timm
        with pytest.raises(RuntimeError, match="size mismatch for pos_embed"):
            square.load_state_dict(state)
        return
    square.load_state_dict(state)
    x = torch.randn(1, 3, 96, 96)
    close(square.forward_features(x), model.forward_features(x), 1e-5)
