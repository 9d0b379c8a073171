"""Rotation inside attention: equal outputs, a cache without positions, and positions that change later."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import copy_of, generated, recomputed, same
from tests.hosts.transformers.tiny import CACHE, FAMILIES, IMAGE, batch
from tests.products import partly
from vispe.errors import InputError, ShapeError, UnsupportedHost
from vispe.hosts.transformers.language.rope_in_attention import reposition
from vispe.multimodal import Image, Stream, Text, alternating, create_scheme

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROWS = ([7], [3, "image", 4], [1, "wide", 1, "image", 2])


def late(family, spec, layers=2, **kwargs):
    model = copy_of(family, **kwargs)
    text = model.model.language_model
    text.layers = text.layers[:layers]
    text.config.num_hidden_layers = layers
    if getattr(text.config, "layer_types", None):  # from which older versions build the cache
        text.config.layer_types = text.config.layer_types[:layers]
    return vispe.convert(model, spec, late_rotation=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_rotation_equals_early_rotation(family, dtype):
    sample = batch(family, *ROWS)
    early = vispe.convert(copy_of(family, dtype=dtype), "mrope_i")
    model = late(family, "mrope_i", dtype=dtype)
    with torch.no_grad():
        assert torch.equal(early(**sample.inputs).logits, model(**sample.inputs).logits)
        tokens = [m.generate(**sample.inputs, max_new_tokens=4, do_sample=False) for m in (early, model)]
        assert torch.equal(*tokens)
        assert "inside the attention" in vispe.describe(model)
        vispe.restore(model)
        assert torch.equal(
            model(**sample.inputs).logits, copy_of(family, dtype=dtype)(**sample.inputs).logits
        )


@cases("implementation", ["eager", "sdpa"])
def test_every_attention_of_the_host(implementation):
    sample = batch("qwen2_5_vl", *ROWS)
    model = copy_of("qwen2_5_vl")
    model.set_attn_implementation(implementation)
    vispe.convert(model, "vrope", late_rotation=True)
    same(generated(model, sample, 3), recomputed(model, sample, 3))
    vispe.restore(model)
    assert model.model.language_model.config._attn_implementation == implementation


@partly(2)
@cases("where", ["model", "model.model", "model.model.language_model", "config"])
@cases("spec", ["mhrope(sections=[1,0,1])", "v2pe(stride=4)"])
@cases("family", ["qwen2_vl", "llava"])
def test_attention_implementation_set_after_conversion(family, spec, where):
    sample = batch(family, *ROWS)
    model = vispe.convert(copy_of(family, 2), spec, late_rotation=True)
    text = model.model.language_model
    with torch.no_grad():
        expected = model(**sample.inputs).logits
        if where == "config":
            text.config._attn_implementation = "eager"
        else:
            {"model": model, "model.model": model.model}.get(where, text).set_attn_implementation("eager")
        actual = model(**sample.inputs, output_attentions=True)
    mask = sample.stream.mask
    torch.testing.assert_close(actual.logits[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert all(a is not None for a in actual.attentions)  # those of eager: sdpa gives none
    same(generated(model, sample, 3, cache_implementation="static"), recomputed(model, sample, 3))
    text.config._attn_implementation = "paged|sdpa"
    with pytest.raises(UnsupportedHost, match=r"got 'paged\|sdpa'"):
        model(**sample.inputs)
    model.set_attn_implementation("sdpa")
    vispe.restore(model)
    assert text.config._attn_implementation == "sdpa"
    assert torch.equal(model(**sample.inputs).logits, copy_of(family, 2)(**sample.inputs).logits)


@cases("family", FAMILIES)
def test_cached_tokens_are_repositioned(family):
    """With one layer the cache depends on tokens only, so another stride equals a prompt with that stride."""
    sample, after = batch(family, [2, "image", 3], [1, "wide", 1, "image", 2]), torch.tensor([[5], [6]])
    old, new = (late(family, f"v2pe(stride={stride})", layers=1) for stride in (16, 4))
    mask = torch.cat([sample["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)

    def step(model, cache):
        return model(input_ids=after, attention_mask=mask, **{CACHE: cache}).logits

    with torch.no_grad():
        expected = step(new, _again(new, sample))
        cache = _again(old, sample)
        unmoved = step(old, cache)
        cache.crop(-1)
        reposition(cache, create_scheme("v2pe(stride=4)").coordinates(sample.stream))
        moved = step(old, cache)
        with pytest.raises(InputError, match="the last image in it"):
            cache.crop(-8)
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-5)
    assert (unmoved - expected).abs().max() > 1e-3


@torch.no_grad()
def test_repositioned_tokens_are_not_cropped_before_an_image_of_one_token():
    model, text = late("qwen2_vl", "v2pe"), torch.tensor([[5, 6, 7, IMAGE, 8, 9, 4]])
    pixels = {"pixel_values": torch.randn(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    cache = model(input_ids=text, **pixels, use_cache=True)[CACHE]
    reposition(
        cache, create_scheme("v2pe(stride=4)").coordinates(Stream.of([[Text(3), Image(1, 1), Text(3)]]))
    )
    with pytest.raises(InputError, match=r"which ends at token 4, got a crop to 3"):
        cache.crop(-4)
    cache.crop(-3)
    assert cache.get_seq_length() == 4


def _again(model, sample):
    return model(**sample.inputs, use_cache=True)[CACHE]


def test_invalid_repositioning():
    sample = batch("llava", [2, "image", 3])
    early = vispe.convert(copy_of("llava"), "mrope_i")
    coordinates = create_scheme("mrope_i").coordinates(sample.stream)
    with torch.no_grad():
        cache = _again(early, sample)
        with pytest.raises(
            UnsupportedHost, match=r"already rotated\. Convert the model with late_rotation=True"
        ):
            reposition(cache, coordinates)
        cache = _again(late("llava", "v2pe"), sample)
    with pytest.raises(
        ShapeError, match=r"\(axes, rows, tokens\) of the cache, \(1, 1, \d+\), got \(3, 1, \d+\)"
    ):
        reposition(cache, coordinates)
    model = copy_of("llava")
    model.model.language_model.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(UnsupportedHost, match="sliding window"):
        vispe.convert(model, "mrope_i", late_rotation=True)


@cases("spec", ["vrope", "bilevel", "tad_rope", alternating(["v2pe", "mrope"], 2)])
@torch.no_grad()
def test_repositioning_with_equal_positions(spec):
    """Counters of several numbers, and of several schemes, continue unchanged."""
    model, sample = late("qwen2_vl", spec), batch("qwen2_vl", [2, "image", 3], [1, "wide", 1, "image", 2])
    longer = sample.with_tokens(torch.tensor([[5, 6], [7, 8]]))
    inputs = {"input_ids": longer["input_ids"][:, -2:], "attention_mask": longer["attention_mask"]}
    results = []
    for repeat in (False, True):
        cache = _again(model, sample)
        if repeat:
            reposition(cache, model.model.vispe_scheme.coordinates(sample.stream))
        results.append(model(**inputs, **{CACHE: cache}).logits)
    assert torch.equal(*results)


@torch.no_grad()
def test_packed_samples_stay_packed():
    model = late("qwen2_vl", "mrope_i")
    tokens, ids = torch.arange(1, 7)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    cache = model(input_ids=tokens, position_ids=ids)[CACHE]
    stream = Stream.of([[[Text(3)], [Text(3)]]])
    reposition(cache, create_scheme("mrope_i").coordinates(stream))
    with pytest.raises(InputError, match="packed samples"):
        model(input_ids=tokens[:, :1], **{CACHE: cache})
