"""Saving and loading of converted models; loading as a stock model always warns."""

import copy
import json
import warnings

import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import HOST_SCHEME, copy_of, stock
from tests.hosts.transformers.tiny import CLASSES, FAMILIES, QWEN, batch, make
from tests.products import partly
from vispe.errors import InputError, OptionError, UnsupportedCombination, UnsupportedHost
from vispe.multimodal import list_schemes

AUTO = transformers.AutoModelForImageTextToText
SAVED = "is saved with .* load it with vispe.from_pretrained"
LOADED = "was loaded without, so its outputs are not those .* Load it with vispe.from_pretrained"
TOWERS = ("alibi2d", "alibi2d(slopes=learned)+irpe", "rope_mixed")  # none, per layer, turning with weights


def everything(family):
    return batch(family, [5], [3, "image", 4], [1, "wide", 1, "image", 2])


def scheme(family, which):
    return HOST_SCHEME.get(family, "rope1d") if which == "own" else "v2pe(stride=4)"


def with_tower(model, spec):
    """Add an encoding with distinctive weights to the tower."""
    vispe.convert(model, spec)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "pos_enc." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def save(model, folder, **options):
    with pytest.warns(UserWarning, match=SAVED):
        model.save_pretrained(folder, **options)


def logits(model, family):
    """Return the logits of a copy: weights in a mapped file may be aligned differently, which changes the last bit."""
    with torch.no_grad():
        return copy.deepcopy(model)(**everything(family).inputs).logits


def same_model(actual, expected, family):
    assert type(actual) is type(expected)
    assert {n: type(m) for n, m in actual.named_modules()} == {
        n: type(m) for n, m in expected.named_modules()
    }
    state = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
    assert actual.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(logits(actual, family), logits(expected, family))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["own", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_scheme_is_loaded(family, which, tmp_path):
    model = vispe.convert(copy_of(family), scheme(family, which))
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vispe"]["version"] == vispe.__version__
    same_model(vispe.from_pretrained(AUTO, tmp_path), model, family)
    with pytest.warns(UserWarning, match=LOADED) as caught:
        plain = AUTO.from_pretrained(tmp_path)
    assert len(caught) == 1
    assert plain.config.architectures == [CLASSES[family]]
    assert torch.equal(logits(plain, family), logits(stock(family), family))
    same_model(vispe.convert(plain), model, family)
    vispe.restore(model)
    assert not hasattr(model.config, "vispe")
    with warnings.catch_warnings(action="error"):
        model.save_pretrained(tmp_path)
        AUTO.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="must name an encoding or position scheme of vispe"):
        vispe.from_pretrained(AUTO, tmp_path)


@partly(0.5)
@cases("spec", TOWERS)
@cases("family", FAMILIES)
def test_an_encoding_of_the_tower_is_loaded_with_its_weights(family, spec, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe"), spec)
    save(model, tmp_path)
    actual = vispe.from_pretrained(AUTO, tmp_path)
    same_model(actual, model, family)
    vispe.convert(actual)  # everything that is named is there
    same_model(actual, model, family)
    unsaved = with_tower(copy_of(family), spec)
    save(unsaved, tmp_path / "alone")
    same_model(
        vispe.from_pretrained(getattr(transformers, CLASSES[family]), tmp_path / "alone"), unsaved, family
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_precision_shards_devices_and_other_files(family, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe"), TOWERS[1])
    save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for how in ({}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {"dtype": torch.float32}):
        same_model(vispe.from_pretrained(AUTO, tmp_path, **how), model, family)
    half = vispe.from_pretrained(AUTO, tmp_path, dtype=torch.bfloat16)
    # built in half precision: `.to` would round frequencies, too
    cls = getattr(transformers, CLASSES[family])
    expected = cls._from_config(copy.deepcopy(stock(family).config), dtype=torch.bfloat16).eval()
    vispe.convert(vispe.convert(expected, "v2pe"), TOWERS[1])
    expected.load_state_dict(model.state_dict())
    same_model(half, expected, family)
    assert half.dtype == torch.bfloat16
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    same_model(vispe.from_pretrained(AUTO, tmp_path), model, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_several_devices(family, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe"), TOWERS[1])
    save(model, tmp_path)
    map_of = {name: "cpu" for name, _ in model.named_children()} | {"lm_head": "disk"}
    actual = vispe.from_pretrained(AUTO, tmp_path, device_map=map_of, offload_folder=tmp_path / "offload")
    assert actual.hf_device_map == map_of
    with torch.no_grad():  # hooks hold on to the model that they were made for, so there is no copy
        out = actual(**everything(family).inputs).logits
    assert torch.equal(out, logits(model, family))


@partly(3)
@cases("family", FAMILIES)
def test_missing_and_unexpected_weights_raise(family, tmp_path):
    model = with_tower(copy_of(family), TOWERS[1])
    save(model, tmp_path)
    weights = model.state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save({k: v for k, v in weights.items() if "slope" not in k}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"2 weights are missing \(.*slope.*slope"):
        vispe.from_pretrained(AUTO, tmp_path)
    torch.save({**weights, "model.junk": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"1 weight is unexpected \(.*junk"):
        vispe.from_pretrained(AUTO, tmp_path)
    torch.save(stock(family).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="are missing"):
        vispe.from_pretrained(AUTO, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_of_a_converted_model_builds_converted_models(family, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe"), TOWERS[1])
    rebuilt = type(model)(model.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    same_model(rebuilt, model, family)
    rebuilt = type(model)._from_config(model.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    same_model(rebuilt, model, family)
    inner = type(model.model)(model.config).eval()
    inner.load_state_dict(model.model.state_dict())
    same_model(_with_head(inner, model), model, family)
    save(model, tmp_path)
    actual, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    same_model(actual, model, family)
    for part in (rebuilt, inner):
        vispe.restore(part)
    assert all(type(a) is type(b) for a, b in zip(rebuilt.modules(), stock(family).modules(), strict=True))


def _with_head(inner, model):
    complete = copy.deepcopy(model)
    complete.model = inner
    return complete


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_of_a_converted_model_builds_stock_models_from_stock_configurations(family, tmp_path):
    converted_class = type(vispe.convert(copy_of(family), "v2pe"))
    plain = copy_of(family)
    rebuilt = converted_class(copy.deepcopy(plain.config)).eval()
    assert type(rebuilt) is type(plain)
    rebuilt.load_state_dict(plain.state_dict())
    assert torch.equal(logits(rebuilt, family), logits(plain, family))
    assert torch.equal(
        logits(vispe.convert(rebuilt, "v2pe"), family), logits(vispe.convert(copy_of(family), "v2pe"), family)
    )
    plain.save_pretrained(tmp_path)
    actual = converted_class.from_pretrained(tmp_path)
    assert type(actual) is type(plain)
    assert torch.equal(logits(actual, family), logits(plain, family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "internvl"])
def test_classes_of_parts_build_complete_parts(family):
    model = with_tower(vispe.convert(make(family), "v2pe"), TOWERS[1])
    for _, part in model.named_modules():
        config = getattr(part, "config", None)
        if config is None or not isinstance(part, transformers.PreTrainedModel):
            continue
        built = type(part)(config)
        assert [type(m) for m in built.modules()] == [
            type(m) if m is not part or part is not model.model.language_model else _stock(m)
            for m in _as_alone(model, part)
        ]


def _stock(module):
    return getattr(type(module), "vispe_stock", type(module))


def _as_alone(model, part):
    """Return modules; the language model inside is stock, only the surrounding model has the scheme."""
    if part is not model.model.language_model:
        return part.modules()
    restored = vispe.restore(copy.deepcopy(model))
    return restored.model.language_model.modules()


def test_subclasses_of_a_converted_class_raise():
    model = vispe.convert(make("llava"), "v2pe")
    derived = type("Mine", (type(model),), {})
    with pytest.raises(
        UnsupportedHost, match="Mine must not derive from the class of a converted LlavaForConditional"
    ):
        derived(model.config)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_can_be_copied_and_serialised(family, tmp_path):
    model = with_tower(
        vispe.convert(make(family), "mhrope(sections=[0,0,1])"),
        "alibi2d+learn" if family not in QWEN[:2] else "alibi2d",
    )
    for config in (
        copy.deepcopy(model.config),
        type(model.config).from_dict(model.config.to_dict()),
        type(model.config).from_dict(json.loads(model.config.to_json_string())),
    ):
        assert config.vispe == model.config.vispe
        assert config.vision_config.vispe == model.config.vision_config.vispe
        rebuilt = type(model)(config).eval()
        rebuilt.load_state_dict(model.state_dict())
        assert torch.equal(logits(rebuilt, family), logits(model, family))
    assert model.config.vispe["scheme"]["sections"] == [0, 0, 1]
    assert model.config.vispe["late_rotation"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_is_json_serialisable(name):
    options = "(sections=[0,0,1])" if name == "mhrope" else ""
    with warnings.catch_warnings(action="ignore"):
        model = vispe.convert(make("qwen3_vl"), name + options)
    before = model.model.vispe_scheme
    config = type(model.config).from_dict(json.loads(json.dumps(model.config.to_dict())))
    rebuilt = type(model)(config)
    assert rebuilt.model.vispe_scheme == before


def test_a_missing_and_an_invalid_spec():
    with pytest.raises(InputError, match="got that of a Qwen2VLForConditionalGeneration without one"):
        vispe.convert(make("qwen2_vl"))
    with pytest.raises(OptionError, match="got a Linear, which has no configuration"):
        vispe.convert(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"got the options stride"):
        vispe.convert(vispe.convert(make("qwen2_vl"), "v2pe"), stride=4)


def test_another_format_version_is_rejected():
    model = make("llava")
    model.config.vispe = {"version": "9.0", "schemes": ["v2pe"]}
    with pytest.raises(
        InputError, match=r"config\.vispe must have .* of vispe .*, got \['schemes'\], written by 9\.0"
    ):
        vispe.convert(model)


def test_the_absolute_table_of_a_loaded_tower_cannot_be_restored(tmp_path):
    model = with_tower(copy_of("llava"), "alibi2d")
    save(model, tmp_path)
    actual = vispe.from_pretrained(AUTO, tmp_path)
    for convert in (lambda: vispe.restore(actual), lambda: vispe.convert(actual, "alibi2d", keep_abs=True)):
        with pytest.raises(UnsupportedCombination, match="saved without its absolute table"):
            convert()
    same_model(actual, model, "llava")
    vispe.convert(actual, "rope_mixed")


def test_new_weights_are_logged(tmp_path):
    model = with_tower(copy_of("llava"), "alibi2d(slopes=learned)")
    save(model, tmp_path)
    with pytest.warns(UserWarning, match=LOADED):
        plain = AUTO.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="4 weights of the encoding were initialised"):
        vispe.convert(plain)
