"""Every family with every scheme: logits against the stock model with explicit angles."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import (
    HOST_SCHEME,
    converted,
    copy_of,
    scheme_of,
    stock,
    wanted_logits,
)
from tests.hosts.transformers.tiny import FAMILIES, IMAGE, QWEN, VIDEO, WITH_VIDEO, batch, needs
from tests.products import partly
from vispe.errors import InputError, OptionError, ShapeError
from vispe.multimodal import Image, Stream, Text, list_schemes

PROMPTS = {
    "text": [[5], [8]],
    "image": [[3, "image", 4]],
    "several": [[2, "image", 1, "wide", 3]],
    "mixed": [[7], [3, "image", 4], [1, "wide", 2]],
    "end": [[4, "image"]],
}


def everything(family, padding="left"):
    """Return a batch with all kinds of inputs of a family."""
    rows = [[7], [3, "image", 4, "wide", 2], [1, "wide", 5], ["image"]]
    return batch(family, *rows, *([[2, "video", 3]] if family in WITH_VIDEO else []), padding=padding)


def close(actual, expected, mask):
    """Assert that logits of tokens without padding agree to rounding."""
    torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_models_support_all_prompts(family):
    prompts = PROMPTS | ({"video": [[3, "video", 4], [6]]} if family in WITH_VIDEO else {})
    for rows in prompts.values():
        sample = batch(family, *rows)
        with torch.no_grad():
            assert stock(family)(**sample.inputs).logits.isfinite().all()
    tokens = stock(family).generate(**sample.inputs, max_new_tokens=2, do_sample=False)
    assert tokens.shape == (len(rows), sample.stream.shape[1] + 2)


@partly(2)
@cases("scheme", list_schemes())
@cases("family", FAMILIES)
def test_logits_equal_those_of_explicit_angles(family, scheme):
    sample = everything(family)
    with torch.no_grad():
        actual = converted(family, scheme)(**sample.inputs).logits
    close(actual, wanted_logits(family, scheme, sample), sample.stream.mask)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mhrope", "mhrope(sections=[0,1,0])", "v2pe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_key_heads_and_padding_on_the_right(family, spec):
    sample = everything(family, "right")
    with torch.no_grad():
        actual = converted(family, spec, 2)(**sample.inputs).logits
    close(actual, wanted_logits(family, spec, sample, 2), sample.stream.mask)


@cases("family", FAMILIES)
def test_logits_depend_on_positions(family):
    sample = batch(family, [3, "image", 4, "wide", 2])
    with torch.no_grad():
        one, other = (converted(family, s)(**sample.inputs).logits[0, -1] for s in ("rope1d", "mrope_i"))
    assert (one - other).abs().max() > 0.05


@cases("family", FAMILIES)
def test_the_scheme_of_the_stock_model_is_exact(family):
    scheme = f"{HOST_SCHEME[family]}(after=side)" if family in QWEN else "rope1d"
    if family == "qwen2_5_vl":
        needs("5.18", "the stock model rounds the seconds between frames down")
        scheme = "mrope(after=side,tokens_per_second=4)"
    sample = everything(family)
    model = converted(family, scheme)
    keys = (sample["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ids = {} if family in QWEN else {"position_ids": keys}  # without them the other families count padding
    actual, expected = model(**sample.inputs).logits, stock(family)(**sample.inputs, **ids).logits
    assert torch.equal(actual[sample.stream.mask], expected[sample.stream.mask])
    # of images without frames all rules of decoding agree
    prompt = batch(family, [7], [3, "image", 4, "wide", 2])
    actual, expected = (
        m.generate(**prompt.inputs, max_new_tokens=4, do_sample=False) for m in (model, stock(family))
    )
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["mrope_i", "v2pe"])
def test_coordinates_can_be_given(family, scheme):
    sample = everything(family)
    model = converted(family, scheme)
    ids = scheme_of(family, scheme).coordinates(sample.stream).ids
    keys = (sample["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(**sample.inputs).logits
    for position_ids in (ids, torch.cat([keys[None].double(), ids])):
        actual = model(**sample.inputs, position_ids=position_ids).logits
        close(actual, expected, sample.stream.mask)
    assert torch.equal(
        model(**sample.inputs, position_ids=keys).logits[sample.stream.mask], expected[sample.stream.mask]
    )
    with pytest.raises(ShapeError, match=r"position_ids must have the shape \(b, s\)"):
        model(**sample.inputs, position_ids=torch.zeros(9, *keys.shape))


@cases("family", FAMILIES)
def test_adjacent_images(family):
    """Without a token between them; the stock Qwen models merge them into one image and fail."""
    sample = batch(family, [2, "bare", "barewide", 3] if family in QWEN else [2, "image", "wide", 3])
    model = converted(family, "mrope_i")
    with torch.no_grad():
        actual = model(**sample.inputs).logits
        close(actual, wanted_logits(family, "mrope_i", sample), sample.stream.mask)
        if family in QWEN:
            with pytest.raises((RuntimeError, ValueError)):
                stock(family)(**sample.inputs)


def test_tiles_and_thumbnails_can_be_named():
    sample = batch("internvl", [2, "wide", 1, "image", 3])
    by_hand = Stream.of(
        [[Text(2), Text(1), Image(3, 3, (1, 2), "last"), Text(2), Text(1), Image(3, 3), Text(4)]]
    )
    sample.stream = by_hand
    model = converted("internvl", "rope_dhr")
    tiles = torch.tensor([[1, 2], [1, 1]])
    with torch.no_grad():
        actual = model(**sample.inputs, tile_grids=tiles).logits
        close(actual, wanted_logits("internvl", "rope_dhr", sample), sample.stream.mask)
        assert not torch.allclose(actual, model(**sample.inputs).logits, atol=1e-3)


@cases("family", FAMILIES)
def test_embeddings_instead_of_tokens(family):
    """Images are located by the token types, or by the embedding of their token."""
    sample = everything(family)
    model = converted(family, "mrope_i")
    types = (sample["input_ids"] == IMAGE).long() + 2 * (sample["input_ids"] == VIDEO).long()
    embeddings = model.get_input_embeddings()(sample["input_ids"])
    inputs = sample.without("input_ids", "mm_token_type_ids")
    expected = model(**sample.inputs).logits
    assert torch.equal(model(**inputs, inputs_embeds=embeddings, mm_token_type_ids=types).logits, expected)
    assert torch.equal(model(**inputs, inputs_embeds=embeddings).logits, expected)
    with pytest.raises(InputError, match=r"no token with the embedding of .* Pass these types"):
        model(**inputs, inputs_embeds=torch.zeros_like(embeddings))


def test_a_token_of_videos_without_a_video_is_text():
    """As in the stock model, whose vocabulary contains it like any other token."""
    sample = batch("llava_onevision", [3, "image", 4])
    model = converted("llava_onevision", "mrope_i")
    with torch.no_grad():
        at_word = model(**sample.inputs).logits[:, :-1]
        sample["input_ids"][0, -1] = VIDEO
        assert torch.equal(model(**sample.inputs).logits[:, :-1], at_word)


@cases("family", FAMILIES)
def test_the_error_names_unexpected_placeholders(family):
    sample = batch(family, [6], [3, "image", 4])
    at = (sample["input_ids"][1] == IMAGE).nonzero()[2, 0]
    sample["input_ids"][1, at] = 7
    with pytest.raises(InputError, match="Sample 1, segment"):
        converted(family, "mrope_i")(**sample.inputs)


@cases("family", FAMILIES)
def test_describe_names_the_scheme(family):
    text = vispe.describe(converted(family, "mrope_i(spatial_reset=true)"))
    assert "mrope_i(" in text
    assert "spatial_reset=true" in text
    assert "mrope_i" not in vispe.describe(stock(family))


@cases("spec", ["mrope(sections=[8,4,5])", "mrope(stride=0)"])
def test_an_invalid_spec_leaves_the_model_unchanged(spec):
    model = copy_of("llava")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(OptionError):
        vispe.convert(model, spec)
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(OptionError, match="keep_abs"):
        vispe.convert(model, "mrope_i", keep_abs=True)
    assert [type(m) for m in model.modules()] == classes
