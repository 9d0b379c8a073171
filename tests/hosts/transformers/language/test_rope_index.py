"""Position ids that collators compute before the call, and position ids of other origin."""

import inspect

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import HOST_SCHEME, converted, copy_of, scheme_of, stock
from tests.hosts.transformers.tiny import CACHE, FAMILIES, QWEN, batch, needs
from tests.products import partly
from vispe.errors import InputError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SPECS = ("videorope", "circlerope", "mmrope(scale=[1.0,2.0,1.0])", "omnirope", "v2pe(stride=4)", "vrope")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "attention_mask", "mm_token_type_ids")


def everything(family):
    return batch(family, [7], [3, "image", 4, "wide", 2], [2, "video", 3])


def requested(model, sample):
    """Return the result of `get_rope_index` for a batch."""
    return model.model.get_rope_index(
        sample["input_ids"], **{k: sample[k] for k in GRIDS if k in sample.inputs and k != "input_ids"}
    )


def keys_of(sample):
    return (sample["attention_mask"].cumsum(1) - 1).clamp(min=0)[None]


def own_of(family):
    """Return the spec of the position ids of the stock model."""
    seconds = ",tokens_per_second=4.0" if family == "qwen2_5_vl" else ""
    return f"{HOST_SCHEME[family]}(after=side{seconds})"


@partly(1)
@cases("spec", SPECS)
@cases("family", QWEN)
def test_ids_equal_those_of_the_scheme(family, spec):
    model, sample = converted(family, spec), everything(family)
    scheme, mask = scheme_of(family, spec), sample.stream.mask
    positions = scheme.coordinates(sample.stream)
    ids, delta = requested(model, sample)
    assert ids.shape == (scheme.axes, *sample["input_ids"].shape)
    assert torch.equal(ids.double(), positions.ids)
    assert torch.equal(delta.double(), positions.delta())
    assert (
        ids.dtype == delta.dtype == (torch.float64 if scheme.name in ("circlerope", "v2pe") else torch.long)
    )
    with torch.no_grad():
        expected = model(**sample.inputs).logits[mask]
        for position_ids in (ids, torch.cat([keys_of(sample), ids])):
            assert torch.equal(model(**sample.inputs, position_ids=position_ids).logits[mask], expected)


@cases("family", QWEN)
def test_ids_of_the_stock_scheme_equal_stock(family):
    if family == "qwen2_5_vl":
        needs("5.18", "the stock model rounds the seconds between frames down")
    sample = everything(family)
    before = requested(stock(family), sample)
    actual = requested(converted(family, own_of(family)), sample)
    assert actual[0].dtype == before[0].dtype
    assert torch.equal(actual[0], before[0])
    video_sample = batch(
        family, [7], [3, "image", 4, "wide", 2]
    )  # of a long video, before counts past the text
    assert torch.equal(
        requested(converted(family, own_of(family)), video_sample)[1],
        requested(copy_of(family), video_sample)[1],
    )


@cases("name", ["get_rope_index", "compute_3d_position_ids", "forward"])
@cases("family", FAMILIES)
def test_methods_keep_their_signatures(family, name):
    before, after = (getattr(m.model, name, None) for m in (stock(family), converted(family, "mrope_i")))
    if before is None:
        assert after is None
        return
    expected = dict(inspect.signature(before).parameters)
    actual = dict(inspect.signature(after).parameters)
    more = {"tile_grids", "mm_token_type_ids", "parallel_ids"} - set(expected) if name == "forward" else set()
    assert set(actual) - set(expected) == more
    assert {k: actual[k] for k in expected} == expected
    assert [k for k in actual if k in expected] == list(expected)


@cases("family", FAMILIES)
def test_positional_arguments(family):
    model, sample = converted(family, "mrope_i"), batch(family, [3, "image", 4], [2, "wide", 3])
    order = [p for p in inspect.signature(stock(family).model.forward).parameters if p != "kwargs"]
    with torch.no_grad():
        actual = model.model(*(sample.inputs.get(name) for name in order)).last_hidden_state
        expected = model.model(**sample.inputs).last_hidden_state
        assert torch.equal(actual, expected)
        with pytest.raises(TypeError, match=f"takes {len(order)} positional arguments"):
            model.model(*([None] * (len(order) + 1)))


@partly(2)
@cases("rows", [3, 4])
@cases("spec", ["videorope", "mmrope(scale=[1.0,2.0,1.0])", "omnirope", "vrope", "v2pe"])
@cases("family", QWEN)
def test_stock_ids_are_rejected(family, spec, rows):
    """They come from a collator with a stock model, or with its own copy of the function."""
    if family == "qwen2_5_vl":
        needs("5.18", "the stock model rounds the seconds between frames down")
    model, sample = converted(family, spec), everything(family)
    ids = requested(stock(family), sample)[0]
    ids = torch.cat([keys_of(sample), ids]) if rows == 4 else ids
    error, words = InputError, "those of the stock model"
    if len(ids) not in (model.model.vispe_scheme.axes, model.model.vispe_scheme.axes + 1):
        error, words = ShapeError, "get_rope_index of the converted model"
    elif spec == "vrope":
        words = "got ordinary ids and three axes"
    with torch.no_grad(), pytest.raises(error, match=words):
        model(**sample.inputs, position_ids=ids)


@cases("family", QWEN)
def test_four_rows_without_grids_are_refused_for_four_axes(family):
    """Packed text and embedded images: the first row numbers the tokens, the others are three axes."""
    model = converted(family, "vrope")
    tokens, keys = torch.arange(1, 9)[None], torch.arange(8)[None, None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert torch.equal(model(input_ids=tokens, position_ids=keys.expand(4, 1, 8)).logits, expected)
        with pytest.raises(InputError, match=r"Pass \(5, b, s\)"):
            model(input_ids=tokens, position_ids=torch.cat([keys, 2 * keys.expand(3, 1, 8)]))
        five = torch.cat([keys, 2 * keys.expand(4, 1, 8)])
        assert torch.equal(
            model(input_ids=tokens, position_ids=five).logits,
            model(input_ids=tokens, position_ids=five[1:]).logits,
        )


def test_ids_of_packed_samples_are_recognised():
    """One-dimensional ids before three axes mark the starts of samples, so packing is detected."""
    parts = [batch("qwen2_vl", [3, "image", 4], seed=s) for s in (1, 2)]
    one = {k: torch.cat([p[k] for p in parts], 1) for k in ("input_ids", "mm_token_type_ids")}
    one |= {k: torch.cat([p[k] for p in parts]) for k in ("pixel_values", "image_grid_thw")}

    def packed(model):
        return torch.cat([torch.cat([keys_of(p), requested(model, p)[0]]) for p in parts], 2)

    model = converted("qwen2_vl", "videorope")
    with torch.no_grad():
        actual = model(**one, position_ids=packed(model)).logits
        expected = torch.cat([model(**p.inputs).logits for p in parts], 1)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(InputError, match="those of the stock model"):
            model(**one, position_ids=packed(stock("qwen2_vl")))


@cases("family", QWEN)
def test_positions_of_a_call_can_be_requested(family):
    model, sample = converted(family, "v2pe(stride=4)"), everything(family)
    grids = {k: sample[k] for k in GRIDS if k in sample.inputs}
    positions_of = model.model.compute_3d_position_ids
    empty = dict.fromkeys(inspect.signature(positions_of).parameters)
    expected = scheme_of(family, "v2pe(stride=4)").coordinates(sample.stream)
    assert torch.equal(positions_of(**empty | {"input_ids": sample["input_ids"]} | grids), expected.ids)
    assert positions_of(**empty | {"input_ids": sample["input_ids"]}) is None
    with torch.no_grad():
        cache = model(**sample.inputs, use_cache=True)[CACHE]
    words = torch.ones(3, 2, dtype=torch.long)
    recorded = sample.with_tokens(words)["attention_mask"]
    actual = positions_of(**empty | {"input_ids": words, "attention_mask": recorded, CACHE: cache})
    assert torch.equal(actual, expected.decode(2))
    assert model.model.rope_deltas is None


def test_invalid_masks_and_dtypes_are_rejected():
    model, sample = converted("qwen2_vl", "videorope"), everything("qwen2_vl")
    numbered = sample["attention_mask"] * 2
    with pytest.raises(InputError, match="one by one"):
        model.model.get_rope_index(sample["input_ids"], attention_mask=numbered)
    half = keys_of(sample).bfloat16()
    with pytest.raises(InputError, match="rounds positions above 256"):
        model(**sample.inputs, position_ids=half)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["videorope", "v2pe(stride=4)", "vrope"])
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_of_the_inner_model_only(family, spec):
    """Its forward pass is correct inside a stock head; a head that computes positions itself raises."""
    sample, complete, inner = everything_of(family), converted(family, spec), copy_of(family)
    vispe.convert(inner.model, spec)
    with torch.no_grad():
        assert torch.equal(inner(**sample.inputs).logits, complete(**sample.inputs).logits)
    settings = {"max_new_tokens": 3, "do_sample": False}
    if family in QWEN:
        for inputs in (sample.inputs, batch(family, [5]).inputs):
            with pytest.raises(InputError, match=r"call vispe\.convert with the complete model"):
                inner.generate(**inputs, **settings)
    elif (
        family == "llava_onevision"
        and "mm_encoder_outputs" in inspect.signature(inner.model.forward).parameters
    ):
        with pytest.raises(InputError, match=r"call vispe\.convert with the complete model"):
            inner.generate(**sample.inputs, **settings)
    else:
        assert torch.equal(
            inner.generate(**sample.inputs, **settings), complete.generate(**sample.inputs, **settings)
        )
    vispe.convert(inner, spec)
    assert torch.equal(
        inner.generate(**sample.inputs, **settings), complete.generate(**sample.inputs, **settings)
    )
    vispe.restore(inner)
    assert torch.equal(
        inner.generate(**sample.inputs, **settings), stock(family).generate(**sample.inputs, **settings)
    )


def everything_of(family):
    return batch(family, [7], [3, "image", 4, "wide", 2])
