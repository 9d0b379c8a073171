"""Models built from one shared configuration: each is saved with its own encoding."""

import copy
import json
import warnings

import peft
import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import stock
from tests.hosts.transformers.saving.test_saving import AUTO, TOWERS
from tests.hosts.transformers.saving.test_training import adapted, trainer
from tests.hosts.transformers.saving.test_vision import build
from tests.hosts.transformers.tiny import FAMILIES
from tests.hosts.transformers.vision.test_models import with_timm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is saved with|does not encode text as):UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
VISION = ("CLIPModel", "SiglipVisionModel", "InternVLVisionModel", "TimmWrapperModel")


def pair(model):
    """Return a model and a second one that shares its configuration."""
    other = type(model)(model.config).eval()
    assert other.config is model.config
    return model, other


def language(family):
    return pair(type(stock(family))(copy.deepcopy(stock(family).config)).eval())


def entries(config):
    """Return a configuration without the entries that transformers adds when saving."""
    if not isinstance(config, dict):
        return config
    return {name: entries(value) for name, value in config.items() if name not in ("architectures", "dtype")}


def saved(model, folder):
    """Return the saved file; `save_pretrained` does not modify the configuration."""
    before = copy.deepcopy(model.config)
    model.save_pretrained(folder)
    assert entries(model.config.to_dict()) == entries(before.to_dict())
    return json.loads((folder / "config.json").read_text())


def names_nothing(model, folder, plain):
    """Assert that a stock model is saved without entries of a converted model."""
    result = saved(model, folder)
    assert "vispe" not in json.dumps(result)
    plain.save_pretrained(folder / "plain")
    assert result == json.loads((folder / "plain" / "config.json").read_text())
    with warnings.catch_warnings(action="error"):
        model.save_pretrained(folder)


@cases("family", FAMILIES)
def test_a_stock_model_is_saved_as_stock(family, tmp_path):
    converted, other = language(family)
    plain = language(family)[0]
    vispe.convert(vispe.convert(converted, "mrope_i"), TOWERS[1])
    names_nothing(other, tmp_path / "stock", plain)
    with pytest.raises(vispe.errors.InputError, match="must name an encoding or position scheme of vispe"):
        vispe.from_pretrained(AUTO, tmp_path / "stock")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_model_is_saved_with_its_encoding(family, tmp_path):
    first, second = language(family)
    vispe.convert(vispe.convert(first, "mrope_i"), "alibi2d")
    vispe.convert(second, "v2pe(stride=4)")
    result = [saved(model, tmp_path / str(i)) for i, model in enumerate((first, second, first))]
    assert result[0] == result[2]
    assert [config["vispe"]["scheme"]["name"] for config in result[:2]] == ["mrope_i", "v2pe"]
    assert "alibi2d" in json.dumps(result[0])
    assert "alibi2d" not in json.dumps(result[1])
    vispe.restore(first)  # takes the entries out of the shared configuration
    assert saved(second, tmp_path / "after") == result[1]
    for model, folder in ((second, "1"), (second, "after")):
        reloaded = vispe.from_pretrained(AUTO, tmp_path / folder)
        assert [type(m) for m in reloaded.modules()] == [type(m) for m in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_encodings_of_vision_models(name, tmp_path):
    first, second = pair(build(name))
    plain = build(name)
    vispe.convert(first, "alibi2d")
    names_nothing(second, tmp_path / "stock", plain)
    vispe.convert(second, "irpe")
    for model, spec, other in ((first, "alibi2d", "irpe"), (second, "irpe", "alibi2d")) * 2:
        text = json.dumps(saved(model, tmp_path / spec))
        assert spec in text
        assert other not in text
        reloaded = vispe.from_pretrained(getattr(transformers, name), tmp_path / spec)
        assert reloaded.state_dict().keys() == model.state_dict().keys()
    vispe.restore(second)
    names_nothing(second, tmp_path / "restored", plain)
    assert "alibi2d" in json.dumps(saved(first, tmp_path / "last"))


def test_arguments_of_timm_are_saved(tmp_path):
    config = copy.deepcopy(build("TimmWrapperModel").config)
    config.model_args["pos_embed"] = "none"
    first, second = pair(transformers.TimmWrapperModel(config))
    vispe.convert(first, "irpe")
    assert saved(second, tmp_path)["model_args"]["pos_embed"] == "none"
    assert saved(first, tmp_path)["model_args"]["pos_embed"] == [{"name": "irpe"}]


@cases("kind", ["llava", "perception_lm"])
def test_towers_of_timm_in_language_models(kind, tmp_path):
    first, second = pair(with_timm(kind))
    plain = with_timm(kind)
    vispe.convert(first, "rope_mixed")
    names_nothing(second, tmp_path, plain)
    assert saved(first, tmp_path)["vision_config"]["model_args"]["pos_embed"] == [{"name": "rope_mixed"}]


def test_a_text_model_is_saved_without_the_encoding_of_the_tower(tmp_path):
    """The complete configuration of a text model may name an encoding of an absent tower."""
    model = build("CLIPVisionModel")
    vispe.convert(model, "alibi2d")
    config = build("CLIPModel").config
    config.vision_config = model.config
    text_model = transformers.CLIPTextModel(config.text_config)
    text_model.config = config
    assert "alibi2d" not in json.dumps(saved(text_model, tmp_path))
    assert "alibi2d" in json.dumps(saved(model, tmp_path))


def test_configurations_are_unchanged_when_saving_fails(tmp_path):
    first, second = pair(build("TimmWrapperModel"))
    vispe.convert(first, "alibi2d")
    before = copy.deepcopy(second.config.to_dict())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        second.save_pretrained(tmp_path / "file" / "folder")
    assert entries(second.config.to_dict()) == entries(before)


def test_adapters_on_one_of_two_models(tmp_path):
    first, second = language("llava")
    vispe.convert(first, "mrope_i")
    with warnings.catch_warnings(action="error", category=UserWarning):
        adapted(second).save_pretrained(tmp_path / "stock")
    with pytest.warns(UserWarning, match="which has the position scheme mrope_i"):
        adapted(first).save_pretrained(tmp_path / "ours")
    base = second.base_model if isinstance(second, peft.PeftModel) else second
    assert "vispe" not in json.dumps(saved(base, tmp_path / "base"))


def test_the_trainer_saves_the_encoding(tmp_path):
    first, second = language("llava")
    vispe.convert(first, "mrope_i")
    trainer(second, "llava", tmp_path / "stock", 1).save_model()
    assert "vispe" not in (tmp_path / "stock" / "config.json").read_text()
    vispe.convert(second, "vrope")
    trainer(first, "llava", tmp_path / "ours", 1).save_model()
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["vispe"]["scheme"]["name"] == "mrope_i"


def test_entries_of_another_model_do_not_convert_weights(tmp_path):
    first, second = language("llava")
    vispe.convert(first, "mrope_i")
    second.save_pretrained(tmp_path)
    result = AUTO.from_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(5, 12)[None]}
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        assert torch.equal(result(**inputs).logits, second(**inputs).logits)
