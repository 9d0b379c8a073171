"""Images of any size with end-of-row tokens that no configuration names (Pixtral)."""

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_more_families import converted, logits
from tests.hosts.transformers.more import BREAK, SIZED, prompt, stock, text_part, vision_part
from tests.hosts.transformers.tiny import END, IMAGE, START, transformers
from vispe.errors import InputError
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.positions.call import LanguageCall
from vispe.multimodal import Image, Stream, Text, create_scheme


def test_end_of_row_tokens_are_in_the_column_after_their_row():
    """Patches keep rows and columns; an end-of-row token is in the column after the last patch of its row."""
    sample, model = prompt("mistral3"), converted("mistral3", "mrope_i")
    call = LanguageCall(model.model, sample.inputs["input_ids"], None, None, None, None, dict(sample.inputs))
    keys = torch.arange(sample.inputs["input_ids"].shape[1])[None]
    ids = call.coordinates(keys, torch.ones_like(keys, dtype=torch.bool), None)[0].ids[:, 0]
    tokens = sample.inputs["input_ids"][0]
    first = int((tokens == IMAGE).nonzero()[0, 0])
    assert tokens[first : first + 8].tolist() == [IMAGE] * 3 + [BREAK] + [IMAGE] * 3 + [END]
    assert ids[1, first : first + 8].sub(first).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ids[2, first : first + 8].sub(first).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert ids[:, first + 8].tolist() == [first + 4] * 3


def test_rows_without_end_tokens():
    """transformers' own tests have none."""
    inputs = dict(prompt("mistral3").inputs)
    tokens = inputs["input_ids"][0].tolist()
    remaining = [n for n, t in enumerate(tokens) if t != BREAK]
    inputs |= {n: inputs[n][:, remaining] for n in ("input_ids", "attention_mask")}
    segments = [Text(3), Image(2, 3), Text(5), Image(3, 2), Text(4)]
    ids = create_scheme("vrope").coordinates(Stream.of([segments])).ids
    model = converted("mistral3", "vrope")
    expected = logits(model, inputs | {"position_ids": ids})
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)


def test_an_image_of_one_row_is_followed_by_text():
    line = {"input_ids": torch.tensor([[5, IMAGE, IMAGE, IMAGE, BREAK, 6]])}
    line |= {"pixel_values": torch.randn(1, 3, 8, 24), "image_sizes": torch.tensor([[8, 24]])}
    model = converted("mistral3", "vrope")
    ids = create_scheme("vrope").coordinates(Stream.of([[Text(1), Image(1, 4), Text(1)]])).ids
    expected = logits(model, line | {"position_ids": ids})
    torch.testing.assert_close(logits(model, line), expected, rtol=1e-5, atol=1e-5)


def test_a_row_without_end_token_raises():
    inputs = dict(prompt("mistral3").inputs)
    at = int((inputs["input_ids"][0] == BREAK).nonzero()[0, 0])
    remaining = [n for n in range(inputs["input_ids"].shape[1]) if n != at]
    inputs |= {n: inputs[n][:, remaining] for n in ("input_ids", "attention_mask")}
    with pytest.raises(InputError, match=r"image 0 of 2 rows and 3 columns: .* need a token after every row"):
        converted("mistral3", "vrope")(**inputs)
    with pytest.raises(InputError, match="12 image placeholders are unknown, got no image_sizes"):
        converted("mistral3", "vrope")(**prompt("mistral3").inputs | {"image_sizes": None})


def test_end_of_row_tokens_of_pixtral_in_llava():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=text_part("mistral3"),
        vision_config=vision_part("mistral3"),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = [5, START, *(([IMAGE] * 6 + [BREAK]) * 4)[:-1], END, 7]
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": torch.randn(1, 3, 16, 24)}
    inputs["image_sizes"] = torch.tensor([[16, 24]])
    before = logits(model, inputs)
    assert torch.equal(logits(vispe.convert(copy.deepcopy(model), "rope1d"), inputs), before)
    positions = create_scheme("vrope").coordinates(Stream.of([[Text(2), Image(4, 7), Text(1)]])).ids
    model = vispe.convert(model, "vrope")
    expected = logits(model, inputs | {"position_ids": positions})
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-4)


def test_rows_and_columns_equal_those_of_the_pixels():
    for family in SIZED:
        sample, model, recorded = prompt(family).inputs, stock(family), []
        hook = language_model_of(model.model).layers[0].register_forward_pre_hook(
            lambda _, args, kw, recorded=recorded: recorded.append(args[0] if args else kw["hidden_states"]),
            with_kwargs=True,
        )  # fmt: skip
        placeholders = sample["input_ids"][0] == IMAGE
        logits(model, sample)
        changed = []
        for row in range(2):
            for column in range(3):
                other = sample["pixel_values"].clone()
                other[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 3 * torch.randn(3, 8, 8)
                logits(model, sample | {"pixel_values": other})
                changed.append(int((recorded[-1] - recorded[0])[0].norm(dim=-1)[placeholders][:6].argmax()))
        hook.remove()
        assert changed == list(range(6))


def run_on(position):
    """Return Mistral 3's prompt with a placeholder at a token, and the sample, token and length of its run."""
    inputs = dict(prompt("mistral3").inputs)
    inputs["input_ids"] = inputs["input_ids"].clone()
    tokens = inputs["input_ids"][0]
    tokens[position] = IMAGE
    first = last = position % len(tokens)
    while first and tokens[first - 1] == IMAGE:
        first -= 1
    while last + 1 < len(tokens) and tokens[last + 1] == IMAGE:
        last += 1
    return inputs, first, last - first + 1


@cases("position", [0, 11, -1])
def test_the_error_names_the_run_of_unexpected_length(position):
    """A model may generate the image token before, between or after its images."""
    inputs, token, count = run_on(position)
    with pytest.raises(InputError, match=f"Sample 0, token {token} .*: {count} adjacent image placeholders"):
        converted("mistral3", "vrope")(**inputs)


def test_the_error_names_a_missing_end_token():
    inputs = dict(prompt("mistral3").inputs)
    at = int((inputs["input_ids"][0] == BREAK).nonzero()[0, 0])
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, at] = IMAGE
    with pytest.raises(
        InputError, match=r"token 3 .*: 7 adjacent image placeholders, but image 0 has 2 rows"
    ):
        converted("mistral3", "vrope")(**inputs)
