"""Every family with every scheme: logits against the stock model with angles written down by hand."""

import pytest
import torch

import vispe
from tests.hosts.transformers.reference import (
    HOST_SCHEME,
    converted,
    copy_of,
    scheme_of,
    stock,
    wanted_logits,
)
from tests.hosts.transformers.tiny import FAMILIES, IMAGE, QWEN, VIDEO, WITH_VIDEO, batch
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
    """A batch with all that a family knows."""
    rows = [[7], [3, "image", 4, "wide", 2], [1, "wide", 5], ["image"]]
    return batch(family, *rows, *([[2, "video", 3]] if family in WITH_VIDEO else []), padding=padding)


def close(found, wanted, mask):
    """Logits of tokens that are not padding agree to rounding."""
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_models_take_all_prompts(family):
    prompts = PROMPTS | ({"video": [[3, "video", 4], [6]]} if family in WITH_VIDEO else {})
    for rows in prompts.values():
        given = batch(family, *rows)
        with torch.no_grad():
            assert stock(family)(**given.inputs).logits.isfinite().all()
    said = stock(family).generate(**given.inputs, max_new_tokens=2, do_sample=False)
    assert said.shape == (len(rows), given.stream.shape[1] + 2)


@pytest.mark.parametrize("scheme", list_schemes())
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_coordinates(family, scheme):
    given = everything(family)
    with torch.no_grad():
        found = converted(family, scheme)(**given.inputs).logits
    close(found, wanted_logits(family, scheme, given), given.stream.mask)


@pytest.mark.parametrize("spec", ["mhrope", "mhrope(sections=[0,1,0])", "v2pe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_key_heads_and_padding_on_the_right(family, spec):
    given = everything(family, "right")
    with torch.no_grad():
        found = converted(family, spec, 2)(**given.inputs).logits
    close(found, wanted_logits(family, spec, given, 2), given.stream.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_matter(family):
    given = batch(family, [3, "image", 4, "wide", 2])
    with torch.no_grad():
        one, other = (converted(family, s)(**given.inputs).logits[0, -1] for s in ("rope1d", "mrope_i"))
    assert (one - other).abs().max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scheme_of_the_model_itself_changes_nothing(family):
    own = f"{HOST_SCHEME[family]}(after=side)" if family in QWEN else "rope1d"
    if family == "qwen2_5_vl":
        own = "mrope(after=side,tokens_per_second=4)"
    given = everything(family)
    model = converted(family, own)
    keys = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ids = {} if family in QWEN else {"position_ids": keys}  # without them the other families count padding
    found, wanted = model(**given.inputs).logits, stock(family)(**given.inputs, **ids).logits
    assert torch.equal(found[given.stream.mask], wanted[given.stream.mask])
    prompt = batch(
        family, [7], [3, "image", 4, "wide", 2]
    )  # of pictures without frames all rules of decoding agree
    found, wanted = (
        m.generate(**prompt.inputs, max_new_tokens=4, do_sample=False) for m in (model, stock(family))
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["mrope_i", "v2pe"])
def test_coordinates_can_be_given(family, scheme):
    given = everything(family)
    model = converted(family, scheme)
    ids = scheme_of(family, scheme).coordinates(given.stream).ids
    keys = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    wanted = model(**given.inputs).logits
    for position_ids in (ids, torch.cat([keys[None].double(), ids])):
        found = model(**given.inputs, position_ids=position_ids).logits
        close(found, wanted, given.stream.mask)
    assert torch.equal(
        model(**given.inputs, position_ids=keys).logits[given.stream.mask], wanted[given.stream.mask]
    )
    with pytest.raises(ShapeError, match=r"position_ids needs the shape \(b, s\)"):
        model(**given.inputs, position_ids=torch.zeros(9, *keys.shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_may_touch(family):
    """Without a token between them; the stock Qwen models take them for one picture and fail."""
    given = batch(family, [2, "bare", "barewide", 3] if family in QWEN else [2, "image", "wide", 3])
    model = converted(family, "mrope_i")
    with torch.no_grad():
        found = model(**given.inputs).logits
        close(found, wanted_logits(family, "mrope_i", given), given.stream.mask)
        if family in QWEN:
            with pytest.raises((RuntimeError, ValueError)):
                stock(family)(**given.inputs)


def test_tiles_and_thumbnails_can_be_named():
    given = batch("internvl", [2, "wide", 1, "image", 3])
    by_hand = Stream.of(
        [[Text(2), Text(1), Image(3, 3, (1, 2), "last"), Text(2), Text(1), Image(3, 3), Text(4)]]
    )
    given.stream = by_hand
    model = converted("internvl", "rope_dhr")
    tiles = torch.tensor([[1, 2], [1, 1]])
    with torch.no_grad():
        found = model(**given.inputs, tile_grids=tiles).logits
        close(found, wanted_logits("internvl", "rope_dhr", given), given.stream.mask)
        assert not torch.allclose(found, model(**given.inputs).logits, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_instead_of_tokens(family):
    """Pictures are where the types say, or where the embedding is that of their token."""
    given = everything(family)
    model = converted(family, "mrope_i")
    types = (given["input_ids"] == IMAGE).long() + 2 * (given["input_ids"] == VIDEO).long()
    embeddings = model.get_input_embeddings()(given["input_ids"])
    inputs = given.without("input_ids", "mm_token_type_ids")
    wanted = model(**given.inputs).logits
    assert torch.equal(model(**inputs, inputs_embeds=embeddings, mm_token_type_ids=types).logits, wanted)
    assert torch.equal(model(**inputs, inputs_embeds=embeddings).logits, wanted)
    with pytest.raises(InputError, match=r"no token has the embedding of .* give mm_token_type_ids"):
        model(**inputs, inputs_embeds=torch.zeros_like(embeddings))


def test_a_token_of_videos_without_a_video_is_text():
    """As in the model of before, whose vocabulary has it like any other."""
    given = batch("llava_onevision", [3, "image", 4])
    model = converted("llava_onevision", "mrope_i")
    with torch.no_grad():
        at_word = model(**given.inputs).logits[:, :-1]
        given["input_ids"][0, -1] = VIDEO
        assert torch.equal(model(**given.inputs).logits[:, :-1], at_word)


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_that_do_not_fit_are_named(family):
    given = batch(family, [6], [3, "image", 4])
    at = (given["input_ids"][1] == IMAGE).nonzero()[2, 0]
    given["input_ids"][1, at] = 7
    with pytest.raises(InputError, match="Sample 1, segment"):
        converted(family, "mrope_i")(**given.inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_names_the_scheme(family):
    text = vispe.describe(converted(family, "mrope_i(spatial_reset=true)"))
    assert "mrope_i(" in text
    assert "spatial_reset=true" in text
    assert "mrope_i" not in vispe.describe(stock(family))


@pytest.mark.parametrize("spec", ["mrope(sections=[8,4,5])", "mrope(stride=0)"])
def test_a_wrong_spec_leaves_the_model_alone(spec):
    model = copy_of("llava")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(OptionError):
        vispe.convert(model, spec)
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(OptionError, match="keep_abs"):
        vispe.convert(model, "mrope_i", keep_abs=True)
    assert [type(m) for m in model.modules()] == classes
