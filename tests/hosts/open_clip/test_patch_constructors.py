"""`open_clip.create_model` builds models with an encoding by name."""

import json
import logging

import open_clip
import pytest
import timm
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, image, shake
from tests.hosts.open_clip.common import TEXT, TOWER, VISION
from vispe.errors import OptionError, UnknownName, UnsupportedHost
from vispe.hosts.open_clip import patch_constructors
from vispe.hosts.open_clip.patch_constructors import register_alias

LEARNED = "alibi2d(slopes=learned)"


@pytest.fixture(scope="module", autouse=True)
def _configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    towers = {
        "tiny-own": {**VISION, "image_size": 32, "head_width": 8},
        "tiny-timm": {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 160},
        "tiny-convnext": {"timm_model_name": "test_convnext", "timm_pool": "avg", "image_size": 160},
        "tiny-resnet": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32},
        "tiny-done": {**VISION, "head_width": 8, "pos_embed_type": "alibi2d"},
    }
    for name, vision in towers.items():
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)  # open_clip says that weights are random
    yield
    logging.disable(logging.NOTSET)


@cases("base", ["tiny-own", "tiny-timm"])
@cases("spec", ["alibi2d", LEARNED, {"name": "alibi2d", "slopes": "geometric"}])
def test_a_stock_checkpoint_loads_into_the_named_model(base, spec, tmp_path):
    name = register_alias(base, spec)
    assert name.startswith(f"vispe-{base}-")
    assert name in open_clip.list_models()
    assert register_alias(base, spec) == name, "registered twice"
    stock = shake(open_clip.create_model(base))
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    torch.manual_seed(1)
    model = open_clip.create_model(name, pretrained=str(tmp_path / "stock.pt")).eval()
    expected = vispe.convert(stock, spec).eval()
    slopes = {k: v for k, v in model.state_dict().items() if "pos_enc" in k}
    expected.load_state_dict({**expected.state_dict(), **slopes})
    x = image(2, 3, *model.visual.image_size)
    close(model.encode_image(x), expected.encode_image(x))
    with pytest.raises(vispe.VispeError, match="no absolute table to restore"):
        vispe.restore(model)
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    reloaded = open_clip.create_model(name, pretrained=str(tmp_path / "ours.pt")).eval()
    assert torch.equal(reloaded.encode_image(x), model.encode_image(x))


@cases("base", ["tiny-own", "tiny-timm"])
def test_the_force_options_hold(base):
    name = register_alias(base, LEARNED)
    created = open_clip.create_model(
        name, force_image_size=(160, 96), force_patch_dropout=0.5, precision="bf16"
    )
    assert created.visual(image(1, 3, 160, 96).bfloat16()).shape == (1, 16)
    assert "grid (20, 12)" in vispe.describe(created) or "grid (10, 6)" in vispe.describe(created)
    assert "patch_drop" in str(created.visual) or "PatchDropout" in str(created.visual)
    model, _, transform = open_clip.create_model_and_transforms(name)
    assert model.visual.image_size == transform.transforms[0].size or transform.transforms[0].size


def test_learn_in_a_spec_keeps_the_table():
    model = open_clip.create_model(register_alias("tiny-own", "learn+alibi2d"))
    assert model.visual.positional_embedding.shape == (17, 32)
    assert "absolute table: in use" in vispe.describe(model)
    model = open_clip.create_model(register_alias("tiny-timm", "learn+alibi2d"))
    assert model.visual.trunk.pos_embed is not None


def test_names():
    assert register_alias("tiny-own", "alibi2d.dinosaw") == "vispe-tiny-own-alibi2d.dinosaw"
    assert register_alias("tiny-own", "learned+alibi2d") == "vispe-tiny-own-learned+alibi2d"
    assert register_alias("tiny-own", ["learned", "sincos2d"], name="mine") == "mine"
    assert "mine" in open_clip.list_models()
    assert register_alias("tiny-timm", "alibi2d.dinosaw") == "vispe-tiny-timm-alibi2d.dinosaw"
    assert timm.is_model("vispe_test_vit_alibi2d_dinosaw")
    timm_model = timm.create_model("vispe_test_vit_alibi2d_dinosaw", num_classes=3)
    assert timm_model(image(1, 3, 160, 160)).shape == (1, 3)


def test_pretrained_tags_are_those_of_the_base():
    name = register_alias("ViT-B-32", "alibi2d")
    assert open_clip.list_pretrained_tags_by_model(name) == open_clip.list_pretrained_tags_by_model(
        "ViT-B-32"
    )
    assert "openai" in open_clip.list_pretrained_tags_by_model(name)


def test_a_trunk_with_a_rotary_embedding():
    name = register_alias("EVA02-B-16", "learn+rope+alibi2d")
    assert name == "vispe-EVA02-B-16-learn+rope+alibi2d"
    with torch.device("meta"):
        model = timm.create_model("vispe_eva02_base_patch16_clip_224_learn_rope_alibi2d", depth=1)
    assert "own rotary embedding: in use" in vispe.describe(model)


def test_unsupported_specs_are_rejected_at_registration():
    before = open_clip.list_models()
    for base, spec, error, match in (
        ("tiny-ovn", "alibi2d", UnknownName, "no model 'tiny-ovn'. Did you mean 'tiny-own'"),
        ("tiny-resnet", "alibi2d", UnsupportedHost, "got tiny-resnet, whose tower is a ResNet"),
        ("tiny-convnext", "alibi2d", UnsupportedHost, "ConvNeXt"),
        ("tiny-own", "alibi3dd", vispe.VispeError, "alibi3dd"),
        ("tiny-own", "alibi", vispe.VispeError, "alibi supports 1 axis, got the 2-axis grid"),
        ("tiny-timm", "alibi", vispe.VispeError, "alibi supports 1 axis, got the 2-axis grid"),
        ("tiny-done", "learned", OptionError, "with the encoding 'alibi2d'"),
        (
            "tiny-own",
            vispe.create_encoding("alibi2d", num_heads=4),
            OptionError,
            "spec must be serialisable as JSON, got Alibi2D",
        ),
    ):
        with pytest.raises(error, match=match):
            register_alias(base, spec)
    with pytest.raises(OptionError, match="name must be new, got 'tiny-own', a model of open_clip"):
        register_alias("tiny-timm", "alibi2d", name="tiny-own")
    assert open_clip.list_models() == before


def test_an_encoding_in_the_configuration():
    patch_constructors.install()
    patch_constructors.install()
    assert "alibi2d" in vispe.describe(open_clip.create_model("tiny-done"))
    tower = open_clip.transformer.VisionTransformer
    inits = tower.__init__
    patch_constructors.uninstall()
    with pytest.raises(ValueError):  # noqa: PT011 - open_clip's own error has no text
        tower(**TOWER, pos_embed_type="alibi2d")
    patch_constructors.install()
    assert tower.__init__ is not inits
    stock = tower(**{**TOWER, "image_size": 32}, pos_embed_type="sin_cos_2d")
    assert not stock.positional_embedding.requires_grad
    assert type(stock) is tower
    positional = tower(32, 8, 32, 2, 4, 2.0, None, False, 256, 8, 16, 0.0, False, "alibi2d")
    assert "alibi2d" in vispe.describe(positional)

    class Own(tower):
        pass

    with pytest.raises(
        UnsupportedHost, match="Own: subclasses of open_clip's VisionTransformer do not support"
    ):
        Own(**TOWER, pos_embed_type="alibi2d")
