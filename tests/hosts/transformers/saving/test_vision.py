"""Vision models of transformers saved with an encoding: they load completely; loading as stock always warns."""

import copy
import json
import warnings

import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.tiny import batch
from tests.hosts.transformers.vision.test_models import logits, with_timm
from tests.products import partly
from vispe.errors import InputError, UnsupportedCombination

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = SHAPE | {"image_size": 16, "patch_size": 4}
WORDS = SHAPE | {
    "vocab_size": 20,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECS = ("alibi2d", "alibi2d(slopes=learned)+irpe", "rope_mixed", "rpb+learn", "none")


def build(name, seed=0):
    torch.manual_seed(seed)
    if name.startswith("Timm"):
        shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
        config = transformers.TimmWrapperConfig(
            architecture="vit_tiny_patch16_224", model_args=shape, num_labels=3
        )
    elif name in ("CLIPModel", "SiglipModel", "CLIPForImageClassification"):
        kind = "CLIPConfig" if name.startswith("CLIP") else "SiglipConfig"
        config = getattr(transformers, kind)(
            text_config=WORDS, vision_config=VISION, projection_dim=16, num_labels=3
        )
    else:
        kind = name.replace("ModelWithProjection", "Config").replace("Model", "Config")
        config = getattr(transformers, kind)(**VISION)
    return getattr(transformers, name)(config).eval()


MODELS = (
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "CLIPModel",
    "CLIPForImageClassification",
    "SiglipVisionModel",
    "SiglipModel",
    "InternVLVisionModel",
    "TimmWrapperModel",
    "TimmWrapperForImageClassification",
)


def outputs(model):
    """Return the outputs of a copy for two images; weights in a mapped file may be aligned differently."""
    model = copy.deepcopy(model)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    words = {"input_ids": torch.tensor([[1, 3, 4, 2]])} if hasattr(model, "text_model") else {}
    with torch.no_grad():
        out = model(pixel_values=pixels, **words)
    return [v for v in out.values() if isinstance(v, torch.Tensor)]


def converted(name, spec):
    model = build(name)
    vispe.convert(model, spec)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "pos_enc." in path or "position_embedding" in path:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def same(actual, expected):
    assert actual.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(outputs(actual), outputs(expected), strict=True))
    assert all(a.isfinite().all() for a in outputs(actual))


@partly(0.25)
@cases("spec", SPECS)
@cases("name", MODELS)
def test_a_vision_model_is_loaded(name, spec, tmp_path):
    model = converted(name, spec)
    timm_made = name.startswith("Timm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert [("vispe.from_pretrained" in str(w.message)) for w in caught] == ([] if timm_made else [True])
    auto = (
        transformers.AutoModelForImageClassification if "Classification" in name else transformers.AutoModel
    )
    auto = getattr(transformers, name) if "Projection" in name else auto
    same(vispe.from_pretrained(auto, tmp_path), model)
    rebuilt = type(model)(model.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    same(rebuilt, model)
    same(type(model).from_pretrained(tmp_path), model)
    if timm_made:  # transformers hands `model_args` to timm, which knows vispe's words once vispe is imported
        with warnings.catch_warnings(action="error"):
            same(auto.from_pretrained(tmp_path), model)
    else:
        with pytest.warns(UserWarning, match="was loaded without"):
            auto.from_pretrained(tmp_path)


@cases("spec", ["fope", "fope+rpb", "rope_mixed(trainable=false)"])
def test_random_buffers_of_an_encoding_are_loaded(spec, tmp_path):
    model = converted("CLIPVisionModel", spec)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    same(vispe.from_pretrained(transformers.CLIPVisionModel, tmp_path), model)
    rounded = vispe.from_pretrained(transformers.CLIPVisionModel, tmp_path, dtype=torch.bfloat16)
    buffers = [(name, b) for name, b in model.named_buffers() if "pos_enc." in name]
    assert buffers
    assert all(torch.equal(rounded.get_buffer(name), b) for name, b in buffers)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_restoring_cleans_the_configuration(name):
    model, plain = build(name), build(name)
    vispe.convert(model, "alibi2d")
    assert json.loads(json.dumps(model.config.to_dict())) != json.loads(json.dumps(plain.config.to_dict()))
    vispe.convert(model, "rope_mixed")
    vispe.restore(model)
    assert model.config.to_dict() == plain.config.to_dict()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    same(model, plain)


def test_restoring_recovers_arguments_of_timm():
    config = copy.deepcopy(build("TimmWrapperModel").config)
    config.model_args["pos_embed"] = "none"
    model = transformers.TimmWrapperModel(config)
    vispe.convert(vispe.convert(model, "alibi2d"), "irpe")
    assert model.config.model_args["pos_embed"] == [{"name": "irpe"}]
    vispe.restore(model)
    assert model.config.model_args["pos_embed"] == "none"
    assert not hasattr(model.config, "vispe")


@cases("name", ["CLIPVisionModel", "TimmWrapperModel"])
def test_a_table_that_was_not_saved_cannot_be_restored(name, tmp_path):
    model = converted(name, "alibi2d")
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    actual = vispe.from_pretrained(getattr(transformers, name), tmp_path)
    with pytest.raises(UnsupportedCombination, match="absolute table"):
        vispe.restore(actual)
    same(actual, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "perception_lm"])
def test_a_tower_of_timm_in_a_language_model_is_loaded(kind, tmp_path):
    model = with_timm(kind)
    inputs = batch("llava", [3, "image", 2]).inputs
    with torch.no_grad():
        vispe.convert(model, "rope_mixed")
        expected = logits(model, inputs)
        model.save_pretrained(tmp_path)
        for load in (type(model).from_pretrained, lambda path: vispe.from_pretrained(type(model), path)):
            assert torch.equal(logits(load(tmp_path).eval(), inputs), expected)


@pytest.mark.slow
def test_a_converted_part_is_saved_with_the_complete_model(tmp_path):
    model = build("CLIPModel")
    vispe.convert(model.vision_model, "alibi2d")
    with pytest.warns(UserWarning, match="the encoding alibi2d"):
        model.save_pretrained(tmp_path)
    same(vispe.from_pretrained(transformers.AutoModel, tmp_path), model)
    wrapped = build("TimmWrapperModel")
    vispe.convert(wrapped.timm_model, "irpe")
    wrapped.save_pretrained(tmp_path / "timm")
    same(vispe.from_pretrained(transformers.AutoModel, tmp_path / "timm"), wrapped)


def test_a_class_that_is_not_a_model_is_rejected(tmp_path):
    with pytest.raises(InputError, match="must be a class of transformers that loads models"):
        vispe.from_pretrained("AutoModel", tmp_path)
    build("CLIPVisionModel").config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="got CLIPVisionConfig, which returned a CLIPVisionConfig"):
        vispe.from_pretrained(transformers.CLIPVisionConfig, tmp_path)
