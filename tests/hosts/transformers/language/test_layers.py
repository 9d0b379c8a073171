"""A scheme for each layer: logits with explicit angles per layer, decoding, saving, errors."""

import contextlib
import copy
import json
import sys
import warnings

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers import more
from tests.hosts.transformers.reference import (
    QWEN,
    copy_of,
    generated,
    looped,
    recomputed,
    rotated,
    same,
    scheme_of,
    stock,
)
from tests.hosts.transformers.tiny import CACHE, FAMILIES, WITH_VIDEO, batch
from vispe.errors import OptionError, UnsupportedCombination, VispeError
from vispe.hosts.transformers.serving import serve_positions
from vispe.multimodal import alternating, pyramid

KINDS = {
    "alternating": lambda layers: alternating(["circlerope", "mrope"], layers),
    "pyramid": lambda layers: pyramid(layers, rings=3, every=1),
    "fractions and integers": lambda layers: alternating(["v2pe(stride=8)", "vrope"], layers),
}


def converted(family, kind, **options):
    model = copy_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of schemes that are not text-exact
        return vispe.convert(model, KINDS[kind](len(model.model.language_model.layers)), **options)


def everything(family, padding="left"):
    rows = [[7], [3, "image", 4, "wide", 2], [1, "wide", 5], ["image"]]
    return batch(family, *rows, *([[2, "video", 3]] if family in WITH_VIDEO else []), padding=padding)


@contextlib.contextmanager
def angles_of_layers(model, angles):
    """Make the layers of a stock model rotate by these angles, (b, 1, s, pairs) for each call in order."""
    module = sys.modules[type(model.model.language_model.layers[0].self_attn).__module__]
    before, calls = module.apply_rotary_pos_emb, []

    def apply(q, k, *_, **__):
        angle = angles[len(calls) % len(angles)]
        calls.append(angle)
        cos, sin = angle.float().cos(), angle.float().sin()
        return rotated(q, cos, sin), rotated(k, cos, sin)

    module.apply_rotary_pos_emb = apply
    try:
        yield calls
    finally:
        module.apply_rotary_pos_emb = before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_rotates_by_its_scheme(family, kind):
    sample, model = everything(family), stock(family)
    text = model.model.language_model
    layers, frequencies = KINDS[kind](len(text.layers)), text.rotary_emb.inv_freq.double()
    angles = []
    for layer in range(len(text.layers)):
        scheme = scheme_of(family, str(layers.scheme(layer)))
        ids = scheme.coordinates(sample.stream).ids
        axes = scheme.allocation(len(frequencies))
        angles.append(torch.stack([ids[a] * f for a, f in zip(axes, frequencies, strict=True)], -1)[:, None])
    mask = sample.stream.mask.long()
    keys = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = sample.without("mm_token_type_ids", "attention_mask", "second_per_grid_ts")
    inputs["position_ids"] = keys.expand(4, -1, -1) if family in QWEN else keys
    with torch.no_grad(), angles_of_layers(model, angles) as calls:
        expected = model(**inputs, attention_mask=mask).logits
    assert len(calls) == len(angles)
    for late in (False, True):
        with torch.no_grad():
            actual = converted(family, kind, late_rotation=late)(**sample.inputs).logits
        torch.testing.assert_close(
            actual[sample.stream.mask], expected[sample.stream.mask], rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_recomputation_without_a_cache(family, kind, late):
    model = converted(family, kind, late_rotation=late)
    for rows in ([[3, "image", 4, "wide", 2]], [[7], [3, "image", 4], [1, "wide", 2]]):
        sample = batch(family, *rows)
        expected = recomputed(model, sample, 4)
        same(generated(model, sample, 4), expected)
        same(looped(model, sample, 4), expected)


def test_beams_reorder_the_counters_of_their_rows():
    """Rows with different counters are reordered repeatedly: each has the scores of a full recomputation."""
    model, sample = (
        converted("qwen2_vl", "alternating"),
        batch("qwen2_vl", [7], [3, "image", 4], [1, "wide", 2]),
    )
    out = model.generate(
        **sample.inputs,
        max_new_tokens=4,
        num_beams=3,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, sample["input_ids"].shape[1] :]
    with torch.no_grad():
        logits = model(**sample.with_tokens(tokens)).logits[:, -5:-1]
    expected = logits.log_softmax(-1).gather(2, tokens[..., None]).sum((1, 2))
    torch.testing.assert_close(out.sequences_scores, expected, rtol=1e-5, atol=1e-5)


def test_another_image_after_an_answer():
    """Each scheme continues from its own counter, including the tokens in the cache."""
    model = converted("qwen2_vl", "alternating")
    complete = batch("qwen2_vl", [3, "image", 4, "wide", 2])
    first = batch("qwen2_vl", [3, "image", 4])
    done = first["input_ids"].shape[1]
    with torch.no_grad():
        expected = model(**complete.inputs).logits
        out = model(**first.inputs, use_cache=True)
        grids, pixels = complete["image_grid_thw"], complete["pixel_values"]
        second = model(
            input_ids=complete["input_ids"][:, done:],
            pixel_values=pixels[int(grids[:1].prod()) :],
            image_grid_thw=grids[1:],
            **{CACHE: out[CACHE]},
        ).logits
    torch.testing.assert_close(second, expected[:, done:], rtol=1e-5, atol=1e-5)


@cases("family", ["qwen2_vl", "llava"])
def test_it_is_saved_and_restored(family, tmp_path):
    model, sample = converted(family, "alternating"), everything(family)
    assert "mrope" in vispe.describe(model)
    assert "in layers of circlerope: t" in vispe.describe(model)
    with torch.no_grad():
        expected = model(**sample.inputs).logits
    record = json.loads(json.dumps(model.model.config.vispe["scheme"]))
    assert record["of_layer"] == [0, 1]
    with pytest.warns(UserWarning, match="vispe"):
        model.save_pretrained(tmp_path)
    copies = [vispe.from_pretrained(type(stock(family)), tmp_path).eval(), copy.deepcopy(model)]
    vispe.convert(copies[1], "rope1d")
    vispe.convert(copies[1], model.model.vispe_scheme)
    for one in copies:
        with torch.no_grad():
            assert torch.equal(one(**sample.inputs).logits, expected)
    vispe.restore(model)
    with torch.no_grad():
        assert torch.equal(model(**sample.inputs).logits, stock(family)(**sample.inputs).logits)


def test_layers_that_differ_in_their_frequencies_too():
    model = more.copy_of("gemma3")
    one = vispe.convert(copy.deepcopy(model), "mrope")
    layers = alternating(["mrope", "vrope"], len(model.model.language_model.layers))
    vispe.convert(model, layers)
    assert "in layers of sliding_attention with vrope" in vispe.describe(model)
    inputs = more.prompt("gemma3").inputs
    with torch.no_grad():
        both, other = model(**inputs).logits, one(**inputs).logits
        alike = vispe.convert(model, alternating([{"name": "mrope"}], len(layers.of_layer)))(**inputs).logits
    assert (both - other).abs().max() > 1e-3
    assert torch.equal(alike, other)


@pytest.mark.slow
def test_a_compiled_prompt():
    model, sample = converted("qwen2_vl", "alternating"), everything("qwen2_vl")
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(**sample.inputs).logits
        actual = torch.compile(model, backend="eager")(**sample.inputs).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_refusals(tmp_path):
    model, layers = copy_of("qwen2_vl"), alternating(["circlerope", "mrope"], 2)
    with pytest.raises(
        OptionError, match="Qwen2VLTextModel needs one scheme for each of 2 layers, got schemes for 5"
    ):
        vispe.convert(model, alternating(["circlerope", "mrope"], 5))
    with pytest.raises(UnsupportedCombination, match="parallel='pine' determines distances in all layers"):
        vispe.convert(model, layers, parallel="pine")
    with pytest.raises(
        UnsupportedCombination, match=r"Options \(radius\) cannot be combined with per-layer schemes"
    ):
        vispe.convert(model, layers, radius=3.0)
    with pytest.raises(UnsupportedCombination, match="The counter of bilevel has several numbers"):
        vispe.convert(model, alternating(["bilevel", "mrope"], 2))
    assert type(model) is type(stock("qwen2_vl"))
    vispe.convert(model, layers)
    sample = everything("qwen2_vl")
    with pytest.raises(OptionError, match="got 2 counters of layers"):
        model.model.get_rope_index(
            sample["input_ids"],
            image_grid_thw=sample["image_grid_thw"],
            video_grid_thw=sample["video_grid_thw"],
        )
    model.config.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedCombination, match="Engines need a scheme with one counter"):
        serve_positions(tmp_path / "model", positions=64)
    with pytest.raises(VispeError, match="VisionTransformer does not support the position scheme circlerope"):
        vispe.convert(timm.create_model("test_vit"), layers)
