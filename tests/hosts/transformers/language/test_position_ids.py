"""Position ids of the caller are validated against the tokens: shape, batch, axes, layout, dtype and values."""

import copy
import inspect
import pickle

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import converted
from tests.hosts.transformers.tiny import CACHE, FAMILIES, QWEN, batch, transformers
from tests.products import partly
from vispe.errors import InputError, ShapeError
from vispe.hosts.transformers.language.positions.position_ids import TokenPositions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SPECS = ("mrope_i", "vrope", "v2pe", "videorope")
AXES = {"mrope_i": 3, "vrope": 4, "v2pe": 1, "videorope": 3}
FORMS = {
    "one short": lambda x: x[..., 1:],
    "two too many": lambda x: torch.cat([x, x[..., :2]], -1),
    "a row too many": lambda x: torch.cat([x, x[..., :1, :]], -2),
    "a row missing": lambda x: x[..., :-1, :],
    "an axis too many": lambda x: x.expand(x.shape[0] + 2, *x.shape[-2:]) if len(x) == 1 else x[[0, 0, *range(len(x))]],
    "another dimension": lambda x: x[None, None],
    "a vector": lambda x: x.flatten(0, -2)[0],
}  # fmt: skip


def prompt(family):
    """Return three rows of different lengths, one with an image."""
    return batch(family, [3, "image", 4], [7], [5])


def coordinates(model, sample, mask):
    """Return the coordinates of a prompt (axes, b, s), and one-dimensional position ids (b, s)."""
    scheme = model.model.vispe_scheme
    return scheme.coordinates(sample.stream).ids, (mask.cumsum(1) - 1).clamp(min=0)


def step(model, sample, length=2, **first):
    """Return the inputs of text tokens after a prompt in the cache."""
    with torch.no_grad():
        cache = model(**sample.inputs, use_cache=True, **first)[CACHE]
    recorded = torch.cat([sample["attention_mask"], torch.ones(3, length, dtype=torch.long)], 1)
    return {"input_ids": torch.full((3, length), 7), "attention_mask": recorded, CACHE: cache}


def calls(model, sample):
    """Yield the inputs of several kinds of calls with valid coordinates and one-dimensional position ids."""
    ids, keys = coordinates(model, sample, sample["attention_mask"])
    yield sample.inputs, ids, keys
    embeds = model.get_input_embeddings()(sample["input_ids"]).detach()
    yield {"inputs_embeds": embeds, "attention_mask": sample["attention_mask"]}, ids, keys
    static = transformers.StaticCache(config=model.config.get_text_config(), max_cache_len=64)
    for cache in ({}, {CACHE: static}):
        for length in (1, 3):
            inputs = step(model, sample, length, **cache)
            text = torch.arange(length).expand(3, length) + 9
            yield inputs, text.expand(len(ids), 3, length).double(), text
            if cache:
                break  # the cache is one object


@cases("spec", SPECS)
@cases("family", ["qwen2_5_vl", "llava"])
@torch.no_grad()
def test_invalid_shapes_are_rejected_in_every_kind_of_call(family, spec):
    model, sample = converted(family, spec), prompt(family)
    for inputs, ids, keys in calls(model, sample):
        length = ids.shape[-1]
        for base in (ids, keys, torch.cat([keys[None].double(), ids])):
            for name, form in FORMS.items():
                wrong = form(base)
                fits = (
                    wrong.shape[-2:] == keys.shape
                    and wrong.ndim == 3
                    and len(wrong) in (AXES[spec], AXES[spec] + 1)
                )
                if fits or wrong.shape[-1:] == (0,) or (name == "a vector" and length == 1):
                    continue
                with pytest.raises(ShapeError, match=r"position_ids must have the shape \(b, s\)") as error:
                    model(**inputs, position_ids=wrong)
                assert str(tuple(wrong.shape)) in str(error.value)
                assert f"(3, {length})" in str(error.value)


@partly(2)
@cases("spec", SPECS)
@cases("family", FAMILIES)
@torch.no_grad()
def test_ids_of_one_row_are_broadcast(family, spec):
    model, sample = converted(family, spec), batch(family, [6], [6])
    keys = torch.arange(6)[None]
    ids = keys.expand(AXES[spec], 1, 6)
    expected = model(**sample.inputs, position_ids=keys.expand(2, 6)).logits
    requested = [keys, ids, torch.cat([keys[None], ids])]
    # (2, 1, s) of two rows and one axis has two meanings
    requested = requested[:2] if spec == "v2pe" else requested
    for position_ids in requested:
        assert torch.equal(model(**sample.inputs, position_ids=position_ids).logits, expected)


@partly(1)
@cases("spec", SPECS)
@cases("rows", [1, 2, 3, 4, 5])
@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_the_batch_first_layout_is_rejected(family, rows, spec):
    """verl stores ids as (b, axes, s); if b is the number of axes, the shape is ambiguous."""
    items = [[3, "image", 4], [9], [5], [2, "image", 1], [1]][:rows]
    model, sample = converted(family, spec), batch(family, *items)
    ids, keys = coordinates(model, sample, sample["attention_mask"])
    embeds = model.get_input_embeddings()(sample["input_ids"]).detach()
    text = {"inputs_embeds": embeds, "attention_mask": sample["attention_mask"]}
    for inputs in (sample.inputs, {k: sample[k] for k in ("input_ids", "attention_mask")}, text):
        for position_ids in (ids, torch.cat([keys[None].double(), ids])):
            valid = sample["attention_mask"].bool()
            if inputs is sample.inputs:
                expected = model(**inputs).logits[valid]
                torch.testing.assert_close(
                    model(**inputs, position_ids=position_ids).logits[valid], expected, rtol=1e-5, atol=1e-5
                )
            else:
                model(**inputs, position_ids=position_ids)
            rotated = position_ids.movedim(0, 1)
            if rotated.shape == position_ids.shape and torch.equal(rotated, position_ids):
                continue
            if inputs is text and len(rotated) == len(position_ids):
                continue  # the contents of the sequence are unknown
            with pytest.raises((ShapeError, InputError), match=r"position_ids") as error:
                model(**inputs, position_ids=rotated)
            if isinstance(error.value, ShapeError):
                assert "not (b, axes, s)" in str(error.value)


@cases("spec", ["mrope_i", "vrope"])
@torch.no_grad()
def test_the_batch_first_layout_with_a_cache_and_in_the_language_model(spec):
    rows = AXES[spec]
    model = converted("qwen2_vl", spec)
    sample = batch("qwen2_vl", *[[n + 2, "image", 2] for n in range(rows)])
    cache = model(**sample.inputs, use_cache=True)[CACHE]
    recorded = torch.cat([sample["attention_mask"], torch.ones(rows, 2, dtype=torch.long)], 1)
    ids = (sample["attention_mask"].sum(1)[:, None] + torch.arange(2)).expand(rows, rows, 2)
    inputs = {"input_ids": torch.full((rows, 2), 7), "attention_mask": recorded}
    with pytest.raises(ShapeError, match=r"not \(b, axes, s\)"):
        model(**inputs, **{CACHE: copy.deepcopy(cache)}, position_ids=ids.movedim(0, 1))
    model(**inputs, **{CACHE: cache}, position_ids=ids)
    tokens = torch.full((rows, 5), 7)
    ids = (torch.arange(5) + 4 * torch.arange(rows)[:, None]).expand(rows, rows, 5)
    text = model.model.language_model
    with pytest.raises(ShapeError, match=r"not \(b, axes, s\)"):
        text(input_ids=tokens, position_ids=ids.movedim(0, 1))
    text(input_ids=tokens, position_ids=ids)


@cases("family", ["qwen2_vl", "qwen3_vl", "internvl"])
@torch.no_grad()
def test_dtypes_and_values(family):
    model, sample = converted(family, "mrope_i"), prompt(family)
    ids, keys = coordinates(model, sample, sample["attention_mask"])
    valid = sample["attention_mask"].bool()
    expected = model(**sample.inputs).logits[valid]
    for kind in (torch.int32, torch.uint8, torch.int16, torch.float32, torch.float64):
        for position_ids in (keys, ids, torch.cat([keys[None].double(), ids])):
            assert torch.equal(
                model(**sample.inputs, position_ids=position_ids.to(kind)).logits[valid], expected
            )
    below = keys.masked_fill(~valid, -1)  # cumsum(-1) - 1, as it is often written
    assert torch.equal(model(**sample.inputs, position_ids=below).logits[valid], expected)
    early = model(**sample.inputs, position_ids=keys - 5).logits[valid]
    torch.testing.assert_close(early, expected, rtol=1e-4, atol=1e-4)
    wrong = {
        "must be a tensor, got list": keys.tolist(),
        "got torch.bool": keys.bool(),
        "got torch.complex64": keys.to(torch.complex64),
        "must be integers, got 0.5": keys.float() + 0.5,
        "must be finite": ids.masked_fill(ids == 3, torch.nan),
        "finite, got NaN or infinity": keys.float().masked_fill(keys == 3, torch.inf),
        "rounds positions above 256": ids.bfloat16(),
        "rounds positions above 2048": ids.half(),
    }
    for words, position_ids in wrong.items():
        with pytest.raises(InputError, match=words):
            model(**sample.inputs, position_ids=position_ids)
        if torch.is_tensor(position_ids):
            last = position_ids[..., -1:] * torch.nan if "finite" in words else position_ids[..., :1]
            with pytest.raises(InputError, match=words):
                model(**step(model, sample, 1), position_ids=last)


@cases("family", QWEN)
def test_generate_validates_ids(family):
    model, sample = converted(family, "mrope_i"), prompt(family)
    ids, _ = coordinates(model, sample, sample["attention_mask"])
    for wrong in (ids[..., 1:], ids[:, :2], ids.movedim(0, 1)):
        with pytest.raises(ShapeError, match="position_ids"):
            model.generate(**sample.inputs, position_ids=wrong, max_new_tokens=2, do_sample=False)


def test_type_of_coordinates_between_modules():
    keys, ids = torch.arange(4).expand(2, 4), torch.rand(3, 2, 4, dtype=torch.float64)
    first = TokenPositions(keys, ids)
    for same in (
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
        first.to("cpu"),
        first.to(torch.bfloat16),
    ):
        assert torch.equal(same.token_index, keys)
        assert torch.equal(same.coordinates, ids)
        assert same.coordinates.dtype == torch.float64
        assert same.token_attributes is None
    assert not hasattr(first, "__dict__")
    assert "TokenPositions" in dict(
        inspect.getmembers(vispe.hosts.transformers.language.positions.position_ids)
    )


@partly(1)
@cases("family", ["qwen2_vl", "llava"])
@cases("spec", ["mrope_i", "v2pe", "bilevel"])
@cases("padding", ["left", "right"])
@torch.no_grad()
def test_coordinates_of_the_caller_are_continued(family, spec, padding):
    """Rows may be padded on either side and end with an image; a second turn may have an image."""
    model = converted(family, spec)
    first = batch(family, [3, "image", 4], [2], [4, "bare" if family in QWEN else "image"], padding=padding)
    word = torch.tensor([[5, 6], [7, 8], [9, 10]])
    recorded = torch.cat([first["attention_mask"], torch.ones_like(word)], 1)
    ids, _ = coordinates(model, first, first["attention_mask"])
    results = []
    for position_ids in ({}, {"position_ids": ids}):
        cache = model(**first.inputs, **position_ids)[CACHE]
        results.append(model(input_ids=word, attention_mask=recorded, **{CACHE: cache}).logits)
    assert torch.equal(*results)


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_coordinates_of_the_caller_for_a_second_image(family):
    model, first, turn = converted(family, "mrope_i"), batch(family, [3]), batch(family, [2, "image", 3])
    scheme, words = model.model.vispe_scheme, torch.tensor([[5, 6]])
    ids = scheme.coordinates(turn.stream, start=torch.tensor([3.0])).ids
    inputs, results = turn.without("attention_mask"), []
    for position_ids in ({}, {"position_ids": ids}, {"position_ids": ids + 0.5}):
        cache = model(**first.inputs)[CACHE]
        model(**inputs, **position_ids, **{CACHE: cache})
        results.append(model(input_ids=words, **{CACHE: cache}).logits)
    assert torch.equal(*results[:2])
    text = scheme.coordinates(turn.stream, start=torch.tensor([3.0])).next + torch.arange(2) + 0.5
    cache = model(**first.inputs)[CACHE]
    model(**inputs, position_ids=ids + 0.5, **{CACHE: cache})
    expected = model(input_ids=words, position_ids=text.expand(3, 1, 2), **{CACHE: cache}).logits
    assert torch.equal(results[2], expected)


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_text_after_custom_coordinates_of_an_image_is_rejected(family):
    """The position after an image follows from the scheme; for other coordinates it is unknown."""
    model, sample = converted(family, "mrope_i"), batch(family, [3, "bare" if family in QWEN else "image"])
    ids, _ = coordinates(model, sample, sample["attention_mask"])
    for ids_of_image in (ids * 1.5, ids / 2):
        cache = model(**sample.inputs, position_ids=ids_of_image)[CACHE]
        for tokens in (torch.tensor([[5]]), torch.tensor([[5, 6]])):
            with pytest.raises(InputError, match="The position after the cached tokens is unknown"):
                model(input_ids=tokens, **{CACHE: cache})
        with pytest.raises(InputError, match="The position after the cached tokens is unknown"):
            model.generate(**sample.inputs, position_ids=ids_of_image, max_new_tokens=2, do_sample=False)
        model(input_ids=torch.tensor([[5]]), position_ids=torch.full((3, 1, 1), 9.0), **{CACHE: cache})
        model(input_ids=torch.tensor([[5]]), **{CACHE: cache})


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_coordinates_of_text_with_padding_are_continued(family):
    model, sample = converted(family, "mrope_i"), batch(family, [3], [7])
    ids, _ = coordinates(model, sample, sample["attention_mask"])
    words = torch.tensor([[5, 6], [7, 8]])
    longer = sample.with_tokens(words)
    cache = model(**sample.inputs, position_ids=ids)[CACHE]
    actual = model(input_ids=words, attention_mask=longer["attention_mask"], **{CACHE: cache}).logits
    keys = (longer["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(**longer, position_ids=keys).logits[:, -2:]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@cases("family", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_coordinates_that_end_with_an_image_and_no_cache(family):
    model, sample = converted(family, "mrope_i"), batch(family, [3, "bare" if family in QWEN else "image"])
    ids, _ = coordinates(model, sample, sample["attention_mask"])
    options = {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(InputError, match="must end with text"):
        model.generate(**sample.inputs, position_ids=ids, use_cache=False, **options)
    longer = sample.with_tokens(torch.tensor([[5]]))
    text = model.model.vispe_scheme.coordinates(sample.stream).next.expand(3, 1, 1)
    ids = torch.cat([ids, text], 2)
    expected = model.generate(**longer, **options)
    assert torch.equal(model.generate(**longer, position_ids=ids, use_cache=False, **options), expected)
