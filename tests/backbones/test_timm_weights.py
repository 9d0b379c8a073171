"""Checkpoints in the layouts in which authors and training programs leave them go into every command equally."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vispe
from tests.cases import cases
from tests.products import partly, slow_except
from vispe.backbones.local.timm_weights import built_with
from vispe.backbones.timm import load_backbone
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.segment.features.token_features import TokenModel
from vispe.train.retrofit.config import Teacher
from vispe.train.retrofit.teacher import load_teacher

NAME = "vit_small_patch14_dinov2"
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4}
REAL = Path(__file__).resolve().parents[2] / "../shared/weights/dinov2_vits14_focus.safetensors"


def stock(name="test_vit", seed=3, **options):
    """A model whose weights matter, as its authors have it: for the images of its own configuration."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=0, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def authors(model):
    """The state dict of a DINOv2 model as its authors release it: with the token of masked patches."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        head = torch.zeros_like(state["cls_token"])
        state["pos_embed"] = torch.cat([head, state["pos_embed"]], 1)
    return {**state, "mask_token": torch.zeros(1, model.embed_dim)}


def theirs(name, state, size, **options):
    """What timm's own loader makes of a state dict."""
    return timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": dict(state), "num_classes": 0, "custom_load": False},
        num_classes=0,
        img_size=size,
        **options,
    ).eval()


def same(ours, expected):
    assert ours.state_dict().keys() == expected.state_dict().keys()
    state = ours.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name


LAYOUTS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 4, "optimizer": {"lr": 0.1}},
    "model": lambda state: {"model": state, "args": argparse.Namespace(model="vit")},
    "ddp": lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}},
    "compiled ddp": lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()},
    "ema": lambda state: {"state_dict": {k: v + 1 for k, v in state.items()}, "state_dict_ema": state},
    "teacher": lambda state: {
        "student": {f"module.backbone.{k}": v + 1 for k, v in state.items()},
        "teacher": {
            **{f"backbone.{k}": v for k, v in state.items()},
            "dino_head.mlp.0.weight": torch.ones(2),
        },
    },
    "flat teacher": lambda state: {
        **{f"student.backbone.{k}": v + 1 for k, v in state.items()},
        **{f"teacher.backbone.{k}": v for k, v in state.items()},
        "teacher.ibot_head.last.weight": torch.ones(2),
    },
    "lightning": lambda state: {"state_dict": {f"net.encoder.{k}": v for k, v in state.items()}, "epoch": 1},
    "ijepa": lambda state: {
        "encoder": {f"module.{k}": v for k, v in state.items()},
        "predictor": {"a": torch.ones(1)},
    },
}


@partly(1)
@cases("layout", LAYOUTS)
@cases("name", ["vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"])
def test_layouts(name, layout, tmp_path):
    model = stock(name, img_size=70, **SMALL)
    for state in (model.state_dict(), authors(model)):
        torch.save(LAYOUTS[layout](dict(state)), tmp_path / "w.pth")
        for size in (70, 56, (42, 84)):
            ours = load_backbone(name, weights=str(tmp_path / "w.pth"), img_size=size, options=SMALL)
            same(ours, theirs(name, state, size, **SMALL))


@partly(1)
@cases(
    "name",
    [
        "test_vit",
        "flexivit_small",
        "deit_tiny_distilled_patch16_224",
        "eva02_tiny_patch14_224",
        "vit_small_patch16_dinov3",
    ],
)
@cases("ending", [".pth", ".safetensors"])
def test_families_at_another_size_are_those_of_timms_own_loader(name, ending, tmp_path):
    options = {} if name == "test_vit" else SMALL
    side = 14 if "patch14" in name else 16
    state = stock(name, img_size=4 * side, **options).state_dict()
    file = tmp_path / f"w{ending}"
    save_file(state, file) if ending == ".safetensors" else torch.save(state, file)
    for size in (4 * side, 6 * side):
        ours = load_backbone(name, weights=str(file), img_size=size, options=options)
        same(ours, theirs(name, state, size, **options))
        x = torch.randn(2, 3, size, size)
        assert torch.equal(ours(x), theirs(name, state, size, **options)(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "test_efficientnet", "test_convnext"])
def test_other_models_load_too(name, tmp_path):
    state = timm.create_model(name, num_classes=7).state_dict()
    torch.save({"model": state}, tmp_path / "w.pth")
    ours = load_backbone(name, weights=str(tmp_path / "w.pth"))
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("spec", ["alibi2d", "rope_mixed", "rpb", "learned", "learn+irpe"])
def test_own_encodings_and_their_specs(spec, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pos_embed=spec, img_size=64, num_classes=3).eval()
    file = tmp_path / "w.pth"
    torch.save({"state_dict": torch.nn.ModuleDict({"module": model}).state_dict()}, file)
    ours = load_backbone("test_vit", pos_embed=spec, weights=str(file), img_size=64)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours.forward_features(x), model.forward_features(x))
    larger = load_backbone("test_vit", pos_embed=spec, weights=str(file), img_size=96)
    model.set_input_size((96, 96))
    x = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(larger.forward_features(x), model.forward_features(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        InputError, match=r"w\.pth does not fit the model test_vit: .* saved with .*, but .* has 'rope_axial'"
    ):
        load_backbone("test_vit", pos_embed="rope_axial", weights=str(file), img_size=64)
    with pytest.raises(
        InputError, match=r"w\.pth does not fit the model: it was saved with the encoding .*pos_embed must"
    ):
        load_backbone("test_vit", weights=str(file), img_size=64)


def loaders(file, **options):
    """What each command does with a checkpoint; what comes back is its model."""
    name, file = "test_vit", str(file)
    yield lambda: load_backbone(name, weights=file, **options)
    yield lambda: TokenModel(name, weights=file)._model
    yield lambda: load_evaluated_model(name, weights=file, device="cpu", **options).features.model
    yield lambda: load_teacher(Teacher(name=name, weights=file, **options)).model


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != "norm.bias"},
            "it lacks weights norm.bias. Check the name",
        ),
        (
            lambda s: {**s, "strange.weight": torch.ones(1)},
            "it has the unexpected weights strange.weight. Check",
        ),
        (
            lambda s: {**s, "blocks.0.attn.pos_enc.freqs": torch.ones(1)},
            "unexpected weights blocks.0.attn.pos_enc.freqs",
        ),
        (lambda s: {**s, "norm.bias": torch.ones(3)}, "size mismatch for norm.bias"),
        (lambda s: {"optimizer": {"lr": 1.0}, "epoch": {"n": 3}}, "it contains optimizer, epoch, none"),
        (lambda s: [1, 2], "it contains a list instead of a state dict"),
        (lambda s: {"model": torch.nn.Linear(2, 2)}, "other objects can run code"),
    ],
)
def test_one_error_for_every_command(change, text, tmp_path):
    file = tmp_path / "bad.pth"
    torch.save(change(stock(img_size=160).state_dict()), file)
    messages = set()
    for load in loaders(file):
        with pytest.raises(InputError, match=r"bad\.pth does not fit the model") as error:
            load()
        assert text in str(error.value)
        messages.add(str(error.value))
    assert len(messages) == 1


def test_files_without_a_checkpoint_have_one_error_for_every_command(tmp_path):
    (tmp_path / "text.pth").write_text("no checkpoint")
    for path, words in (
        ("text.pth", "text.pth does not fit the model ("),
        ("gone.pth", "weights must be a checkpoint file"),
    ):
        for load in loaders(tmp_path / path):
            with pytest.raises(InputError) as error:
                load()
            assert words in str(error.value)


def test_every_command_takes_the_same_file(tmp_path):
    state = authors(stock(img_size=160))
    torch.save({"teacher": {f"backbone.{k}": v for k, v in state.items()}}, tmp_path / "w.pth")
    models = [load() for load in loaders(tmp_path / "w.pth")]
    for model in models:
        same(model, models[0])
    for load in list(loaders(tmp_path / "w.pth", img_size=96))[::2]:
        same(load(), theirs("test_vit", state, 96))


def image_file(folder):
    pixels = np.random.default_rng(0).integers(0, 255, (96, 96)).astype("uint8")
    Image.fromarray(pixels).save(folder / "a.png")
    labels = np.zeros((96, 96), "uint8")
    labels[10:14, 10:60], labels[60:64, 10:60] = 1, 2
    Image.fromarray(labels).save(folder / "labels.png")
    return str(folder / "a.png")


def commands(name, weights, size, folder):
    image, options = image_file(folder), ["--weights", str(weights), "--img-size", str(size)]
    yield ["probe", name, image, *options, "--no-layers", "--json"]
    yield ["health", name, image, *options, "--json"]
    yield ["rotate", name, image, *options, "--quick", "--out", str(folder / "rotate")]
    yield ["doctor", name, "--weights", str(weights), "--img-size", str(size), "--json"]
    yield ["segment", image, "--labels", str(folder / "labels.png"), "--features", "tokens", "--model", name,
           "--weights", str(weights), "--out", str(folder / "segment")]  # fmt: skip


@pytest.mark.parametrize("number", slow_except(range(5), [0, 3, 4]))
def test_commands_take_a_file_of_the_authors(number, tmp_path, capsys, monkeypatch):
    save_file(authors(stock(img_size=160)), tmp_path / "w.safetensors")
    words = list(commands("test_vit", tmp_path / "w.safetensors", 192, tmp_path))[number]
    assert main(words) == 0, capsys.readouterr().err


def test_doctor_loads_an_encoding_with_its_weights(tmp_path, capsys):
    model = timm.create_model("test_vit", pos_embed="rope_mixed", img_size=64)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    words = ["doctor", "test_vit", "--weights", str(tmp_path / "w.pth"), "--img-size", "64", "--json"]
    assert main([*words, "--encoding", "rope_mixed"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == str(tmp_path / "w.pth")
    assert main([*words, "--encoding", "alibi2d"]) != 0
    assert "saved with the encoding 'rope_mixed', but" in capsys.readouterr().err
    assert main(["doctor", "--weights", "w.pth"]) != 0


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"the weights {REAL} are not on this disk")
def test_a_published_dinov2(tmp_path, capsys):
    state = timm.models.load_state_dict(str(REAL))
    for size in (224, 518, (196, 252)):
        expected = theirs(NAME, state, size)
        ours = load_backbone(NAME, weights=str(REAL), img_size=size)
        h, w = (size, size) if isinstance(size, int) else size
        x = torch.randn(1, 3, h, w, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(ours.forward_features(x), expected.forward_features(x))
    for words in commands(NAME, REAL, 224, tmp_path):
        assert main(words) == 0, capsys.readouterr().err


def test_a_built_model_has_a_plain_configuration(tmp_path):
    torch.save(stock(img_size=160).state_dict(), tmp_path / "w.pth")
    model = built_with(tmp_path / "w.pth", "test_vit", lambda: timm.create_model("test_vit", num_classes=0))
    assert model.pretrained_cfg == timm.create_model("test_vit").pretrained_cfg
    assert vispe.describe(model).startswith("VisionTransformer without")
