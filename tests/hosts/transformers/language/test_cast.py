"""Frequencies stay in float32 when a converted model is cast to half precision: angles at position 10,000 are exact."""

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_language_model import converted, stock
from tests.hosts.transformers.more import LACKING
from tests.hosts.transformers.reference import copy_of
from vispe.hosts.transformers.language.families import language_model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not encode text as:UserWarning")
FAMILIES = (
    "qwen2_vl",
    "qwen3_vl",
    "llava",
    "glm4v",
    "qwen3_5",
    "ernie4_5_vl_moe",
    "gemma3",
    "gemma3n",
    "gemma4",
)
FAMILIES += ("mistral3",) if "molmo2" in LACKING else ("molmo2", "mistral3")
CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "twice": lambda m: m.half().to(torch.bfloat16),
    "there and back": lambda m: m.bfloat16().float(),
    "by double": lambda m: m.double().bfloat16(),
    "copied": lambda m: copy.deepcopy(m.bfloat16()),
    "of the model inside": lambda m: m.model.bfloat16() and m,
    "of the language model": lambda m: language_model_of(m.model).bfloat16() and m,
    "restored": lambda m: vispe.restore(m.bfloat16()),
}


def frequencies(model):
    """Return all buffers with frequencies of a language model."""
    text = language_model_of(model.model)
    return {n: b for n, b in text.named_buffers() if n.startswith("rotary_emb") and n.endswith("inv_freq")}


def tables_of(model):
    """Return the rotation tables in the attention of each layer at positions 9,999 and 10,000."""
    actual, hooks = {}, []
    for number, layer in enumerate(language_model_of(model.model).layers):
        if hasattr(layer, "self_attn"):

            def keep(_, args, kwargs, number=number):
                actual[number] = kwargs["position_embeddings"]

            hooks.append(layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True))
    language_model_of(model.model)(
        input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[9999, 10000]])
    )
    for hook in hooks:
        hook.remove()
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cast_changes_frequencies(family, cast):
    expected = {name: buffer.clone() for name, buffer in frequencies(stock(family)).items()}
    assert expected
    actual = frequencies(CASTS[cast](copy.deepcopy(converted(family, "vrope"))))
    assert set(actual) == set(expected)
    for name, buffer in actual.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name])


@cases("family", FAMILIES)
@torch.no_grad()
def test_angles_of_a_far_position(family):
    """The layers of a model in bfloat16 rotate by the cosines of the float32 model, rounded once."""
    before = converted(family, "vrope")
    recorded = [tables_of(model) for model in (before, copy.deepcopy(before).to(torch.bfloat16))]
    assert recorded[0]
    assert set(recorded[0]) == set(recorded[1])
    for number, tables in recorded[0].items():
        for expected, actual in zip(tables, recorded[1][number], strict=True):
            assert torch.equal(actual, expected.to(actual.dtype))


def test_autocast_computes_the_same_angles():
    model = converted("llava", "vrope")
    sample = {"input_ids": torch.tensor([[5, 6]]), "position_ids": torch.tensor([[9999, 10000]])}
    actual = []

    def keep(_, args, kwargs):
        actual.append(kwargs["position_embeddings"])

    hook = (
        language_model_of(model.model).layers[0].self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    )
    with torch.no_grad():
        model(**sample)
        with torch.autocast("cpu", torch.bfloat16):
            model(**sample)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@pytest.mark.filterwarnings("ignore:.*is saved with:UserWarning")
def test_loaded_in_half_precision(tmp_path, caplog):
    model = copy_of("llava")
    expected = {name: buffer.clone() for name, buffer in frequencies(model).items()}
    model.save_pretrained(tmp_path / "stock")
    vispe.convert(model, "vrope").save_pretrained(tmp_path / "ours")
    cls = type(stock("llava"))
    loaded = (
        cls.from_pretrained(tmp_path / "stock", dtype=torch.bfloat16),
        vispe.from_pretrained(cls, tmp_path / "ours", dtype=torch.bfloat16),
    )
    for one in loaded:
        vispe.convert(one, "mrope_i")
        assert one.dtype == torch.bfloat16
        assert all(torch.equal(b, expected[n]) for n, b in frequencies(one).items())
    assert not [r for r in caplog.records if "frequencies" in r.getMessage()]


def test_cast_on_the_meta_device():
    with torch.device("meta"):
        model = type(stock("llava"))(copy.deepcopy(stock("llava").config))
    model = vispe.convert(model, "mrope_i").to(torch.bfloat16).to_empty(device="cpu")
    model.init_weights()
    expected = frequencies(stock("llava"))
    for name, buffer in frequencies(model).items():
        assert torch.equal(buffer, expected[name])


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_a_model_cast_before_conversion_is_reported(family, caplog):
    """Its text keeps the angles of the stock model, which are wrong at large positions."""
    model = vispe.convert(copy_of(family, 1, torch.bfloat16), "mrope_i")
    assert "angles at position 10,000 are off by up to 39 radians" in caplog.text
    expected = frequencies(copy_of(family, 1, torch.bfloat16))
    assert all(torch.equal(buffer, expected[name]) for name, buffer in frequencies(model).items())
    caplog.clear()
    vispe.convert(copy_of(family), "mrope_i").bfloat16()
    assert not caplog.text
