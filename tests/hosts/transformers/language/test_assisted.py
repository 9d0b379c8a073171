"""Generation with an assistant model, and generation continued from a cache with the previous inputs."""

import copy

import pytest
import torch

from tests.cases import cases
from tests.hosts.transformers.reference import converted, copy_of, stock
from tests.hosts.transformers.tiny import CACHE, FAMILIES, QWEN, VIDEO, WITH_VIDEO, batch
from tests.products import partly
from vispe.errors import InputError

SETTINGS = {"max_new_tokens": 6, "do_sample": False}
OWN = {
    "qwen2_vl": "mrope(after=side)",
    "qwen2_5_vl": "mrope(after=side,tokens_per_second=4.0)",
    "qwen3_vl": "mrope_i(after=side,clip=true)",
}
SPECS = ("own", "v2pe(stride=4)", "vrope")


def named(family, spec):
    return OWN.get(family, "rope1d") if spec == "own" else spec


def fresh(model):
    """Return a model with its initial number of drafts, which adapts to the accepted tokens."""
    return copy.deepcopy(model)


@partly(1)
@cases("helper", ["itself", "stock", "lookup"])
@cases("spec", SPECS)
@cases("family", FAMILIES)
def test_an_assistant_does_not_change_the_output(family, spec, helper):
    model, sample = converted(family, named(family, spec)), batch(family, [3, "image", 4, "wide", 2])
    expected = model.generate(**sample.inputs, **SETTINGS)
    options = {
        "itself": {"assistant_model": fresh(model)},
        "stock": {"assistant_model": copy_of(family)},
        "lookup": {"prompt_lookup_num_tokens": 2},
    }[helper]
    assert torch.equal(model.generate(**sample.inputs, **SETTINGS, **options), expected)
    if spec == "own":
        assert torch.equal(expected, stock(family).generate(**sample.inputs, **SETTINGS))


@cases("family", WITH_VIDEO)
def test_an_assistant_does_not_change_the_output_for_videos(family):
    """The host passes seconds between frames to the assistant, but no grids."""
    model, sample = converted(family, "vrope"), batch(family, [3, "video", 2])
    expected = model.generate(**sample.inputs, **SETTINGS)
    assert torch.equal(model.generate(**sample.inputs, **SETTINGS, assistant_model=fresh(model)), expected)


@torch.no_grad()
def test_seconds_of_videos_in_an_earlier_turn():
    """Seconds without a grid belong to no video of the call."""
    model, first, turn = (
        converted("qwen2_5_vl", "v2pe"),
        batch("qwen2_5_vl", [3]),
        batch("qwen2_5_vl", [1, "image", 2]),
    )
    seconds = {"second_per_grid_ts": torch.tensor([0.5])}
    actual = [model(**sample.inputs, **seconds).logits for sample in (first, turn)]
    assert all(map(torch.equal, actual, (model(**sample.inputs).logits for sample in (first, turn))))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_assistant_of_a_stock_model(family):
    sample = batch(family, [3, "image", 4])
    expected = stock(family).generate(**sample.inputs, **SETTINGS)
    helper = fresh(converted(family, named(family, "own")))
    assert torch.equal(
        copy_of(family).generate(**sample.inputs, **SETTINGS, assistant_model=helper), expected
    )


@partly(2)
@cases("repeated", ["grids", "types", "nothing"])
@cases("spec", SPECS)
@cases("family", FAMILIES)
def test_generation_continues_with_inputs_of_the_previous_turn(family, spec, repeated):
    """A loop that repeats its inputs, except for the pixels, and reuses the cache."""
    model = converted(family, named(family, spec))
    sample = batch(family, [2, "image", 3], [3, "image", 4, "wide", 2])
    expected = model.generate(**sample.inputs, **SETTINGS)
    first = model.generate(**sample.inputs, **SETTINGS | {"max_new_tokens": 3}, return_dict_in_generate=True)
    longer = sample.with_tokens(first.sequences[:, sample["input_ids"].shape[1] :])
    dropped = {"pixel_values", "image_sizes", "batch_num_images"}
    dropped |= {"image_grid_thw"} if repeated != "grids" else set()
    dropped |= {"mm_token_type_ids"} if repeated == "nothing" else set()
    continued = {k: v for k, v in longer.items() if k not in dropped}
    tokens = model.generate(**continued, **{CACHE: first[CACHE]}, **SETTINGS | {"max_new_tokens": 3})
    assert torch.equal(tokens, expected)
    if spec == "own":
        assert torch.equal(tokens, stock(family).generate(**sample.inputs, **SETTINGS))


@partly(1)
@cases("spec", SPECS)
@cases("family", FAMILIES)
def test_one_dimensional_position_ids_with_images(family, spec):
    model, sample = (
        converted(family, named(family, spec)),
        batch(family, [2, "image", 3], [3, "image", 4, "wide", 2]),
    )
    expected = model.generate(**sample.inputs, **SETTINGS)
    mask = sample["attention_mask"]
    ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    assert torch.equal(model.generate(**sample.inputs, position_ids=ids, **SETTINGS), expected)


@cases("family", QWEN)
def test_images_without_grids_raise(family):
    """Placeholders among the new tokens are counted against the grids, with and without cache."""
    model, sample = converted(family, "mrope_i"), batch(family, [2, "image", 3])
    first = model.generate(**sample.inputs, max_new_tokens=2, return_dict_in_generate=True)
    longer = sample.with_tokens(torch.tensor([[5, 6, VIDEO, 7]]))
    longer.pop("pixel_values")
    with pytest.raises(InputError, match="video placeholders exceed the video grids"):
        model.generate(**longer, **{CACHE: first[CACHE]}, max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_from_embeddings(family):
    """A prompt of embeddings, with images detected by their embedding, generates the tokens of a prompt of tokens."""
    model, sample = converted(family, "v2pe(stride=4)"), batch(family, [3, "image", 4, "wide", 2])
    embeds = model.get_input_embeddings()(sample["input_ids"])
    expected = model.generate(**sample.inputs, **SETTINGS)[:, sample["input_ids"].shape[1] :]
    inputs = sample.without("input_ids", "mm_token_type_ids")
    assert torch.equal(model.generate(inputs_embeds=embeds, **inputs, **SETTINGS), expected)
