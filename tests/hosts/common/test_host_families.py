"""The list of families: every supported model has one, and libraries are imported on demand."""

import warnings

import open_clip
import pytest
import timm
import torch
import torchvision

import vispe
from vispe.errors import UnsupportedHost
from vispe.hosts.common.host_families import FAMILIES, family_of, family_or_none

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {"image_size": 64, "layers": 2, "width": 32, "heads": 2, "mlp_ratio": 2.0, "patch_size": 8}


def of_transformers(name, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, f"{name}Model")(config)


SWIN = {"img_size": 56, "window_size": 7, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
MODELS = {
    "timm ViT": (lambda: timm.create_model("test_vit", depth=2, img_size=64), "_Timm"),
    "timm Eva": (lambda: timm.create_model("eva02_tiny_patch14_224", depth=2, img_size=56), "_Timm"),
    "timm Swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), "_Windows"),
    "torchvision": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64), "_Windows"),
    "open_clip": (lambda: open_clip.transformer.VisionTransformer(**TOWER), "_Tower"),
    "transformers ViT": (lambda: of_transformers("Dinov2", image_size=56), "_Tower"),
    "transformers SAM": (
        lambda: of_transformers("VitDet", image_size=64, pretrain_image_size=64),
        "_Windows",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_family_before_and_after_a_conversion(name):
    make, family = MODELS[name]
    model = make()
    result = family_of(model)
    assert type(result).__name__ == family
    vispe.convert(model, "alibi2d")
    assert family_of(model) is result
    assert "alibi2d" in vispe.describe(model)
    vispe.restore(model)
    assert family_of(model) is result
    assert "without an encoding" in vispe.describe(model)


def test_unsupported_models_have_none():
    assert family_or_none(torch.nn.Linear(2, 2)) is None
    with pytest.raises(UnsupportedHost, match="unsupported model, got a Linear of torch"):
        family_of(torch.nn.Linear(2, 2))


def test_libraries_are_imported_on_demand():  # see timm/test_patch_constructors.py for a process with timm alone
    assert [library for library, _ in FAMILIES] == [None, "timm", "open_clip", "transformers"]


@pytest.mark.parametrize("name", ["timm ViT", "open_clip", "transformers ViT"])
def test_warnings_have_the_line_of_the_caller(name):
    model = MODELS[name][0]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vispe.convert(model, "rope_axial(temperature=2)", keep_abs=False)
    files = [str(w.filename) for w in caught if "temperature" in str(w.message)]
    assert files
    assert set(files) == {__file__}
