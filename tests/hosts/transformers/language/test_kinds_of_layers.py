"""Layer types with different frequencies (Gemma): a scheme changes coordinates, each type keeps its frequencies."""

import copy
import types

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_more_families import converted, logits
from tests.hosts.transformers.more import KINDS, class_of, prompt, stock, text_part, vision_part
from tests.hosts.transformers.tiny import IMAGE, VIDEO, needs, transformers
from tests.products import partly
from vispe.errors import InputError, UnsupportedHost
from vispe.hosts.transformers.language.conversion_record import describe_vlm
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.rotary_detection import kinds_of, rotaries_of
from vispe.multimodal import Stream, Text, Video, create_scheme

kinds = cases("family", KINDS)


def rotations_of(model, inputs):
    """Return the rotation of queries and keys in each layer."""
    recorded, hooks = {}, []
    for number, layer in enumerate(language_model_of(model.model).layers):

        def keep(_, args, kwargs, number=number):
            recorded[number] = kwargs["position_embeddings"]

        hooks.append(layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True))
    actual = logits(model, inputs)
    for hook in hooks:
        hook.remove()
    return actual, recorded


def rates_of(config, kind, pairs):
    """Return the frequencies of a layer type (pairs,), float64."""
    rope = config.rope_parameters[kind]
    rates = rope["rope_theta"] ** (-torch.arange(0, 2 * pairs, 2).double() / (2 * pairs))
    rates[int(pairs * rope.get("partial_rotary_factor", 1.0)) :] = 0
    return rates


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("spec", ["vrope", "mrope_i", "v2pe", "videorope"])
def test_layer_types_have_different_angles(family, spec):
    sample, model = prompt(family), converted(family, spec)
    changed, recorded = rotations_of(model, sample.inputs)
    config, scheme = language_model_of(model.model).config, model.model.vispe_scheme
    ids = scheme.coordinates(Stream.of([sample.segments])).ids
    for number, kind in enumerate(config.layer_types):
        pairs = recorded[number][0].shape[-1] // 2
        assert pairs == (32 if family.startswith("gemma4") and kind == "full_attention" else 16)
        rates = rates_of(config, kind, pairs)
        turning = int((rates > 0).sum())
        axes = scheme.allocation(turning).tolist() + [0] * (pairs - turning)
        angle = torch.stack([ids[axis, 0] * rate for axis, rate in zip(axes, rates, strict=True)], -1)
        angle = torch.cat([angle, angle], -1)
        for actual, expected in zip(recorded[number], (angle.cos(), angle.sin()), strict=True):
            torch.testing.assert_close(actual[0].double(), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(changed, logits(stock(family), sample.inputs), atol=1e-4)


@pytest.mark.slow
@kinds
def test_attention_within_images_is_bidirectional(family):
    """Gemma derives these masks from one-dimensional position ids."""
    inputs = dict(prompt(family).inputs)
    types = (inputs["input_ids"] == IMAGE).long()
    if family in ("gemma3", "shieldgemma2"):
        inputs["token_type_ids"] = types
    if family.startswith("gemma4"):
        inputs["mm_token_type_ids"] = types
    for sample in (inputs, {n: v for n, v in inputs.items() if n != "attention_mask"}):
        expected = logits(stock(family), sample)
        assert torch.equal(logits(converted(family, "rope1d"), sample), expected)
        tokens = (
            m.generate(**sample, max_new_tokens=4, do_sample=False)
            for m in (converted(family, "rope1d"), stock(family))
        )
        assert torch.equal(*tokens)
    one_way = logits(stock(family), prompt(family).inputs)
    assert torch.equal(one_way, expected) == (family in ("gemma3n", "step3p7"))


@pytest.mark.slow
@kinds
def test_a_window_that_is_shorter_than_the_prompt(family):
    model, inputs = copy.deepcopy(stock(family)), prompt(family).inputs
    language_model_of(model.model).config.sliding_window = 5
    for layer in language_model_of(model.model).layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = 5
    before = logits(model, inputs), model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert not torch.allclose(before[0], logits(stock(family), inputs), atol=1e-4)
    vispe.convert(model, "rope1d")
    assert torch.equal(logits(model, inputs), before[0])
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), before[1])
    vispe.convert(model, "vrope")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    longer = (
        inputs
        | {n: torch.ones_like(tokens[:, :-1]) for n in ("attention_mask",)}
        | {"input_ids": tokens[:, :-1]}
    )
    assert torch.equal(logits(model, longer)[:, -8:].argmax(-1), tokens[:, -8:])


@kinds
def test_described_restored_and_emptied(family):
    inputs, model = prompt(family).inputs, converted(family, "mrope_i")
    assert "in layers of full_attention: " in describe_vlm(model)
    assert "in layers of sliding_attention: t h w t h w" in describe_vlm(model)
    text = language_model_of(model.model)
    expected = {n: b.clone() for n, b in text.named_buffers() if n.startswith("vispe_axis")}
    assert set(expected) == {f"vispe_axis_of_pair_{kind}_attention" for kind in ("full", "sliding")}
    for name in expected:
        getattr(text, name).fill_(7)
    model.to("cpu", torch.float32)
    assert all(torch.equal(getattr(text, n), b) for n, b in expected.items())
    model = vispe.restore(converted(family, "mrope_i"))
    assert torch.equal(logits(model, inputs), logits(stock(family), inputs))
    assert not any(
        n.startswith("vispe") for layer in language_model_of(model.model).layers for n in vars(layer)
    )


@partly(2)
@kinds
def test_on_meta_and_filled_later(family):
    expected = converted(family, "vrope")
    with torch.device("meta"):
        # a copy: conversion writes into the configuration, and `stock` is shared by all tests
        model = class_of(family)(copy.deepcopy(stock(family).config))
    model = vispe.convert(model.eval(), "vrope").to_empty(device="cpu")
    model.init_weights()
    model.load_state_dict(expected.state_dict())
    assert torch.equal(logits(model, prompt(family).inputs), logits(expected, prompt(family).inputs))


@partly(2)
@kinds
def test_checkpointing_does_not_change_gradients(family):
    inputs = prompt(family).inputs
    if family == "gemma3":
        inputs = inputs | {"token_type_ids": (inputs["input_ids"] == IMAGE).long()}
    if family == "gemma4":
        inputs = inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).long()}
    actual = []
    for saving in (False, True):
        model = converted(family, "vrope").train()
        if saving:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(1)
        out = model(**inputs).logits
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        actual.append([w.grad for w in language_model_of(model.model).layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True) if a is not None)
    assert sum(g is not None and bool(g.abs().sum() > 0) for g in actual[0]) > 10


def test_shared_keys_and_different_key_heads():
    """Gemma 4: the last layers reuse keys of earlier ones; full attention may have other key heads."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 3
    part = text_part("gemma4") | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": kinds}
    part |= {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    more = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": 299,
        "tie_word_embeddings": False,
    }
    config = transformers.Gemma4Config(text_config=part, vision_config=vision_part("gemma4"), **more)
    stock_model = transformers.Gemma4ForConditionalGeneration(config)
    model, inputs = stock_model.eval(), prompt("gemma4").inputs
    before = logits(model, inputs), model.generate(**inputs, max_new_tokens=4, do_sample=False)
    vispe.convert(model, "rope1d")
    assert torch.equal(logits(model, inputs), before[0])
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), before[1])
    vispe.convert(model, "vrope")
    assert not torch.allclose(logits(model, inputs), before[0], atol=1e-4)
    # takes the last token only where it can
    generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    longer = inputs | {"input_ids": generated[:, :-1], "attention_mask": torch.ones_like(generated[:, :-1])}
    assert torch.equal(logits(model, longer)[:, -4:].argmax(-1), generated[:, -4:])


def test_frames_of_gemma_4_are_images_with_words_between():
    needs("5.23", "the stock model expects frames of another shape")
    inputs = dict(prompt("gemma4").inputs)
    inputs.pop("pixel_values"), inputs.pop("image_position_ids")
    positions = torch.tensor([[[x, y] for y in range(4) for x in range(6)]] * 2)
    ids = [5, 6, 292, *[291] * 6, 293, 7, 292, *[291] * 6, 293, 8]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    inputs |= {"pixel_values_videos": torch.rand(2, 24, 48), "video_position_ids": positions}
    inputs["num_frames_per_video"] = torch.tensor([2])
    assert torch.equal(logits(converted("gemma4", "rope1d"), inputs), logits(stock("gemma4"), inputs))
    segments = [Text(3), Video(1, 2, 3), Text(3), Video(1, 2, 3), Text(2)]
    where = create_scheme("mrope_i").coordinates(Stream.of([segments])).ids
    model = converted("gemma4", "mrope_i")
    by_hand = logits(model, inputs | {"position_ids": where})
    torch.testing.assert_close(logits(model, inputs), by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@kinds
def test_schemes_that_need_all_keys_are_rejected_with_windows(family):
    for option in ({"late_rotation": True}, {"self_extend": (2, 4)}, {"parallel": "pine"}):
        with pytest.raises(UnsupportedHost, match=r"sliding window"):
            converted(family, "mrope_i", **option)


def test_the_error_names_images_without_sizes():
    inputs = prompt("gemma4").inputs | {"image_position_ids": None}
    with pytest.raises(InputError, match="6 image placeholders exceed the image grids"):
        converted("gemma4", "vrope")(**inputs)


def by_layer(old):
    """Return the forward of a rotary embedding that is called with the layer index, or a keyword for its type."""

    def forward(self, x, position_ids, layer_idx=None, layer_type=None):
        assert layer_idx is None or isinstance(layer_idx, int)
        kind = self.config.layer_types[layer_idx] if layer_type is None else layer_type
        return old(self, x, position_ids, kind)

    return forward


@partly(1)
@kinds
@cases("grouped", [False, True])
def test_rotary_embeddings_called_per_layer(family, grouped, monkeypatch):
    """As on the development branch of transformers: (x, position_ids, layer_idx, layer_type)."""
    expected = logits(converted(family, "vrope"), prompt(family).inputs)
    model = copy.deepcopy(stock(family))
    text = language_model_of(model.model)
    cls = type(text.rotary_emb)
    old = cls.forward
    monkeypatch.setattr(cls, "forward", by_layer(old))
    if grouped:
        text.rotary_emb.layer_idx_to_group = dict(enumerate(text.config.layer_types))
    with pytest.MonkeyPatch.context() as patch:
        vispe.convert(model, "vrope")
        patch.setattr(cls, "forward", old)  # what the model calls while it runs
        assert torch.equal(logits(model, prompt(family).inputs), expected)
    assert set(text.vispe_text.rotary) == {"full_attention", "sliding_attention"}


def test_custom_names_of_layer_groups():
    """Only the layer index determines its group."""

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer_idx_to_group = {0: "near", 1: "far", 2: "near"}
            for name, base in (("near", 10.0), ("far", 100.0)):
                self.register_buffer(f"{name}_inv_freq", base ** -(torch.arange(4) / 4))
                setattr(self, f"{name}_attention_scaling", 1.0)

        def forward(self, x, position_ids, layer_idx=None, layer_type=None):
            assert layer_type is None
            rates = getattr(self, f"{self.layer_idx_to_group[layer_idx]}_inv_freq")
            angle = (position_ids[..., None].float() * rates).repeat(1, 1, 2)
            return angle.cos().to(x), angle.sin().to(x)

    text = torch.nn.Module()
    text.rotary_emb, text.layers = Rotary(), torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    text.config = types.SimpleNamespace(layer_types=["full_attention"] * 3)
    assert kinds_of(text) == ["near", "far", "near"]
    actual = rotaries_of(text)
    assert set(actual) == {"near", "far"}
    assert torch.equal(actual["far"].rates(text), text.rotary_emb.far_inv_freq)
