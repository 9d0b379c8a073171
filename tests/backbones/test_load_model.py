"""Names of models: every spelling gives the same model in every command, or the same error."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vispe
from vispe.backbones.hub import downloads
from vispe.backbones.load_model import load_model
from vispe.backbones.model_names import NETWORKS, SPELLINGS, check_kind, kind_of, spellings
from vispe.cli.main import main
from vispe.errors import InputError, OptionError, UnknownName, UnsupportedHost
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.segment import FeatureConfig, segment
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.token_features import TokenModel
from vispe.segment.live.suggest_file import suggest_file
from vispe.segment.text.config import TextConfig
from vispe.train.retrofit.config import Teacher
from vispe.train.retrofit.teacher import load_teacher

TEXT = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
TOWER = {"image_size": 64, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# spelling -> kind, class of the model, and whether weights='random' is needed without a network
NAMES = {
    "test_vit": ("timm", "VisionTransformer", True),
    "local-dir:timm_folder": ("timm", "VisionTransformer", False),
    "open_clip:tiny": ("open_clip", "VisionTransformer", True),
    "open_clip:local-dir:clip_folder": ("open_clip", "VisionTransformer", False),
    "hf:transformers_folder": ("transformers", "TransformersModel", False),
    "retrofit": ("retrofit", "VispeVisionTransformer", False),
    "retrofit/student.safetensors": ("retrofit", "VispeVisionTransformer", False),
    "debiased": ("debiased", "DebiasedModel", False),
    "vispe_micro": ("micro", "Micro", False),
    "code.py:maps": ("callable", "function", False),
    "code:maps": ("callable", "function", False),
    "model.vispe": ("segmenter", "SavedSegmenter", False),
}
EVERY = tuple(SPELLINGS)
# entry point -> function of name and weights that returns the model, and the kinds that it supports
ENTRIES = {
    "load_model": (lambda n, w: load_model(n, weights=w).model, [k for k in EVERY if k != "segmenter"]),
    "evaluate": (lambda n, w: evaluated(n, w), EVERY),
    "segment": (lambda n, w: pixel_features(n, w)._model._model, (*NETWORKS, "micro")),
    "retrofit": (lambda n, w: load_teacher(Teacher(n, weights=w)).model, ("timm", "open_clip", "debiased")),
    "text": (lambda n, w: TextConfig(n, weights=w), ("open_clip",)),
    "suggest": (lambda n, w: suggest_file("a.png", "out", model=n), ("segmenter",)),
}


def evaluated(name, weights):
    subject = load_evaluated_model(name, weights=weights, device="cpu")
    return getattr(subject.features, "model", None) or subject.segmenter or subject.features


def pixel_features(name, weights):
    return Features(FeatureConfig("tokens", model=name, weights=weights), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of each kind, the working directory of the tests."""
    transformers = pytest.importorskip("transformers")
    folder, before = tmp_path_factory.mktemp("models"), Path.cwd()
    os.chdir(folder)
    configuration = {"embed_dim": 16, "vision_cfg": TOWER, "text_cfg": TEXT}
    open_clip.factory._MODEL_CONFIGS["tiny"] = configuration
    timm.models.save_for_hf(
        timm.create_model("test_vit", num_classes=0), "timm_folder", model_config={"architecture": "test_vit"}
    )
    Path("clip_folder").mkdir()
    Path("clip_folder/open_clip_config.json").write_text(json.dumps({"model_cfg": configuration}))
    save_file(open_clip.create_model("tiny").state_dict(), "clip_folder/open_clip_model.safetensors")
    config = transformers.CLIPVisionConfig(**SIZES, image_size=48, patch_size=8)
    transformers.CLIPVisionModel._from_config(config).save_pretrained("transformers_folder")
    Path("transformers_folder/preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}'
    )
    Path("retrofit").mkdir()
    student = timm.create_model("test_vit", num_classes=0, depth=1, img_size=64, dynamic_img_size=True)
    save_file(vispe.convert(student, "alibi2d").state_dict(), "retrofit/student.safetensors")
    teacher = {"name": "test_vit", "img_size": 64, "options": {"depth": 1}, "mean": [0.1, 0.2, 0.3]}
    card = {"config": {"seed": 0, "teacher": teacher, "student": {"pos_embed": "alibi2d"}}}
    Path("retrofit/card.json").write_text(json.dumps(card))
    assert main(["debias", "local-dir:timm_folder", "--method", "poses+svd", "-o", "debiased"]) == 0
    Path("code.py").write_text(
        "def maps(images):\n    return images[..., ::8, ::8]\n\n\nmaps.patch_size = 8\n"
    )
    labels = np.zeros((70, 91), np.uint8)
    labels[8:30, 8:40], labels[40:60, 40:80] = 1, 2
    Image.fromarray(labels).save("labels.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91), np.uint8)).save("a.png")
    segment("a.png", "trained", cluster=2, features=FeatureConfig())
    Path("trained/model.vispe").rename("model.vispe")
    yield folder
    os.chdir(before)
    sys.modules.pop("code", None)
    del open_clip.factory._MODEL_CONFIGS["tiny"]


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "code", raising=False)  # a module of the standard library has this name


def state_of(model):
    return model.state_dict() if isinstance(model, torch.nn.Module) else {}


def test_every_kind_has_a_name():
    assert {kind for kind, _, _ in NAMES.values()} == set(SPELLINGS)


@pytest.mark.parametrize("name", NAMES)
def test_the_kind_of_a_name(name):
    assert kind_of(name) == NAMES[name][0]
    assert kind_of(Path(name)) == NAMES[name][0]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", NAMES)
def test_entry_points_give_the_same_model_or_the_same_error(name, entry):
    kind, cls, random = NAMES[name]
    load, kinds = ENTRIES[entry]
    weights = "random" if random else None
    if kind not in kinds and not (entry in ("text", "suggest") and kind in ("timm", "micro")):
        with pytest.raises(OptionError) as error:
            load(name, weights)
        parameter = "teacher.name" if entry == "retrofit" else "model"
        assert str(error.value).startswith(
            f"{parameter} does not support {SPELLINGS[kind][0]} here, got {name}. Use "
        )
        assert all(SPELLINGS[k][1] in str(error.value) for k in kinds)
    elif entry == "retrofit" and "local-dir" in name and kind == "open_clip":
        pytest.skip("a retrofit needs a name that open_clip knows, see test_the_teacher_of_a_retrofit")
    elif entry not in ("text", "suggest"):
        model = load(name, weights)
        if kind != "micro" or entry == "load_model":  # evaluated as a function
            assert type(model).__name__ == cls
        if kind in NETWORKS:
            expected = state_of(load_model(name, weights=weights).model)
            assert expected
            assert expected.keys() == state_of(model).keys()
            assert all(torch.equal(v, expected[k]) for k, v in state_of(model).items())


@pytest.mark.parametrize("command", ["probe", "health", "audit", "rotate", "doctor", "segment"])
def test_commands_name_all_spellings_of_an_unknown_model(command, capsys):
    inputs = {
        "doctor": ["test_vitt"],
        "segment": ["a.png", "--labels", "labels.png", "--model", "test_vitt", "-o", "no"],
        "rotate": ["test_vitt", "a.png"],
    }.get(command, ["test_vitt", "--noise", "1"])
    assert main([command, *inputs]) == 2
    error = capsys.readouterr().err
    assert "timm has no model 'test_vitt'. Did you mean 'test_vit'" in error
    assert all(SPELLINGS[kind][1] in error for kind in NETWORKS)
    assert error.count("\n") == 1


def test_an_unfinished_folder_is_not_a_timm_name(folder):
    Path("unfinished").mkdir()
    with pytest.raises(
        InputError, match=r"no finished retrofit, got unfinished. .* use local-dir:unfinished or hf:"
    ):
        load_model("unfinished")
    with pytest.raises(UnknownName, match=r"timm has no model 'nothing'.* Supported names: a timm name"):
        load_model("nothing")


@pytest.mark.parametrize(
    "name",
    [
        "hf:transformers_folder",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("retrofit", "debiased", "open_clip:local-dir:clip_folder")
        ),
    ],
)
def test_segmentation_with_each_library_and_again_from_its_file(name, folder, capsys):
    words = ["a.png", "--labels", "labels.png", "--features", "tokens", "--model", name]
    out = f"seg_{kind_of(name)}"
    assert main(["segment", *words, "-o", out]) == 0
    assert main(["apply", f"{out}/model.vispe", "a.png", "-o", f"{out}_again"]) == 0
    first, second = (np.asarray(Image.open(f"{f}/a_seg.png")) for f in (out, f"{out}_again"))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    "name", ["hf:transformers_folder", "retrofit", "debiased", "open_clip:local-dir:clip_folder"]
)
def test_doctor_with_each_library(name, folder, capsys):
    assert main(["doctor", name, "--encoding", "alibi2d", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["weights"], bool(report["paths"])) == ("pretrained", True)


def test_options_without_effect_are_refused(folder):
    for name, options in {
        "retrofit": {"weights": "random"},
        "hf:transformers_folder": {"pos_embed": "alibi2d"},
        "vispe_micro": {"img_size": 32},
        "code.py:maps": {"weights": "random"},
        "open_clip:tiny": {"options": {"depth": 1}, "weights": "random"},
    }.items():
        with pytest.raises(OptionError, match=f"has no effect on {name}, which is loaded as"):
            load_model(name, **options)
    with pytest.raises(
        OptionError, match="patch_size=4 has no effect on vispe_micro, which is loaded as the shipped"
    ):
        load_evaluated_model("vispe_micro", patch_size=4, device="cpu")


def test_preprocessing_follows_the_model(folder):
    f = load_evaluated_model("retrofit", device="cpu")
    assert torch.allclose(f.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    tokens = TokenModel("retrofit")._features
    assert torch.equal(tokens.mean, f.mean)
    assert not tokens.exact
    assert torch.equal(
        TokenModel("hf:transformers_folder")._features.std.flatten(), torch.tensor([0.4, 0.5, 0.6])
    )


def test_the_teacher_of_a_retrofit(folder):
    with pytest.raises(UnsupportedHost, match="Use open_clip:MODEL/TAG"):
        load_teacher(Teacher("open_clip:local-dir:clip_folder"), outline=True)


def test_text_models_have_the_prefix_of_open_clip_too():
    config = TextConfig("open_clip:ViT-B-32/openai")
    assert (config.model, config.weights) == ("ViT-B-32", "openai")
    assert TextConfig("local-dir:clip_folder").model == "local-dir:clip_folder"
    with pytest.raises(OptionError, match="weights must not be set for open_clip:ViT-B-32/openai"):
        TextConfig("open_clip:ViT-B-32/openai", weights="random")


def test_a_file_alone_may_not_download_a_transformers_model(folder):
    with downloads(False), pytest.raises(InputError, match="hf:nobody/nothing is not on this disk"):
        load_model("hf:nobody/nothing")


def test_lists_of_spellings():
    assert spellings(["micro"]) == "vispe_micro"
    assert spellings(["segmenter", "micro"]) == "vispe_micro; or a .vispe file"
    with pytest.raises(
        OptionError, match=r"teacher does not support a retrofit here, got retrofit. Use vispe_micro"
    ):
        check_kind("retrofit", ["micro"], "teacher")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reaches_at_most_12_files(name, folder):
    """Count the files of vispe with a function that receives the name, once everything is imported."""
    weights = "random" if NAMES[name][2] else None
    load_evaluated_model(name, weights=weights, device="cpu")
    root, path, files = str(Path(vispe.__file__).parent), name.rpartition(":")[2], set()

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_filename.startswith(root):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            arguments = [frame.f_locals.get(v) for v in names]
            if any(isinstance(a, str | Path) and path in str(a) for a in arguments):
                files.add(code.co_filename)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        load_evaluated_model(name, weights=weights, device="cpu")
    finally:
        sys.settrace(before)
    assert len(files) <= 12, sorted(files)
