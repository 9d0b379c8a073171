"""Debiased models: maps of every block, prefix tokens, folders and their damage."""

import json

import pytest
import timm
import torch

from vispe.backbones.load_model import load_debiased, load_model
from vispe.backbones.local.debiased import DebiasedModel, Debiasing, inner_model
from vispe.backbones.local.debiased_folder import MAP, RECORD, read_debiased, save_debiased
from vispe.backbones.model_access import final_tokens
from vispe.backbones.model_names import kind_of
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.images.symmetry import D4, ViewAverage

MODEL = {"name": "test_vit", "pos_embed": None, "weights": "random", "img_size": None, "seed": 3}
POSES = ViewAverage(poses=8)


@pytest.fixture(scope="module")
def tower():
    return load_model("test_vit", weights="random", any_size=True, seed=3).model


def images(*size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_maps_of_every_block_and_class_tokens_are_means_over_the_poses(tower):
    model, x = DebiasedModel(tower, Debiasing("poses", POSES)).eval(), images(48, 80)
    plain, mean = VisionModel(tower), VisionModel(model)
    assert (mean.depth, mean.channels, mean.patch_size, mean.size, mean.exact) == (6, 64, 16, 160, False)
    for k, maps in enumerate(mean.layers(x)):
        expected = torch.stack([g.undo(plain.layers(g.apply(x))[k]) for g in D4]).mean(0)
        torch.testing.assert_close(maps, expected, atol=1e-4, rtol=1e-4)
    maps, token = final_tokens(model, x)
    torch.testing.assert_close(maps, torch.stack([g.undo(plain(g.apply(x))) for g in D4]).mean(0))
    expected = torch.stack([final_tokens(tower, g.apply(x))[1] for g in D4]).mean(0)
    torch.testing.assert_close(token, expected)
    assert not mean.permutable
    with pytest.raises(UnsupportedHost, match="one forward pass only, got a mean over 8"):
        mean.permuted(x, D4[1])


@torch.no_grad()
def test_the_linear_map_applies_to_the_final_features_only(tower):
    matrix, bias = torch.randn(64, 64).double(), torch.randn(64).double()
    model, x = DebiasedModel(tower, Debiasing("rasa", matrix=matrix, bias=bias)), images(64, 64)
    plain, changed = VisionModel(tower), VisionModel(model.eval())
    assert all(torch.equal(*pair) for pair in zip(plain.layers(x), changed.layers(x), strict=True))
    expected = torch.einsum("kc,bchw->bkhw", matrix, plain(x).double()) + bias[:, None, None]
    torch.testing.assert_close(changed(x), expected.float())
    assert changed.permutable
    several = VisionModel(model, layer=[1, -1])(x)
    assert torch.equal(several[:, 64:], changed(x))


def test_models_of_one_size_refuse_positions_but_not_poses():
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=2).eval()
    with pytest.raises(
        UnsupportedHost, match="positions needs a model for images of any size, got one for 64 px"
    ):
        DebiasedModel(fixed, Debiasing("positions", ViewAverage(positions=2)))
    f = VisionModel(DebiasedModel(fixed, Debiasing("poses", POSES)).eval())
    assert f.exact
    assert f(images(64, 64)).shape == (2, 24, 4, 4)
    with pytest.raises(ShapeError, match="multiples of the patch size, 16 px"):
        f.model(images(64, 60))


@torch.no_grad()
def test_a_folder_gives_the_same_bits(tower, tmp_path):
    average = ViewAverage(poses=8, positions=1)
    debiasing = Debiasing(
        "poses+positions+svd", average, 4, torch.randn(64, 64), None, True, {"directions": 9}
    )
    save_debiased(tmp_path, debiasing, MODEL)
    assert kind_of(tmp_path) == "debiased"
    loaded = load_debiased(tmp_path)
    assert torch.equal(
        loaded(images(48, 48)), VisionModel(DebiasedModel(tower, debiasing).eval())(images(48, 48))
    )
    assert read_debiased(tmp_path)[1].fingerprint() == debiasing.fingerprint()
    assert type(inner_model(loaded.model)).__name__ == "VisionTransformer"
    with pytest.raises(InputError, match="exists"):
        save_debiased(tmp_path, debiasing, MODEL)
    save_debiased(tmp_path, Debiasing("poses", POSES), MODEL, force=True)
    assert not (tmp_path / MAP).exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("model"),
        lambda r: r.update(kind="another"),
        lambda r: r["average"].update(poses=9),
        lambda r: r["average"].update(other=1),
        lambda r: r.update(model="test_vit"),
    ],
)
def test_damaged_records(tmp_path, change):
    save_debiased(tmp_path, Debiasing("poses", POSES), MODEL)
    record = json.loads((tmp_path / RECORD).read_text())
    change(record)
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(InputError, match="is not a record of vispe debias"):
        load_debiased(tmp_path)


def test_a_record_names_networks_only(tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit('run')\n")
    for name in (f"{tmp_path / 'code.py'}:maps", "vispe_micro"):
        folder = tmp_path / name.rpartition("/")[2].replace(":", "_")
        save_debiased(folder, Debiasing("poses", POSES), MODEL | {"name": name})
        with pytest.raises(
            OptionError, match=r"model does not support (a Python callable|the shipped backbone)"
        ):
            load_debiased(folder)
